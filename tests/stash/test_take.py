"""A usual take is a single call into C: detours, and waiting threads."""

import gc
import itertools
import os
import resource
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import numpy as np
import pytest
from conftest import Spawner, wait_until

from shmbus import Bus, BusClosedError, Consumer, Producer, StallReport
from shmbus.base import limits
from shmbus_ext._core import RecursiveLock


class Interrupted(Exception):
    """Raised by a signal's handler here."""


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with Bus.create(bus_name, capacity="2MiB"):
        yield bus_name


@pytest.fixture
def interrupts() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, before)


def put(producer: Producer, key: str, index: int = 0, size: int = 1) -> None:
    producer.put(key, group_size=size, index=index, x=np.arange(4), timeout=30)


def interrupt_the_main_thread() -> threading.Thread:
    def sleeps() -> bool:
        with open(f"/proc/self/task/{os.getpid()}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "S"

    def run() -> None:
        wait_until(sleeps)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_guard_is_one_threads_at_a_time_however_often() -> None:
    lock = RecursiveLock()
    inside = 0
    most = 0

    def work(_: int) -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock, lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert (inside, most) == (0, 1)


def test_a_guard_is_left_by_its_owner_alone() -> None:
    lock = RecursiveLock()
    with pytest.raises(SystemError):
        lock.__exit__(None, None, None)
    with lock, ThreadPoolExecutor(1) as pool:
        other = pool.submit(lock.__exit__, None, None, None)
        with pytest.raises(SystemError):
            other.result()


def test_a_signals_handler_ends_the_wait_for_a_guard(interrupts: None) -> None:
    lock = RecursiveLock()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    killer = interrupt_the_main_thread()
    with pytest.raises(Interrupted), lock:
        raise AssertionError("two threads have it")
    over.set()
    holder.join()
    killer.join()
    with lock:
        pass


def test_a_signals_handler_ends_a_take_that_waits_for_ever(bus: str, interrupts: None) -> None:
    with Consumer(bus) as consumer, Producer(bus) as producer:
        killer = interrupt_the_main_thread()
        with pytest.raises(Interrupted):
            consumer.take(1, None)
        killer.join()
        put(producer, "after")
        assert [group.instance_id for group in consumer.take(1, 30)] == ["after"]


def test_each_group_goes_to_one_of_the_threads_that_take(bus: str) -> None:
    groups = 1500
    seen: Counter[str] = Counter()
    lock = threading.Lock()
    with Consumer(bus) as consumer, Producer(bus) as producer:

        def work(number: int) -> None:
            # Some poll, the rest sleeps.
            while sum(seen.values()) < groups:
                taken = consumer.take(1 + number, 0.01 if number % 2 else 0)
                with lock:
                    seen.update(group.instance_id for group in taken)
                consumer.ack(taken)

        with ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(work, number) for number in range(4)]
            for number in range(groups):
                put(producer, f"g{number}")
            for task in tasks:
                task.result(60)
        ledger = consumer.stats()
    assert set(seen.values()) == {1} and len(seen) == groups
    assert ledger.balanced and ledger.acknowledged == groups


