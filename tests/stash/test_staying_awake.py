"""A consumer of a steady stream waits without sleeping, and hears everything else.

The stream repeats a sample: duplicates are dropped, so it never ends and no group completes.
"""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import numpy as np
import pytest
from conftest import Child, Spawner, wait_until

from shmbus import Bus, BusClosedError, Consumer, Producer

STREAM = """
import sys
import numpy as np
from shmbus import Producer

with Producer(sys.argv[1]) as producer:
    print("streaming", flush=True)
    while True:
        producer.put("half", group_size=2, index=0, x=np.arange(4), timeout=30)
"""


class Interrupted(Exception):
    """Raised by a signal's handler here."""


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with Bus.create(bus_name, capacity="8MiB"):
        yield bus_name


def begin_stream(spawn: Spawner, bus: str) -> Child:
    child = spawn.script(STREAM, bus)
    child.expect("streaming", 60)
    return child


def state_of(thread: int) -> str:
    """Return the kernel's letter for the state of a thread of this process."""
    with open(f"/proc/self/task/{thread}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def test_a_signal_ends_the_take_of_a_consumer_that_records_keep_awake(
    bus: str, spawn: Spawner
) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.get_ident()
    try:
        with Consumer(bus) as consumer:
            begin_stream(spawn, bus)
            killer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGUSR1))
            killer.start()
            with pytest.raises(Interrupted):
                consumer.take(1, 60)
            killer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_take_ends_at_its_timeout_and_a_close_ends_it_though_records_come(
    bus: str, spawn: Spawner
) -> None:
    with Consumer(bus) as consumer, ThreadPoolExecutor(1) as pool:
        begin_stream(spawn, bus)
        assert consumer.take(timeout=0.05) == []
        taken = pool.submit(consumer.take, 1, 30)
        wait_until(lambda: consumer.stats().dropped.get("duplicate", 0) > 1000)
        consumer.close()
        with pytest.raises(BusClosedError):
            taken.result(60)


def test_who_stayed_awake_sleeps_when_records_stop_and_is_woken_by_the_next(
    bus: str, spawn: Spawner
) -> None:
    with Consumer(bus) as consumer, ThreadPoolExecutor(1) as pool:
        child = begin_stream(spawn, bus)
        thread = pool.submit(threading.get_native_id).result()
        taken = pool.submit(consumer.take, 1, 30)
        wait_until(lambda: consumer.stats().dropped.get("duplicate", 0) > 1000)
        child.kill()
        wait_until(lambda: state_of(thread) == "S")
        with Producer(bus) as producer:
            producer.put("half", group_size=2, index=1, x=np.arange(4), timeout=30)
        (group,) = taken.result(60)
        assert (group.instance_id, len(group)) == ("half", 2)
