"""Several ranks write a version: visible after every rank's end, or never."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Child, Spawner, wait_until

from shmbus import PeerGoneError, WaitTimeoutError
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, read_pool
from shmbus.pool.pool_file import pool_path
from shmbus.weights import WeightsError

KIND = "weights"
SIZE = 1 << 20

RANK = """
import os, sys, time, numpy as np
from shmbus.pool import PoolPublisher
bus, rank, world, plan = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
publisher = PoolPublisher(bus, "weights", rank=rank, world_size=world, timeout=20)
print("ready", flush=True)
for version in range(1, 1000):
    meta = b"other" if plan == "meta" and version == 2 else b"same"
    try:
        with publisher.begin(version, 1 << 20, meta=meta) as write:
            share = (1 << 20) // world
            if plan == "die" and version == 2:
                os.kill(os.getpid(), 9)
            if plan == "raise" and version == 2:
                raise ValueError("no such parameter")
            if plan == "slow" and version == 2:
                print("slow", flush=True)
                while not os.path.exists(sys.argv[5]):
                    time.sleep(0.01)
            words = write.view()
            words[rank * share : (rank + 1) * share] = version
            del words
        print("published", version, flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def publisher_of(bus_name: str) -> Iterator[PoolPublisher]:
    spec = PoolSpec(slot_bytes=SIZE, slots=2)
    with PoolPublisher(bus_name, KIND, spec=spec, world_size=2, timeout=20) as publisher:
        yield publisher
    Path(pool_path(bus_name, KIND)).unlink(missing_ok=True)


def publish(publisher: PoolPublisher, version: int) -> None:
    with publisher.begin(version, SIZE, meta=b"same") as write:  # type: ignore[union-attr]
        share = SIZE // publisher.world_size
        write.view()[:share] = version


def read(bus: str) -> tuple[int, bool]:
    with PoolReader(bus, KIND) as reader, reader.latest(timeout=5) as lease:
        words = lease.view()
        return lease.version, bool((words == lease.version).all())


def rank_child(spawn: Spawner, bus: str, plan: str, *more: object) -> Child:
    return spawn.script(RANK, bus, 1, 2, plan, *more, until="ready")


@pytest.mark.parametrize(
    ("plan", "kind", "text"),
    [
        ("die", PeerGoneError, r"rank 1 \(pid \d+.*has ended before its piece"),
        (
            "raise",
            WeightsError,
            r"rank 1 .*could not write its piece: ValueError: no such parameter",
        ),
        ("meta", WeightsError, r"rank 1 .*could not write its piece: rank 1 has version 2"),
    ],
)
def test_a_rank_that_fails_leaves_the_version_before_in_force(
    plan: str,
    kind: type[Exception],
    text: str,
    bus_name: str,
    publisher_of: PoolPublisher,
    spawn: Spawner,
) -> None:
    child = rank_child(spawn, bus_name, plan)
    publish(publisher_of, 1)
    with pytest.raises(kind, match=text):
        publish(publisher_of, 2)
    assert read(bus_name) == (1, True)
    if plan == "die":
        child.kill()
        child = spawn.script(RANK.replace("range(1,", "range(3,"), bus_name, 1, 2, "go")
    publish(publisher_of, 3)
    assert read(bus_name) == (3, True)
    child.expect("published 3")


def test_a_missing_rank_is_named(bus_name: str, publisher_of: PoolPublisher) -> None:
    publisher_of.timeout = 0.1
    with pytest.raises(WaitTimeoutError, match=r"ranks \[1\] did not write"):
        publish(publisher_of, 1)
    with (
        PoolReader(bus_name, KIND) as reader,
        pytest.raises(WaitTimeoutError, match="no version came"),
    ):
        reader.latest(timeout=0)


def test_a_rank_writes_only_for_a_waiting_publisher(bus_name: str, spawn: Spawner) -> None:
    with PoolPublisher(bus_name, KIND, spec=PoolSpec(slot_bytes=SIZE), timeout=20) as alone:
        hasty = RANK.replace("timeout=20", "timeout=0.2")
        child = spawn.script(hasty, bus_name, 1, 2, "go", until="ready")
        write = alone.begin(1, SIZE, meta=b"same")
        assert write is not None
        wait_until(lambda: "WaitTimeoutError" in child.output())
        assert "published" not in child.output()
        write.view()[:] = 1
        write.finish()
        assert read(bus_name) == (1, True)
        alone.close(remove=True)


def test_a_rank_of_a_dead_one_keeps_its_slot(bus_name: str, spawn: Spawner, tmp_path: Path) -> None:
    leader = spawn.script(
        RANK.replace("rank=rank,", "rank=rank, spec=PoolSpec(slot_bytes=1 << 20),").replace(
            "import PoolPublisher", "import PoolPublisher, PoolSpec"
        ),
        bus_name, 0, 2, "go",
    )  # fmt: skip
    leader.expect("ready")
    go_on = tmp_path / "go on"
    rank_child(spawn, bus_name, "slow", go_on).expect("slow")
    leader.kill()
    with PoolPublisher(bus_name, KIND, timeout=0.05) as publisher:
        with pytest.raises(WaitTimeoutError, match=r"rank 1 .* still writes"):
            publisher.begin(2, SIZE)
        assert read_pool(bus_name, KIND).version == 1
        go_on.touch()
        publisher.timeout = 20
        with publisher.begin(2, SIZE) as write:  # type: ignore[union-attr]
            write.view()[:] = 2
        assert read(bus_name) == (2, True)
        publisher.close(remove=True)
