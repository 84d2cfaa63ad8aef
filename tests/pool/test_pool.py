"""A slot pool: versions, leases, rows, and what happens where a reader is slow."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from conftest import DEFAULT_DEADLINE_S, Spawner
from refusals import INT, let_through, of_value

from shmbus import BusBusyError, CapacityError, DamagedError, WaitTimeoutError, errors
from shmbus.pool import (
    PoolPublisher,
    PoolReader,
    PoolSpec,
    copy_bytes,
    create_pool,
    read_pool,
    unlink_pool,
)
from shmbus.pool.pool_file import pool_path
from shmbus.segment import room
from shmbus_ext import _core

SIZE = 1 << 20
KIND = "weights"
FORK = get_context("fork")
MakePublisher = Callable[..., PoolPublisher]

READER = """
import sys
from shmbus.pool import PoolReader
reader = PoolReader(sys.argv[1], "weights", label="replica-3")
lease = reader.latest(timeout=20)
assert lease.version == 1
"""


@pytest.fixture
def publishers(bus_name: str) -> Iterator[MakePublisher]:
    made: list[PoolPublisher] = []

    def make(slots: int = 2, size: int = SIZE, **options: object) -> PoolPublisher:
        spec = PoolSpec(slot_bytes=size, slots=slots, max_slots=options.pop("max_slots", None))  # type: ignore[arg-type]
        made.append(PoolPublisher(bus_name, KIND, spec=spec, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()
    Path(pool_path(bus_name, KIND)).unlink(missing_ok=True)


def publish(publisher: PoolPublisher, version: int, size: int = SIZE, **options: bool) -> bool:
    write = publisher.begin(version, size, meta=b"meta-%d" % version, text=f"step {version}")
    if write is None:
        return False
    write.view()[:] = version % 256
    write.finish(**options)
    return True


def test_leases_of_one_reader_end_one_by_one(bus_name: str, publishers: MakePublisher) -> None:
    publisher = publishers(timeout=0.1)
    publish(publisher, 1)
    with PoolReader(bus_name, KIND) as reader:
        first, second = reader.latest(timeout=5), reader.latest(timeout=5)
        publish(publisher, 2)
        first.close()
        with pytest.raises(WaitTimeoutError):
            publish(publisher, 3)
        second.close()
        publish(publisher, 3)


def test_a_timeout_says_that_the_publisher_died(bus_name: str, spawn: Spawner) -> None:
    child = spawn.holder(
        "import sys\nfrom shmbus.pool import PoolPublisher, PoolSpec\n"
        'p = PoolPublisher(sys.argv[1], "weights", spec=PoolSpec(slot_bytes=4096))',
        bus_name,
    )
    with PoolReader(bus_name, KIND) as reader:
        child.kill()
        with pytest.raises(WaitTimeoutError, match="has died: start it again"):
            reader.latest(timeout=0.05)


def test_a_second_publisher_is_refused(bus_name: str, publishers: MakePublisher) -> None:
    publishers(label="trainer-a")
    with pytest.raises(BusBusyError, match=rf"pid {os.getpid()} \(trainer-a\) is rank 0 already"):
        publishers()


@pytest.mark.parametrize("policy", ["wait", "skip", "grow"])
def test_a_slow_reader_is_met_by_the_chosen_policy(
    policy: str, bus_name: str, publishers: MakePublisher, spawn: Spawner
) -> None:
    publisher = publishers(max_slots=3, when_held=policy, timeout=0.2)
    publish(publisher, 1)
    child = spawn.holder(READER, bus_name)
    publish(publisher, 2)
    if policy == "wait":
        with pytest.raises(WaitTimeoutError, match=rf"replica-3 \(pid {child.pid}\)"):
            publish(publisher, 3)
        assert read_pool(bus_name, KIND).version == 2
    elif policy == "skip":
        assert not publish(publisher, 3)
        status = read_pool(bus_name, KIND)
        assert (status.version, status.skipped, status.slots_open) == (2, 1, 2)
    else:
        assert publish(publisher, 3) and publish(publisher, 4)
        assert read_pool(bus_name, KIND).slots_open == 3
    child.kill()
    publisher.timeout = 20
    assert publish(publisher, 5)


def test_a_waiting_publisher_gets_a_free_slot(bus_name: str, publishers: MakePublisher) -> None:
    publisher = publishers(timeout=20)
    publish(publisher, 1)
    with PoolReader(bus_name, KIND) as reader:
        lease = reader.latest(timeout=5)
        publish(publisher, 2)
        threading.Timer(0.1, lease.close).start()
        publish(publisher, 3)
        assert read_pool(bus_name, KIND).version == 3


def test_a_version_with_arrays_is_unfinished(bus_name: str, publishers: MakePublisher) -> None:
    publisher = publishers()
    write = publisher.begin(1, SIZE)
    assert write is not None
    array = write.view()
    with pytest.raises(BufferError, match="1 buffers"):
        write.finish()
    write.give_up()
    publisher.timeout = 0.05
    assert publish(publisher, 2)  # into the other slot: the first keeps its lock
    with pytest.raises(WaitTimeoutError):
        publish(publisher, 3)
    del array
    assert publish(publisher, 3)


def test_readers_say_what_they_run_and_why_not(bus_name: str, publishers: MakePublisher) -> None:
    publisher = publishers()
    publish(publisher, 7)
    with PoolReader(bus_name, KIND, label="replica", device="GPU-12ab") as reader:
        with reader.latest(timeout=5) as lease:
            reader.applied(lease)
        publish(publisher, 8)
        with reader.latest(timeout=5) as lease:
            reader.refused(lease, 3, "shape of x\0: " + "é" * 200)
        (row,) = read_pool(bus_name, KIND).readers
        assert (row.label, row.device, row.state) == ("replica", "GPU-12ab", "alive")
        assert (row.applied_version, row.refused_version, row.error_code) == (7, 8, 3)
        assert row.error.startswith("shape of x : é") and len(row.error.encode()) <= 120
        with reader.latest(timeout=5) as lease:
            reader.applied(lease)
        (row,) = read_pool(bus_name, KIND).readers
        assert (row.applied_version, row.refused_version, row.error) == (8, None, "")
    assert read_pool(bus_name, KIND).readers == []


def test_a_scribbled_row_or_meta_or_byte_is_found(bus_name: str, publishers: MakePublisher) -> None:
    publisher = publishers()
    publish(publisher, 1, digests=True)
    path = Path(pool_path(bus_name, KIND))
    with PoolReader(bus_name, KIND) as reader, reader.latest(timeout=5) as lease:
        lease.check()
        raw = path.read_bytes()
        with path.open("r+b") as file:
            at = raw.index(b"meta-1")
            file.seek(at)
            file.write(b"M")
            file.flush()
            with pytest.raises(DamagedError, match="checksum"):
                lease.meta()
            file.seek(raw.index(bytes([1]) * 4096) + SIZE // 2)
            file.write(b"x")
            file.flush()
            with pytest.raises(DamagedError, match="bytes 0 to 1048576"):
                lease.check()
            file.seek(4096 + 8)  # the sequence of slot 0
            file.write(b"\x63")
            file.flush()
        with pytest.raises(DamagedError, match="row is damaged"):
            reader.latest(timeout=5)


def test_a_pool_that_does_not_fit_says_what_it_needs(bus_name: str) -> None:
    with pytest.raises(errors.CapacityError, match=r"TiB .* /dev/shm has .* free"):
        create_pool(bus_name, KIND, PoolSpec(slot_bytes="8TiB"))
    assert not Path(pool_path(bus_name, KIND)).exists()


@pytest.mark.parametrize("version", [7, 8], ids=["an older one", "the same"])
def test_a_reloading_reader_runs_no_whole_version(
    version: int, bus_name: str, publishers: MakePublisher
) -> None:
    publisher = publishers()
    with PoolReader(bus_name, KIND, label="a") as reader:
        for number in (7, 8):
            publish(publisher, number)
        with reader.latest(timeout=5) as newest, reader.at(version) as again:
            reader.applied(newest)
            reader.loading(again, 4)
            (row,) = read_pool(bus_name, KIND).readers
            assert (row.applied_version, row.refused_version, row.error_code) == (None, version, 4)
            reader.refused(again, 3, "half of it")
            (row,) = read_pool(bus_name, KIND).readers
            assert (row.applied_version, row.error) == (None, "half of it")
            reader.applied(again)
            (row,) = read_pool(bus_name, KIND).readers
            assert (row.applied_version, row.error_code) == (version, 0)


@pytest.mark.parametrize(
    "options",
    [{"slots": 0}, {"slots": 9}, {"slots": 3, "max_slots": 2}, {"block_bytes": "3MiB"},
     {"block_bytes": "128MiB"}, {"meta_bytes": "65MiB"}],
)  # fmt: skip
def test_sizes_that_make_no_pool_are_refused(options: dict[str, int], bus_name: str) -> None:
    with pytest.raises(ValueError, match=r"expected 1 to 8, got|no pool can be laid out"):
        create_pool(bus_name, KIND, PoolSpec(slot_bytes=4096, **options))
    assert not Path(pool_path(bus_name, KIND)).exists()


def test_a_pool_of_an_earlier_run_has_the_slots_asked_for(
    bus_name: str, publishers: MakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishers(max_slots=4).close()
    assert let_through(publishers, "slots", INT + of_value(0, -1, 9)) == []
    with monkeypatch.context() as patch:
        patch.setattr(room, "cgroup_limits", lambda root: [room.Limit("/x", SIZE // 2, SIZE, "")])
        with pytest.raises(CapacityError, match="/x"):
            publishers(slots=3)
    publishers(slots=3)
    assert read_pool(bus_name, KIND).slots_open == 3


def test_a_pool_is_created_once_and_removed_once(bus_name: str) -> None:
    create_pool(bus_name, KIND, PoolSpec(slot_bytes=4096))
    with pytest.raises(errors.BusExistsError, match="exists already"):
        create_pool(bus_name, KIND, PoolSpec(slot_bytes=4096))
    unlink_pool(bus_name, KIND)
    with pytest.raises(errors.BusNotFoundError):
        unlink_pool(bus_name, KIND)
    with pytest.raises(errors.BusNotFoundError, match="start the publisher"):
        PoolReader(bus_name, KIND)


def test_a_small_pool_is_replaced_unless_used(bus_name: str, publishers: MakePublisher) -> None:
    publishers().close()
    assert publishers(size=2 * SIZE).pool.slot_bytes == 2 * SIZE
    with (
        PoolReader(bus_name, KIND, label="replica"),
        pytest.raises(BusBusyError, match=r"slot_bytes is 2097152, expected 4194304.*replica"),
    ):
        publishers(size=4 * SIZE)


def test_closed_handles_and_roles_are_shown(bus_name: str, publishers: MakePublisher) -> None:
    publisher = publishers()
    with pytest.raises(SystemError):
        publisher.pool.claim_reader("x", "")
    with pytest.raises(SystemError):
        _core.pool_lease(publisher.pool, 0)
    reader = PoolReader(bus_name, KIND)
    reader.close()
    with pytest.raises(errors.BusClosedError, match="is closed"):
        reader.latest(timeout=0)


def test_a_forked_child_keeps_nothing(bus_name: str, publishers: MakePublisher) -> None:
    publisher = publishers(timeout=20)
    publish(publisher, 1)
    reader = PoolReader(bus_name, KIND)
    lease = reader.latest(timeout=5)
    ours, theirs = FORK.Pipe()

    def use_inherited() -> None:
        with pytest.raises(errors.BusClosedError, match="before a fork"):
            reader.latest(timeout=0)
        with pytest.raises(BufferError, match="not mapped"):
            memoryview(lease.buffer)
        theirs.send("refused")
        time.sleep(20)

    child = FORK.Process(target=use_inherited)
    child.start()
    try:
        assert ours.poll(DEFAULT_DEADLINE_S) and ours.recv() == "refused"
        lease.close()
        reader.close()
        publish(publisher, 2)
        publish(publisher, 3)  # the child lives, and keeps no lock of the lease
        assert read_pool(bus_name, KIND).readers == []
    finally:
        child.kill()
        child.join()


def test_copies_are_exact_at_any_place_and_length() -> None:
    source = np.random.default_rng(7).integers(0, 256, 300_000, np.uint8)
    for start, length in ((0, 300_000), (1, 299_990), (63, 200_001), (5, 0), (3, 17)):
        target = np.zeros(300_002, np.uint8)
        copy_bytes(target[start : start + length], source[:length])
        assert (target[start : start + length] == source[:length]).all()
        assert not target[:start].any() and not target[start + length :].any()
    with pytest.raises(ValueError, match="one length, got 2 and 3 bytes"):
        copy_bytes(bytearray(2), bytes(3))
    with pytest.raises(TypeError, match="writable target"):
        copy_bytes(bytes(2), bytes(2))


def test_rows_run_out_by_name(bus_name: str, publishers: MakePublisher) -> None:
    publishers()
    readers = [PoolReader(bus_name, KIND) for _ in range(_core.POOL_MAX_READERS)]
    with pytest.raises(BusBusyError, match="all 128 rows"):
        PoolReader(bus_name, KIND)
    readers.pop().close()
    readers.append(PoolReader(bus_name, KIND))
    for reader in readers:
        reader.close()
