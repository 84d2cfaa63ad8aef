"""A child forked while its parent's threads hold locks never waits for them."""

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from conftest import DEFAULT_DEADLINE_S, Daemon, beside
from supervisor import forked

import shmbus
from shmbus import Bus, Consumer, Producer

FORKS = 25


def answers(call: Callable[[], Any]) -> None:
    try:
        call()
    except shmbus.BusClosedError as error:
        assert "before a fork" in str(error) or "closed" in str(error), error


def fork_and_call(calls: list[Callable[[], Any]]) -> None:
    """Have a forked child make every call, and require its end."""
    assert forked(lambda: [answers(call) for call in calls]) == 0


@contextmanager
def held(*locks: Any) -> Iterator[None]:
    """Let another thread hold the locks during the block."""
    has_them, over = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            has_them.set()
            over.wait()

    with beside(hold):
        has_them.wait()
        try:
            yield
        finally:
            over.set()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("served", [False, True])
def test_no_call_in_a_child_hangs_whatever_its_parents_threads_hold(
    bus_name: str, daemon: Callable[..., Daemon], served: bool
) -> None:
    data = np.arange(8)
    with Bus.create(bus_name, "4MiB"), Producer(bus_name) as producer:
        if served:
            daemon("--sample-retries", 2)
        consumer = Consumer(bus_name, daemon=served, **({} if served else {"sample_retries": 2}))
        # A producer waiting for space needs a consumer to end: stop them in order.
        over, read = threading.Event(), threading.Event()

        def work(call: Callable[[int], Any], until: threading.Event) -> threading.Thread:
            def run() -> None:
                number = 0
                while not until.is_set():
                    number += 1
                    call(number)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def fail(number: int) -> None:
            # Few groups, given up after some failures: the bus stays unfilled.
            producer.fail(f"f{number % 64}", 0, "down", group_size=1, timeout=60)

        producing = [
            work(fail, over),
            work(lambda i: producer.requests.retries(), over),
            work(lambda i: producer.put(f"g{i}", group_size=1, index=0, timeout=60, x=data), over),
        ]
        reading = [
            work(lambda i: consumer.ack(consumer.take(8, timeout=0.01)), read),
            work(lambda i: consumer.stats(), read),
        ]
        try:
            for _ in range(FORKS):
                fork_and_call([
                    lambda: producer.fail("a", 0, "down", timeout=1),
                    producer.requests.retries,
                    lambda: producer.put("a", group_size=1, index=0, timeout=1, x=data),
                    producer.stats,
                    producer.pressure,
                    lambda: consumer.take(1, timeout=1),
                    consumer.stats,
                    lambda: consumer.ack([]),
                    lambda: consumer.policy_version,
                    consumer.close,
                    producer.close,
                    producer.close,
                ])  # fmt: skip
        finally:
            for stop, threads in ((over, producing), (read, reading)):
                stop.set()
                for thread in threads:
                    thread.join()
            consumer.close()


@pytest.mark.timeout(60)
def test_a_child_forked_where_a_lock_is_held_closes(bus_name: str, producer: Producer) -> None:
    consumer = Consumer(bus_name, daemon=False)
    with held(producer._request_state.lock, consumer._source.lock, consumer._lock):  # type: ignore[union-attr]
        fork_and_call([
            lambda: producer.fail("a", 0, "down", timeout=1), consumer.stats,
            consumer.close, producer.close,
        ])  # fmt: skip
    consumer.close()


def test_a_handle_that_was_not_attached_yet_attaches_in_the_child(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        producer.put("a", group_size=1, index=0, x=np.arange(8))
        with Consumer(bus_name, daemon=False) as consumer:
            copy = pickle.loads(pickle.dumps(consumer))

        def look() -> None:
            assert len(copy.take(timeout=DEFAULT_DEADLINE_S)) == 1
            copy.close()

        with held(copy._lock):
            fork_and_call([look])
