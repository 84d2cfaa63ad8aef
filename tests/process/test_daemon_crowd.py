"""Many clients of a daemon, in any order: all get groups, and no segment or lease remains.

The suite runs short forms; SHMBUS_TEST_CROWD and SHMBUS_TEST_CYCLES set the groups and cycles of a
long form.
"""

import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from conftest import Child, Daemon, Spawner, wait_until

from shmbus import Bus, Consumer, Producer
from shmbus.inspect.segment_file import SegmentFile
from shmbus.segment import lifecycle
from shmbus_ext import _core

Served = Callable[..., Daemon]

RANKS = 8
PRODUCERS = 64
#: Processes shared by the producers; each producer keeps a separate handle.
SENDERS = 2
GROUPS = int(os.environ.get("SHMBUS_TEST_CROWD", "1500"))
CYCLES = int(os.environ.get("SHMBUS_TEST_CYCLES", "200"))

SEND = """
import random, sys
import numpy as np
from shmbus import Producer
name, who, handles, groups, seed = sys.argv[1], *map(int, sys.argv[2:])
draw = random.Random(seed + who)
open_, most = [], 0
for number in range(groups):
    # A producer comes, works or leaves, whichever; together they are all there at some time.
    while len(open_) < handles and (number == groups // 2 or not open_ or draw.random() < 0.3):
        open_.append(Producer(name))
    most = max(most, len(open_))
    items = [
        dict(instance_id=f"{who}-{number}", group_size=4, index=i, timeout=60,
             tokens=np.full(draw.randrange(1, 300), number, np.int32))
        for i in range(4)
    ]
    for item in draw.sample(items, 4):
        draw.choice(open_).put(**item)
    if draw.random() < 0.2:
        open_.pop(draw.randrange(len(open_))).close()
for producer in draw.sample(open_, len(open_)):
    producer.close()
print("most", most)
"""

TRAIN = """
import os, random, sys
from shmbus import Consumer
name, rank, world_size, seed, log, stop = sys.argv[1:]
draw = random.Random(int(seed) + int(rank))
with open(log, "a", buffering=1) as out:
    print("training")
    while not os.path.exists(stop):
        with Consumer(name, rank=int(rank), world_size=int(world_size)) as consumer:
            for _ in range(draw.randrange(1, 6)):
                groups = consumer.take_shard(groups=3, max_wait=0.05, timeout=0.3)
                for group in groups[: draw.choice([1, 3, 3])]:  # what is left comes again
                    group.ack()
                    out.write(",".join(f"{t.producer_id}:{t.sequence}" for t in group) + "\\n")
print("done")
"""


def start_ranks(spawn: Spawner, name: str, seed: int, directory: Path, stop: Path) -> list[Child]:
    order = random.Random(seed).sample(range(RANKS), RANKS)
    return [
        spawn.script(TRAIN, name, r, RANKS, seed, directory / f"rank-{r}.log", stop) for r in order
    ]


def drain(name: str, log: Path) -> None:
    with Consumer(name) as consumer, log.open("w") as out:
        while (ledger := consumer.stats()).leased or ledger.stashed or ledger.in_ring:
            for group in consumer.take(64, timeout=0.1):
                group.ack()
                out.write(",".join(f"{t.producer_id}:{t.sequence}" for t in group) + "\n")


@pytest.mark.timeout(60 + GROUPS // 20)
def test_64_producers_and_8_ranks_come_work_and_leave_in_any_order(
    daemon: Served, bus_name: str, spawn: Spawner, tmp_path: Path, seed: int
) -> None:
    served = daemon("--capacity", "16MiB")
    files = open_files(served.child.pid)
    stop = tmp_path / "stop"
    ranks = start_ranks(spawn, bus_name, seed, tmp_path, stop)
    senders = [
        spawn.script(SEND, bus_name, who, PRODUCERS // SENDERS, GROUPS // SENDERS, seed)
        for who in range(SENDERS)
    ]
    for sender in senders:
        assert sender.finish(30 + GROUPS / 20).split() == ["most", str(PRODUCERS // SENDERS)]
    stop.touch()
    for rank in ranks:
        rank.finish()
    drain(bus_name, tmp_path / "rest.log")
    ended = Counter(
        identity
        for log in tmp_path.glob("*.log")
        for line in log.read_text().splitlines()
        for identity in line.split(",")
    )
    bus = Bus.open(bus_name)
    stats = bus.stats()
    bus.close()
    assert stats.committed == stats.acknowledged == GROUPS // SENDERS * SENDERS * 4
    assert len(ended) == stats.committed and set(ended.values()) == {1}
    wait_until(lambda: open_files(served.child.pid) <= files, what="the daemon to close its files")
    assert_nothing_is_held(bus_name, served.child.pid)


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def private_kib(pid: int) -> int:
    (line,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    )
    return int(line.split()[1])


def only_the_collector_holds(name: str) -> bool:
    with SegmentFile(name) as file:
        return all(run.slot == file.max_producers for run in file.runs())


def assert_nothing_is_held(name: str, daemon: int) -> None:
    with closing(lifecycle.open_segment(name)) as segment:
        wait_until(
            lambda: not any(segment.locks_held(kind) for kind in range(1 + _core.MAX_CLIENTS)),
            what="the locks of clients to be gone",
        )
        wait_until(
            lambda: all(row[1] == _core.SLOT_FREE for row in segment.producers()),
            what="the producers' slots to be free",
        )
        wait_until(lambda: only_the_collector_holds(name), what="the producers' runs to be free")
        # Its spare run, and the target of moves after a shortage of room.
        assert segment.extent_count - segment.free_extents() <= 2
    assert not list(Path("/dev/shm").glob(f"shmbus-new-{daemon}-*"))


@pytest.mark.timeout(60 + CYCLES // 10)
def test_attaching_and_leaving_leaks_nothing(daemon: Served, bus_name: str) -> None:
    served = daemon("--capacity", "8MiB")

    def cycle(number: int) -> None:
        with Producer(bus_name) as producer:
            producer.put(str(number), group_size=1, index=0, tokens=np.zeros(9, np.int32))
        with Consumer(bus_name) as consumer:
            groups = consumer.take(timeout=10)
            views = [t["tokens"] for group in groups for t in group]
            if number % 3:
                consumer.ack(groups)
            assert len(views) == len(groups)

    def look() -> tuple[int, int, int]:
        gc.collect()
        wait_until(lambda: threading.active_count() <= threads)
        return open_files(os.getpid()), open_files(served.child.pid), private_kib(served.child.pid)

    threads = threading.active_count()
    for number in range(CYCLES // 10):
        cycle(number)
    mine, theirs, before_kib = look()
    for number in range(CYCLES // 10, CYCLES):
        cycle(number)
    with Consumer(bus_name) as consumer:

        def is_all_acknowledged() -> bool:
            consumer.ack(consumer.take(timeout=0.1))
            return consumer.stats().acknowledged == CYCLES

        wait_until(is_all_acknowledged)

    def are_closed() -> bool:
        found = look()
        return found[0] <= mine and found[1] <= theirs

    wait_until(are_closed, what="the files to be closed")
    print(f"the daemon's memory: {before_kib} KiB, {look()[2]} KiB after {CYCLES} cycles")
    assert look()[2] < before_kib + 2048
    assert_nothing_is_held(bus_name, served.child.pid)


# -- any messages of clients
