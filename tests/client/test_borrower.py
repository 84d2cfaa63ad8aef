"""Borrowing: trajectories made from places, under locks that outlive the daemon, not the client."""

import gc
import random
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import beside

from shmbus import Bus, BusClosedError, Producer
from shmbus.control import messages
from shmbus.segment import lifecycle
from shmbus_ext import _core


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, "1MiB", max_producers=4) as made:
        yield made


@pytest.fixture
def reader(bus: Bus) -> Iterator[_core.Reader]:
    reader = _core.Reader(lifecycle.open_segment(bus.name), "test")
    reader.lend()
    yield reader
    reader.close()


@pytest.fixture
def borrower(bus: Bus) -> Iterator[_core.Borrower]:
    borrower = _core.Borrower(lifecycle.open_segment(bus.name, read_only=True))
    yield borrower
    borrower.close()


def put(bus: Bus, count: int, tokens: int = 100) -> None:
    with Producer(bus.name) as producer:
        for index in range(count):
            producer.put(
                "prompt", group_size=count, index=index, score=index / 2, policy_version=index,
                tokens=np.arange(tokens, dtype=np.int32) + index, meta={"index": index},
            )  # fmt: skip


def receive(
    borrower: _core.Borrower, granted: list[messages.Granted]
) -> tuple[list[_core.ClientLease], list[int]]:
    connection, daemon = socket.socketpair()
    with connection, daemon:
        received = borrower.receive(granted, -1, {}, connection.fileno())
    borrower.ready.clear()
    return received


