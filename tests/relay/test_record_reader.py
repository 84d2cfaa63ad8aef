"""RecordReader: heads out, records kept until they are released, whoever dies in between."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Spawner
from operators import cli

import shmbus
from shmbus import RecordReader
from shmbus.inspect.status import read_status
from shmbus.relay.origins import bus_of
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


def test_a_head_says_what_its_trajectory_says(bus: str) -> None:
    put(bus, 8)
    with shmbus.Producer(bus) as producer:
        producer.fail("q9", 1, "out of memory")
    with RecordReader(bus) as reader, shmbus.Bus.open(bus) as handle:
        assert reader.identity == handle.identity
        heads = reader.poll()
        assert reader.poll() == [] and reader.heads() == heads
        (report,) = [head for head in heads if head.failed]
        for i, head in enumerate(head for head in heads if not head.failed):
            assert (head.instance_id, head.round, head.group_size) == (f"q{i // 4}", 3, 4)
            assert (head.index, head.score, head.policy_version) == (i % 4, i / 2, i)
            assert head.key == (f"q{i // 4}", 3) and not head.failed and head.nbytes % 64 == 0
        assert (report.failed, report.reason, report.key) == (True, "out of memory", "q9")
        assert (report.group_size, report.index) == (0, 1)
        assert len({head.id for head in heads}) == 9


def test_what_was_not_released_comes_again_and_what_was_does_not(bus: str) -> None:
    put(bus, 40)
    with RecordReader(bus) as reader:
        heads = reader.poll(100)
        reader.release([head.id for head in heads[:10]])
        reader.release([head.id for head in heads[10:15]], "stale")
    with RecordReader(bus) as reader:
        assert reader.poll(100) == heads[15:]
        ledger = reader.stats()
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
        with pytest.raises(shmbus.BusBusyError, match=r"that is a relay.*take the groups there"):
            RecordReader(bus)
        with pytest.raises(shmbus.BusBusyError, match="that is a relay"):
            shmbus.Consumer(bus).take(timeout=0)


def test_a_release_names_records_that_are_held_or_changes_nothing(bus: str) -> None:
    put(bus, 4)
    with RecordReader(bus) as reader:
        ids = [head.id for head in reader.poll()]
        with pytest.raises(KeyError, match="not held"):
            reader.release([*ids, (9, 9)])
        with pytest.raises(ValueError, match="each record once"):
            reader.release([ids[0], ids[0]])
        with pytest.raises(ValueError, match="expected one of acknowledged"):
            reader.release(ids, "bored")
        assert len(reader.heads()) == 4
        reader.release(ids)
        with pytest.raises(KeyError, match="not held"):
            reader.export(ids)
    with pytest.raises(shmbus.BusClosedError):
        reader.poll()


def test_records_go_from_bus_to_bus_in_groups_and_blocks(bus: str) -> None:
    put(bus, 400, size=900)
    room = bytearray(1 << 20)
    with (
        shmbus.Bus.create(bus + ".to", "2MiB"),
        RecordReader(bus) as reader,
        shmbus.Producer(bus + ".to") as sink,
        shmbus.Consumer(bus + ".to") as consumer,
    ):
        taken = 0
        while heads := reader.poll(100):
            ids = [head.id for head in heads]
            block = reader.export(ids, room)
            assert bytes(block) == reader.export(ids)
            origins, checks = _core.check_block(block)
            assert bus_of(origins) == reader.identity
            assert len(origins) == 32 * len(ids) and len(checks) == 4 * len(ids)
            assert _core.import_block(sink, block, 0, len(ids), 5.0) == len(ids)
            reader.release(ids)
            for group in consumer.take(100, timeout=0):
                for t in group:
                    i = int(group.instance_id[1:]) * 4 + t.index
                    assert t["x"].tobytes() == bytes([i % 256]) * 900
                taken += len(group)
                group.ack()
        assert taken == 400
        assert reader.stats().balanced and consumer.stats().balanced


def put_waiting(producer: shmbus.Producer, reader: RecordReader, i: int) -> None:
    """Put a record; the reader, which is in this thread too, makes room where there is none."""
    deadline = time.monotonic() + 20
    while True:
        try:
            producer.put(f"q{i}", group_size=2, index=0, x=np.zeros(900, np.uint8), timeout=0)
            return
        except shmbus.BusFullError:
            assert time.monotonic() < deadline
            assert reader.poll(timeout=0.01) == []


def test_a_bus_whose_records_are_few_and_far_between_still_has_room(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "256KiB", extent_bytes=4096) as bus:
        assert bus.capacity == 256 << 10
        kept = []
        with shmbus.Producer(bus_name) as producer, RecordReader(bus_name) as reader:
            for i in range(500):
                put_waiting(producer, reader, i)
                (head,) = reader.poll()
                if i % 5:
                    reader.release([head.id])
                else:
                    kept.append(head)
            assert [head.id for head in reader.heads()] == [head.id for head in kept]
            assert reader.stats().moved > 0


def test_a_bound_on_the_lead_lets_the_next_groups_begin(bus_name: str) -> None:
    with (
        shmbus.Bus.create(bus_name, "1MiB", max_lead=2),
        shmbus.Producer(bus_name) as producer,
        RecordReader(bus_name) as reader,
    ):
        for i in range(20):
            producer.put(f"q{i}", group_size=1, index=0, timeout=10)
            if i >= 1:
                (head, *_) = reader.heads() or reader.poll()
                reader.release([head.id])


READ_AND_DIE = """
import sys, os, shmbus
with shmbus.RecordReader(sys.argv[1], wait=10) as reader:
    heads = reader.poll(10, timeout=10)
    reader.release([head.id for head in heads[: len(heads) // 2]])
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_reader_leaves_its_records_to_the_next(bus: str, spawn: Spawner) -> None:
    put(bus, 10)
    child = spawn.script(READ_AND_DIE, bus)
    child.expect("ready")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with RecordReader(bus) as reader:
        assert len(reader.poll(100, timeout=5)) == 5
        assert reader.stats().acknowledged == 5


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (None, TypeError), (5, TypeError), ("ab", TypeError), ([5], TypeError), ([(1,)], TypeError),
        ([(1, 2, 3)], TypeError), ([("a", 1)], TypeError), ([(1.5, 1)], TypeError),
        ([(True, False)], TypeError), ([(-1, 0)], ValueError), ([(2**70, 0)], ValueError),
        ([(9, 9)], KeyError),
    ],
)  # fmt: skip
def test_an_id_that_no_record_has_is_an_error_of_its_own(
    bus: str, ids: Any, error: type[Exception]
) -> None:
    with shmbus.RecordReader(bus) as reader:
        for call in (reader.export, reader.release):
            with pytest.raises(error) as told:
                call(ids)
            assert type(told.value) is error
            assert ("is not held" if error is KeyError else "expected") in str(told.value)


def test_ids_and_counts_may_be_numbers_of_numpy(bus: str) -> None:
    with shmbus.Producer(bus) as producer, shmbus.RecordReader(bus) as reader:
        for index in range(3):
            producer.put("q", group_size=3, index=index, score=1.0)
        heads = reader.poll(np.int64(3)) + reader.poll(2**70)
        ids = np.array([head.id for head in heads])
        assert len(heads) == 3 and len(reader.export(ids)) > 0
        reader.release(ids)
        assert reader.heads() == []


@pytest.mark.parametrize(
    "into",
    [
        b"x" * 4096, memoryview(bytearray(8192))[::2], np.zeros(4096, object), "text", 5,
        memoryview(bytes(4096)),
    ],
)  # fmt: skip
def test_room_that_bytes_cannot_be_written_to_is_refused(bus: str, into: Any) -> None:
    with shmbus.Producer(bus) as producer, shmbus.RecordReader(bus) as reader:
        producer.put("q", group_size=1, index=0, score=1.0)
        (head,) = reader.poll()
        with pytest.raises(TypeError, match="into: expected"):
            reader.export([head.id], into)
        room = np.zeros(1024, np.float32)
        assert len(bytes(reader.export([head.id], room))) < room.nbytes  # type: ignore[arg-type]


def test_a_reader_that_waits_learns_that_its_bus_was_removed(bus_name: str) -> None:
    bus = shmbus.Bus.create(bus_name, "1MiB")
    told: list[BaseException] = []
    with shmbus.RecordReader(bus_name) as reader:

        def wait() -> None:
            try:
                reader.poll(timeout=None)
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        bus.unlink()
        thread.join(60.0)
        assert [type(each) for each in told] == [shmbus.BusRemovedError]
    bus.close()
    with pytest.raises(shmbus.BusClosedError, match="this RecordReader is closed"):
        reader.heads()


def test_a_reader_is_not_copied(bus: str) -> None:
    with shmbus.RecordReader(bus) as reader:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copied(reader)
