"""RecordReader: records out, kept until they are released, whoever dies in between."""

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import Spawner, ends_of
from operators import cli
from relay.heads import export, make_origin

import shmbus
from shmbus.inspect.status import read_status
from shmbus.relay.record_reader import RecordReader
from shmbus_ext import _core


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with shmbus.Bus.create(bus_name, "2MiB"):
        yield bus_name


def put(name: str, count: int, *, size: int = 64) -> None:
    with shmbus.Producer(name) as producer:
        for i in range(count):
            producer.put(
                f"q{i // 4}", group_size=4, index=i % 4, score=i / 2, policy_version=i, round=3,
                x=np.full(size, i % 256, np.uint8),
            )  # fmt: skip


def test_what_was_not_released_comes_again_and_what_was_does_not(bus: str) -> None:
    put(bus, 40)
    with RecordReader(bus) as reader:
        origins, _ = reader.poll(100)
        assert reader.poll(100) == ([], [])
        reader.release(origins[:10])
        reader.release(origins[10:15], "stale")
    with RecordReader(bus) as reader:
        assert reader.poll(100)[0] == origins[15:]
        ledger = read_status(reader.name).ledger
        assert ledger.balanced
        assert (ledger.acknowledged, ledger.dropped, ledger.stashed) == (10, {"stale": 5}, 25)


def test_status_names_the_relay_and_what_it_holds(bus: str) -> None:
    put(bus, 12)
    with RecordReader(bus) as reader:
        reader.poll(8)
        status = read_status(bus)
        assert status.collector.alive and status.collector.label == "shmbus relay"
        assert (status.ledger.stashed, status.ledger.in_ring) == (8, 4)
        assert status.ledger.balanced and status.ledger.exact
        assert "shmbus relay" in cli("status", bus).out
        with pytest.raises(shmbus.BusBusyError, match=r"the reader is a relay.*take the groups"):
            RecordReader(bus)
        with pytest.raises(shmbus.BusBusyError, match="the reader is a relay"):
            shmbus.Consumer(bus).take(timeout=0)


def test_a_release_names_records_that_are_held_or_changes_nothing(bus: str) -> None:
    put(bus, 4)
    with RecordReader(bus) as reader:
        origins, _ = reader.poll(10)
        with pytest.raises(KeyError, match="not held"):
            reader.release([*origins, make_origin(reader.identity, 9, 9)])
        with pytest.raises(ValueError, match="expected one of acknowledged"):
            reader.release(origins, "bored")
        assert read_status(reader.name).ledger.stashed == 4
        reader.release(origins)
        with pytest.raises(KeyError, match="not held"):
            export(reader, origins)
    with pytest.raises(shmbus.BusClosedError, match="this RecordReader is closed"):
        reader.poll(1)


def test_records_go_from_bus_to_bus_in_groups_and_blocks(bus: str) -> None:
    put(bus, 400, size=900)
    room = bytearray(1 << 20)
    with (
        ends_of(shmbus.Bus.create(bus + ".to", "2MiB")) as (sink, consumer),
        RecordReader(bus) as reader,
    ):
        taken = 0
        while polled := reader.poll(100)[0]:
            block = reader.export(polled, room)
            origins, checks = _core.check_block(block)
            assert origins == b"".join(polled) and len(checks) == 4 * len(polled)
            assert _core.import_block(sink, block, 0, len(polled), 5.0) == len(polled)
            reader.release(polled)
            for group in consumer.take(100, timeout=0):
                for t in group:
                    i = int(group.instance_id[1:]) * 4 + t.index
                    assert t["x"].tobytes() == bytes([i % 256]) * 900
                taken += len(group)
                group.ack()
        assert taken == 400
        assert read_status(reader.name).ledger.balanced and consumer.stats().balanced


def put_waiting(producer: shmbus.Producer, reader: RecordReader, i: int) -> None:
    """Put a record; the reader, in this thread too, makes room on demand."""
    deadline = time.monotonic() + 20
    while True:
        try:
            producer.put(f"q{i}", group_size=2, index=0, x=np.zeros(900, np.uint8), timeout=0)
            return
        except shmbus.BusFullError:
            assert time.monotonic() < deadline
            assert reader.poll(10) == ([], [])
            time.sleep(0.01)


def test_a_bus_whose_records_are_few_and_far_between_still_has_room(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "256KiB", extent_bytes=4096) as bus:
        assert bus.capacity == 256 << 10
        kept = []
        with shmbus.Producer(bus_name) as producer, RecordReader(bus_name) as reader:
            for i in range(500):
                put_waiting(producer, reader, i)
                (origin,), _ = reader.poll(10)
                if i % 5:
                    reader.release([origin])
                else:
                    kept.append(origin)
            assert reader._reader.moves > 0
            assert read_status(reader.name).ledger.stashed == len(kept)
            reader.release(kept)


def test_a_bound_on_the_lead_lets_the_next_groups_begin(bus_name: str) -> None:
    with (
        shmbus.Bus.create(bus_name, "1MiB", max_lead=2),
        shmbus.Producer(bus_name) as producer,
        RecordReader(bus_name) as reader,
    ):
        held: list[bytes] = []
        for i in range(20):
            producer.put(f"q{i}", group_size=1, index=0, timeout=10)
            if i >= 1:
                held += reader.poll(10)[0]
                reader.release([held.pop(0)])


READ_AND_DIE = """
import sys
from shmbus.relay.record_reader import RecordReader
with RecordReader(sys.argv[1]) as reader:
    origins, _ = reader.poll(10)
    reader.release(origins[: len(origins) // 2])
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_reader_leaves_its_records_to_the_next(bus: str, spawn: Spawner) -> None:
    put(bus, 10)
    child = spawn.script(READ_AND_DIE, bus, until="ready")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with RecordReader(bus) as reader:
        assert len(reader.poll(100)[0]) == 5
        assert read_status(reader.name).ledger.acknowledged == 5


def test_a_reader_of_a_removed_bus_says_so_and_exports_its_records(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB") as bus, shmbus.Producer(bus_name) as producer:
        producer.put("q", group_size=1, index=0, score=1.0)
        with RecordReader(bus_name) as reader:
            origins, _ = reader.poll(10)
            bus.unlink()
            with pytest.raises(shmbus.BusRemovedError):
                reader.require_bus()
            assert export(reader, origins)
