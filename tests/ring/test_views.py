"""Views of the ring are read-only to everybody, and a process that closes keeps them cheaply."""

import signal

import numpy as np
import pytest
from conftest import Daemon, Spawner, take_groups

from shmbus import Bus, Consumer, Producer

# Writes past the array's own flag, by torch and by ctypes.
WRITE = """
import ctypes, sys, numpy as np, shmbus
consumer = shmbus.Consumer(sys.argv[1])
(group,) = consumer.take(timeout=10)
view = group[0]["x"]
print("before", int(view.max()), flush=True)
ctypes.memset(view.ctypes.data, 1, view.nbytes)
print("written", flush=True)
"""


@pytest.mark.parametrize("served", [False, True])
def test_a_write_through_a_view_ends_its_writer_and_changes_nothing(
    bus_name: str, producer: Producer, spawn: Spawner, served: bool
) -> None:
    daemon = Daemon(spawn, bus_name, ()) if served else None
    producer.put("a", group_size=1, index=0, x=np.zeros(1000, np.int32))
    child = spawn.script(WRITE, bus_name)
    assert child.wait() == -signal.SIGSEGV
    assert "before 0" in child.output() and "written" not in child.output()
    if daemon is not None:
        daemon.stop()
    with Consumer(bus_name, daemon=False) as consumer:
        (group,) = consumer.take(timeout=10)
        assert not group[0]["x"].any()
        group.ack()


def mappings() -> int:
    with open("/proc/self/maps", "rb") as maps:
        return sum(1 for _ in maps)


def test_more_views_than_a_process_may_have_mappings_outlive_their_consumer(bus_name: str) -> None:
    count = 70_000
    with Bus.create(bus_name, "64MiB"), Producer(bus_name) as producer:
        consumer = Consumer(bus_name, daemon=False)
        views = []
        for first in range(0, count, 10_000):
            for i in range(first, first + 10_000):
                producer.put(f"g{i}", group_size=1, index=0, x=np.full(2, i, np.int32))
            while len(views) < first + 10_000:
                groups = consumer.take(10_000, timeout=10)
                views += [group[0]["x"] for group in groups]
                consumer.ack(groups)
        assert len(views) == count
        before = mappings()
        consumer.close()
        assert mappings() < before + 10
        # Its successor gets the space, and overwrites all of it.
        with Consumer(bus_name, daemon=False) as successor:
            for i in range(300):
                producer.put(f"big{i}", group_size=1, index=0, x=np.full(100_000, -1, np.int32))
                take_groups(successor)[0].ack()
        assert all((view == i).all() for i, view in enumerate(views))


CROWDED = """
import resource, sys, numpy as np, shmbus
name = sys.argv[1]
consumer = shmbus.Consumer(name, daemon=False)
(group,) = consumer.take(timeout=10)
view = group[0]["x"]
group.ack()
shmbus.Bus  # imported while there is room for it
with open("/proc/self/statm") as file:
    taken = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 18), resource.RLIM_INFINITY))
consumer.close()
try:
    shmbus.Bus.open(name)
except shmbus.CapacityError as error:
    print("told", error, flush=True)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("closed", flush=True)
import os, time
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
assert (view == 7).all(), view
del view, group
print("right", flush=True)
while not os.path.exists(sys.argv[2] + "2"):
    time.sleep(0.01)
"""


def test_a_consumer_without_memory_for_copies_leaves_the_bus_to_the_next_and_keeps_its_views(
    bus_name: str, spawn: Spawner, tmp_path: object
) -> None:
    go = f"{tmp_path}/go"
    with Bus.create(bus_name, "16MiB"), Producer(bus_name) as producer:
        producer.put("a", group_size=1, index=0, x=np.full(500_000, 7, np.int32))
        child = spawn.script(CROWDED, bus_name, go, until="closed")
        assert "vm.max_map_count" in child.output() and "free of" not in child.output()
        with Consumer(bus_name, daemon=False) as successor:
            for i in range(100):
                producer.put(f"b{i}", group_size=1, index=0, x=np.full(300_000, -1, np.int32))
                take_groups(successor)[0].ack()
            open(go, "w").close()
            child.expect("right")
        open(go + "2", "w").close()
        child.finish()