def borrow(borrower: _core.Borrower, places: bytes) -> _core.ClientLease:
    granted = messages.Granted(number=7, size=len(places) // _core.PLACE_BYTES, places=places)
    leases, refused = receive(borrower, [granted])
    assert not refused
    (lease,) = leases
    return lease


def view_locks(bus: Bus) -> int:
    segment = lifecycle.open_segment(bus.name)
    held = sum(count for _, count in segment.locks_held(0))
    segment.close()
    return held


def lease_locks(bus: Bus, client: int = 0) -> int:
    segment = lifecycle.open_segment(bus.name)
    held = sum(count for _, count in segment.locks_held(1 + client))
    segment.close()
    return held


def refusals(borrower: _core.Borrower, places: bytes) -> list[int]:
    leases, refused = receive(borrower, [messages.Granted(number=3, size=1, places=places)])
    assert not leases
    return refused


def test_a_bad_place_is_refused(bus: Bus, reader: _core.Reader, borrower: _core.Borrower) -> None:
    put(bus, 1)
    (good,) = struct.iter_unpack("=IIQQ", _core.places(reader.poll(1)))
    extents = lifecycle.open_segment(bus.name).extent_count
    for at, value in [
        (0, extents), (0, 2**32 - 1), (1, good[1] + 1), (2, 63), (2, 2**63), (2, 64), (3, 64),
        (3, 2**64 - 64), (3, good[3] + 64), (0, extents - 1),
    ]:  # fmt: skip
        forged = list(good)
        forged[at] = value
        assert refusals(borrower, struct.pack("=IIQQ", *forged)) == [3]
    assert refusals(borrower, struct.pack("=IIQQ", *good)[:-1]) == [3]
    assert refusals(borrower, b"") == [3]
    assert lease_locks(bus) == 0


def test_borrowed_space_is_kept(bus: Bus, reader: _core.Reader, borrower: _core.Borrower) -> None:
    put(bus, 4, tokens=40_000)
    found = reader.poll(4)
    lease = borrow(borrower, _core.places(found))
    ours = lease.samples
    view = ours[2]["tokens"]
    copy = view.copy()
    assert view_locks(bus) == 1
    reader.release(found, _core.ACKED)
    borrower.end(lease, _core.ACKED)
    with pytest.raises(BusClosedError, match="acknowledged"):
        ours[0]["tokens"]
    # Every byte of the bus gets new content, except for the run under the view.
    with Producer(bus.name) as producer:
        for round_ in range(30):
            producer.put(
                str(round_), group_size=1, index=0, tokens=np.full(40_000, -1, np.int32), timeout=60
            )
            found = reader.poll(10)
            reader.release(found, _core.ACKED)
    assert np.array_equal(view, copy)
    assert reader.segment.free_extents() < reader.segment.extent_count - 2
    del view
    gc.collect()
    assert view_locks(bus) == 0
    del found
    reader.sweep()
    held = reader.segment.extent_count - reader.segment.free_extents()
    assert held <= 41  # the run that the last producer's lane ended with, at most


@pytest.mark.parametrize("seed", range(10))
def test_exactly_the_runs_that_nobody_looks_at_are_free(
    bus: Bus, reader: _core.Reader, borrower: _core.Borrower, seed: int
) -> None:
    draw = random.Random(seed)
    other = _core.Borrower(lifecycle.open_segment(bus.name, read_only=True))
    # A record a run: no two fit into an extent.
    count = draw.randrange(1, reader.segment.extent_count - 2)
    with Producer(bus.name) as producer:
        for index in range(count):
            producer.put("g", group_size=count, index=index, tokens=np.zeros(800, np.int32))
    found = reader.poll(count)
    assert not reader.poll(1)  # the last run is walked to its end
    share = draw.random()
    views = {}
    for at, trajectory in enumerate(found):
        if draw.random() < share:
            holder = draw.choice([borrower, other])
            views[at] = borrow(holder, _core.places([trajectory])).samples[0]["tokens"]
    reader.release(found, _core.ACKED)
    beside = set()
    while True:
        reader.tidy()
        held = reader.segment.extent_count - reader.segment.free_extents()
        beside.add(held - len(views))
        assert view_locks(bus) == len(views)
        if not views:
            break
        for at in draw.sample(sorted(views), draw.randrange(1, len(views) + 1)):
            del views[at]
    # The mover's spare and the last producer's run, in every round.
    assert len(beside) == 1 and beside.pop() <= 2
    other.close()


def test_late_views_block_nobody(bus: Bus, reader: _core.Reader, borrower: _core.Borrower) -> None:
    # The reader only sleeps and wakes: no message reports a view's end.
    rounds = 40 * reader.segment.extent_count
    views: list[np.ndarray] = []
    looks = taken = 0
    with beside(put_singles, bus.name, rounds):
        while taken < rounds:
            found = reader.poll(64)
            if not found:
                reader.wait(1.0)
                looks += 1
                continue
            taken += len(found)
            lease = borrow(borrower, _core.places(found))
            views = [t["tokens"] for t in lease.samples]
            reader.release(found, _core.ACKED)
            borrower.forget([lease])
    assert len(views) and looks < taken


def put_singles(name: str, count: int) -> None:
    with Producer(name) as producer:
        for index in range(count):
            producer.put(str(index), group_size=1, index=0, tokens=np.zeros(800, np.int32))


def test_leases_follow_the_client(bus: Bus, reader: _core.Reader, borrower: _core.Borrower) -> None:
    put(bus, 3)
    places = _core.places(reader.poll(3))
    leases = [borrow(borrower, places) for _ in range(2)]
    assert lease_locks(bus, 0) == 1
    borrower.set_client(7)
    assert lease_locks(bus, 0) == 0 and lease_locks(bus, 7) == 1
    borrower.forget(leases[:1])
    assert lease_locks(bus, 7) == 1
    borrower.forget(leases)
    assert lease_locks(bus, 7) == 0
    with pytest.raises(SystemError):
        borrower.set_client(_core.MAX_CLIENTS)


def locked(segment: _core.Segment, which: int) -> set[int]:
    return {e for first, count in segment.locks_held(which) for e in range(first, first + count)}


def test_exactly_the_extents_of_leases_and_of_views_are_locked(
    bus: Bus, reader: _core.Reader, borrower: _core.Borrower, seed: int
) -> None:
    draw = random.Random(seed)
    with Producer(bus.name) as producer:
        # From a few records an extent to a record of several extents.
        for index in range(120):
            tokens = draw.choice([50, 200, 700, 3000])
            producer.put(str(index), group_size=1, index=0, tokens=np.zeros(tokens, np.int32))
    found = reader.poll(120)
    extents = [place[0] for place in struct.iter_unpack("=IIQQ", _core.places(found))]
    other = lifecycle.open_segment(bus.name)
    leases: dict[int, tuple[set[int], _core.ClientLease]] = {}
    views: dict[int, tuple[int, np.ndarray]] = {}
    client = number = 0
    for _ in range(150):
        step = draw.randrange(5)
        if step == 0:
            grants, at = [], {}
            for _ in range(draw.randrange(1, 9)):
                number += 1
                at[number] = draw.sample(range(120), draw.randrange(1, 9))
                places = _core.places([found[i] for i in at[number]])
                grants.append(messages.Granted(number=number, size=8, places=places))
            # A failed record leaves the locks of further records alone.
            grants.insert(0, messages.Granted(number=0, size=1, places=grants[-1].places[:24] * 2))
            grants[0].places = grants[0].places[:28] + b"\xff" + grants[0].places[29:]
            fresh, refused = receive(borrower, grants)
            assert refused == [0] and [lease.number for lease in fresh] == list(at)
            for lease in fresh:
                leases[lease.number] = ({extents[i] for i in at[lease.number]}, lease)
        elif step in (1, 3) and leases:
            count = draw.randrange(1, len(leases) + 1)
            over = [leases.pop(n)[1] for n in draw.sample(sorted(leases), count)]
            for lease in over:
                borrower.end(lease, _core.ACKED)
            borrower.forget(over)
        elif step == 2 and leases:
            sample = draw.choice(leases[draw.choice(list(leases))][1].samples)
            views[len(views)] = (extents[int(sample.instance_id)], sample["tokens"])
        elif step == 4:
            client = draw.randrange(4)
            borrower.set_client(client)
        if not leases:
            views.clear()
        assert locked(other, 0) == {extent for extent, _ in views.values()}
        held = {extent for at, _ in leases.values() for extent in at}
        assert locked(other, 1 + client) == held
    other.close()


def test_a_read_only_mappings_policy_version_is_fixed(bus: Bus, borrower: _core.Borrower) -> None:
    with pytest.raises(TypeError, match="read-only"):
        borrower.segment.policy_version = 3
    with pytest.raises(OSError):
        _core.Reader(lifecycle.open_segment(bus.name, read_only=True), "test")
