"""A task cancelled in `aput` or `wait_ready` put nothing, and harms no other task."""

import asyncio
import contextlib
import random
import signal
import threading
from collections.abc import Awaitable

import numpy as np
import pytest
from conftest import DEFAULT_DEADLINE_S, ends_of, take_rest

from shmbus import Bus, BusFullError, Producer

LARGE = np.zeros(20_000, np.uint8)

#: Turns of the loop before a cancellation: no wait takes more of them before its sleep in a
#: thread.
TURNS = 8


def fill(producer: Producer) -> list[str]:
    keys: list[str] = []
    with contextlib.suppress(BusFullError):
        while True:
            producer.put(f"full-{len(keys)}", group_size=1, index=0, x=LARGE, timeout=0)
            keys.append(f"full-{len(keys)}")
    return keys


async def cancelled_after(turns: int, wait: Awaitable[object]) -> bool:
    """Cancel a task after so many turns of the loop; return whether the task still ran."""
    task = asyncio.ensure_future(wait)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return task.cancelled()


def test_aput_that_is_cancelled_at_any_await_of_a_full_bus_puts_nothing(bus_name: str) -> None:
    with ends_of(Bus.create(bus_name, "256KiB"), daemon=False) as (producer, consumer):
        keys = fill(producer)

        async def run() -> None:
            for turns in range(TURNS):
                put = producer.aput("never", group_size=1, index=0, x=LARGE)
                assert await cancelled_after(turns, put)
                assert await cancelled_after(turns, producer.wait_ready(0.5))

        asyncio.run(run())
        assert take_rest(consumer) == keys
        assert consumer.stats().balanced
        producer.put("next", group_size=1, index=0, x=LARGE, timeout=5)
        assert take_rest(consumer) == ["next"]


def test_of_many_tasks_those_that_are_not_cancelled_put_and_no_others_do(
    bus_name: str, seed: int
) -> None:
    rng = random.Random(seed)
    found: list[str] = []
    over = threading.Event()
    with ends_of(Bus.create(bus_name, "256KiB"), daemon=False) as (producer, consumer):

        def drain() -> None:
            while not over.wait(rng.uniform(0, 0.003)):
                found.extend(take_rest(consumer))

        async def put(number: int, done: set[str]) -> None:
            if number % 3 == 0:
                await producer.wait_ready(0.9)
            await producer.aput(f"t{number}", group_size=1, index=0, x=LARGE)
            # No await in between: a task here was not cancelled before.
            done.add(f"t{number}")

        async def run() -> tuple[set[str], list[bool]]:
            done: set[str] = set()
            tasks = [asyncio.ensure_future(put(number, done)) for number in range(400)]
            for task in rng.sample(tasks, 200):
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
                task.cancel()
            results = await asyncio.wait_for(
                asyncio.gather(*tasks, return_exceptions=True), DEFAULT_DEADLINE_S
            )
            return done, [isinstance(result, asyncio.CancelledError) for result in results]

        thread = threading.Thread(target=drain)
        thread.start()
        try:
            done, cancelled = asyncio.run(run())
        finally:
            over.set()
            thread.join()
        found += take_rest(consumer)
        assert done == {f"t{number}" for number, gone in enumerate(cancelled) if not gone}
        assert sorted(found) == sorted(done)
        assert 0 < sum(cancelled) <= 200
        ledger = consumer.stats()
        assert ledger.balanced and not ledger.dropped and not ledger.in_ring


@pytest.mark.parametrize("wait", ["aput", "wait_ready"])
def test_ctrl_c_ends_a_loop_that_waits_for_space_and_nothing_is_put(
    bus_name: str, wait: str
) -> None:
    with ends_of(Bus.create(bus_name, "256KiB"), daemon=False) as (producer, consumer):
        keys = fill(producer)

        async def run() -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, signal.raise_signal, signal.SIGINT)
            if wait == "aput":
                await producer.aput("never", group_size=1, index=0, x=LARGE)
            else:
                await producer.wait_ready(0.5)

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(run())
        assert take_rest(consumer) == keys
        producer.put("next", group_size=1, index=0, x=LARGE, timeout=5)
        assert take_rest(consumer) == ["next"]
        assert consumer.stats().balanced