def test_a_groups_deadline_wakes_a_sleeper_that_lay_down_before_it_began(
    bus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look for the dead would wake it as well.
    monkeypatch.setattr(limits, "SWEEP_INTERVAL_S", 3600.0)
    with (
        Consumer(bus, group_timeout=0.05, on_timeout="partial") as consumer,
        Producer(bus) as producer,
        ThreadPoolExecutor(1) as pool,
    ):
        assert consumer.take(timeout=0) == []
        taken = pool.submit(consumer.take, 1, 30)
        put(producer, "half", size=2)
        (group,) = taken.result(30)
        assert (len(group), group.size) == (1, 2)


def test_what_is_due_is_done_though_records_keep_waking_the_sleeper(bus: str) -> None:
    with (
        Consumer(bus, group_timeout=0.05, on_timeout="partial") as consumer,
        Producer(bus) as producer,
        ThreadPoolExecutor(1) as pool,
    ):
        taken = pool.submit(consumer.take, 1, 30)
        number = 0
        while not taken.done():
            put(producer, f"g{number}", size=2)
            number += 1
            time.sleep(0.0005)
        assert taken.result()[0].instance_id == "g0"


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_consumer_that_its_own_watchdog_leads_back_to_is_collected(bus: str, rounds: int) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.consumer = Consumer(bus, on_stall=self.told, stall_timeout=0.01)

        def told(self, report: StallReport) -> None:
            """Note the call."""

    trainer = Trainer()
    for _ in range(rounds):
        trainer.consumer.take(timeout=0.02)
    gone = weakref.ref(trainer.consumer)
    del trainer
    gc.collect()
    assert gone() is None
    Consumer(bus).close()


def test_who_hears_of_a_stall_may_close_the_consumer_that_waits(bus: str) -> None:
    consumer = Consumer(bus, on_stall=lambda report: consumer.close(), stall_timeout=0.05)
    with pytest.raises(BusClosedError):
        consumer.take(1, 30)


def test_a_sleeper_whose_group_came_in_time_sleeps_on(bus: str) -> None:
    with (
        Consumer(bus, group_timeout=0.1, on_timeout="drop") as consumer,
        Producer(bus) as producer,
        ThreadPoolExecutor(1) as pool,
    ):
        for number in itertools.count():
            put(producer, f"other{number}", size=2)
            put(producer, f"whole{number}", 0, size=2)
            assert consumer.take(timeout=0) == []
            put(producer, f"whole{number}", 1, size=2)
            if consumer.take(1, 0):
                break  # on a busy machine not at once
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        assert pool.submit(consumer.take, 1, 0.4).result(30) == []
        # Some for a deadline, the threads and the end; thousands in a spin.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 100


class Count(int):
    """An int subclass."""


def test_numbers_of_all_kinds_are_taken(bus: str) -> None:
    with Consumer(bus) as consumer, Producer(bus) as producer:
        for groups, timeout in [(1, 30), (Count(1), 30.0), (2**70, np.float32(30)), (1, np.inf)]:
            put(producer, "a")
            taken = consumer.take(groups, timeout)
            assert len(taken) == 1
            consumer.ack(taken)
        put(producer, "a")
        assert len(consumer.take(timeout=None, max_groups=1)) == 1


WITHOUT_MEMORY = """
import sys, _testcapi, numpy as np
from shmbus import Consumer, Producer

GROUPS = 4
# One that is refused each allocation of a take in turn: the list's, each group's, none.
failures = 0
with Producer(sys.argv[1]) as producer, Consumer(sys.argv[1]) as consumer:
    for refused in range(1, 40):
        keys = [f"{refused}-{i}" for i in range(GROUPS + 1)]
        for key in keys:
            producer.put(key, group_size=1, index=0, x=np.ones(4))
        # With the first all are read: to take the others needs no look at the ring.
        [first] = consumer.take(1, 10.0)
        first.ack()
        groups = []
        _testcapi.set_nomemory(refused, refused + 1)
        try:
            groups = consumer.take(GROUPS, 0)
        except MemoryError:
            failures += 1
        finally:
            _testcapi.remove_mem_hooks()
        leased = consumer.stats().groups_leased
        assert leased == len(groups), f"{leased} under lease, {len(groups)} delivered"
        groups += consumer.take(GROUPS, 0)
        assert [group.instance_id for group in groups] == keys[1:]
        consumer.ack(groups)
print(failures)
"""


def test_a_take_without_memory_leases_nothing_and_keeps_the_order(bus: str, spawn: Spawner) -> None:
    pytest.importorskip("_testcapi")
    assert int(spawn.script(WITHOUT_MEMORY, bus).finish()) > 1


def test_a_loop_that_handles_one_group_at_a_time_holds_one(bus: str) -> None:
    with Producer(bus) as producer, Consumer(bus) as consumer:
        for number in range(50):
            producer.put(number, group_size=1, index=0, tokens=[1])
        for number, group in enumerate(consumer):
            counts = consumer.stats()
            assert (counts.groups_leased, counts.groups_ready) == (1, 49 - number)
            group.ack()
            if number == 49:
                break


def test_a_closed_consumer_ends_its_iterations(bus: str) -> None:
    with Consumer(bus) as consumer, Producer(bus) as producer:
        put(producer, "a")
        groups = iter(consumer)
        assert next(groups).instance_id == "a"
    assert list(groups) == list(consumer) == []
