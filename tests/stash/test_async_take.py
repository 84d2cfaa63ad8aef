"""Complete groups in an event loop: embedded and by a daemon, alone and many, and cancelled.

Claims are checked for both kinds of source. After a cancellation the ledger shows free groups, for
the next taker.
"""

import asyncio
import pickle
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, Spawner, wait_until

import shmbus
from shmbus import Bus, Consumer, Group, Producer, StallReport

LONG_S = 60.0


@pytest.fixture(params=["embedded", "daemon"])
def name(
    request: pytest.FixtureRequest, bus_name: str, daemon: Callable[..., Daemon]
) -> Iterator[str]:
    if request.param == "embedded":
        with Bus.create(bus_name, "4MiB"):
            yield bus_name
    else:
        served = daemon("--capacity", "4MiB", "--unlink-on-exit")
        yield bus_name
        if served.child.running:
            served.stop()


def put(producer: Producer, key: str, size: int = 2, indices: range | None = None) -> None:
    for index in indices or range(size):
        producer.put(key, group_size=size, index=index, x=np.arange(4), timeout=LONG_S)


async def ticks(count: list[int]) -> None:
    while True:
        count[0] += 1
        await asyncio.sleep(0.005)


def threads_of_this_process() -> int:
    return threading.active_count()


async def balanced(consumer: Consumer, *, leased: int) -> None:
    """Wait until exactly so many groups are leased: vain grants went back."""
    deadline = time.monotonic() + LONG_S
    while True:
        ledger = await asyncio.to_thread(consumer.stats)
        assert ledger.balanced
        if ledger.groups_leased == leased:
            return
        assert time.monotonic() < deadline, ledger
        await asyncio.sleep(0.01)


async def test_a_take_that_waits_leaves_the_loop_free_and_gets_what_comes(name: str) -> None:
    count = [0]
    with Consumer(name) as consumer, Producer(name) as producer:
        other = asyncio.create_task(ticks(count))
        taking = asyncio.create_task(consumer.atake(4, LONG_S))
        while count[0] < 10:
            assert not taking.done()
            await asyncio.sleep(0.01)
        put(producer, "a")
        [group] = await taking
        assert group.instance_id == "a" and group.complete
        group.ack()
        other.cancel()


async def test_a_take_returns_at_its_timeout_and_at_once_for_none(name: str) -> None:
    with Consumer(name) as consumer, Producer(name) as producer:
        assert await consumer.atake(1, 0) == []
        assert await consumer.atake(max_groups=1, timeout=0.05) == []
        assert await consumer.atake() == []
        put(producer, "a")
        put(producer, "b")
        groups: list[Group] = []
        while len(groups) < 2:
            groups += await consumer.atake(2, 0)
        assert [group.instance_id for group in groups] == ["a", "b"]
        consumer.ack(groups)


async def test_a_loop_over_a_consumer_gets_each_group_and_ends_when_it_is_closed(
    name: str,
) -> None:
    keys = [f"k{number}" for number in range(50)]
    got: list[str] = []
    with Consumer(name) as consumer, Producer(name) as producer:

        async def read() -> None:
            async for group in consumer:
                with group:
                    got.append(group.instance_id)

        reading = asyncio.create_task(read())
        for key in keys:
            put(producer, key)
            await asyncio.sleep(0)
        while len(got) < len(keys):
            await asyncio.sleep(0.005)
        consumer.close()
        await asyncio.wait_for(reading, LONG_S)
    assert got == keys


async def test_many_tasks_share_one_thread_and_get_each_group_once(name: str) -> None:
    tasks, groups = 40, 200
    seen: Counter[str] = Counter()
    with Consumer(name) as consumer, Producer(name) as producer:

        async def read() -> None:
            while True:
                for group in await consumer.atake(2, None):
                    seen[group.instance_id] += 1
                    group.ack()

        await consumer.atake(1, 0.01)  # starts the executor's thread
        before = threads_of_this_process()
        readers = [asyncio.create_task(read()) for _ in range(tasks)]
        await asyncio.sleep(0.3)
        assert threads_of_this_process() <= before + 1
        for number in range(groups):
            put(producer, f"k{number}")
            if number % 10 == 0:
                await asyncio.sleep(0)
        while len(seen) < groups:
            await asyncio.sleep(0.01)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        assert set(seen.values()) == {1}
        await balanced(consumer, leased=0)


async def test_takes_that_are_cancelled_at_any_time_lose_no_group(name: str, seed: int) -> None:
    """Cancelled in a wait, at its end, with groups on their way: each is taken once in the end."""
    dice = random.Random(seed)
    groups, taken, made = 150, Counter[str](), 0
    with Consumer(name) as consumer, Producer(name) as producer:
        while sum(taken.values()) < groups:
            if made < groups:
                put(producer, f"k{made}")
                made += 1
            task = asyncio.create_task(consumer.atake(dice.choice([1, 3, 64]), LONG_S))
            for _ in range(dice.choice([0, 0, 1, 2, 3])):
                await asyncio.sleep(0)
            if dice.random() < 0.5:
                await asyncio.sleep(dice.random() * 0.004)
            if made == groups and dice.random() < 0.5:
                await asyncio.wait([task], timeout=1)
            task.cancel()
            try:
                for group in await task:
                    taken[group.instance_id] += 1
                    group.ack()
            except asyncio.CancelledError:
                pass
        assert set(taken.values()) == {1} and len(taken) == groups
        await balanced(consumer, leased=0)


class CancelledAt:
    """Awaits a coroutine, and cancels it at its n-th suspension."""

    def __init__(self, inner: Coroutine[Any, Any, list[Group]], at: int) -> None:
        self.inner = inner
        self.at = at
        self.done = False

    def __await__(self) -> Generator[Any, None, list[Group]]:
        try:
            for _ in range(self.at):
                yield self.inner.send(None)
            self.inner.throw(asyncio.CancelledError())
            raise AssertionError("a coroutine goes on after its cancellation")
        except StopIteration as stop:
            self.done = True
            return stop.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("moment", ["before", "between"])
async def test_a_take_that_is_cancelled_at_each_await_has_leased_nothing(
    name: str, moment: str
) -> None:
    with Producer(name) as producer, Consumer(name) as origin:
        pickled = pickle.dumps(origin)
    at, done = 0, False
    while not done:
        at += 1
        key = f"k{at}"
        with Producer(name) as producer, pickle.loads(pickled) as consumer:
            if moment == "before":
                put(producer, key)
            take = CancelledAt(consumer.atake(1, LONG_S), at)
            task = asyncio.create_task(wait_for(take))
            if moment == "between":
                await asyncio.sleep(0.02)
                put(producer, key)
            try:
                groups = await task
            except asyncio.CancelledError:
                await balanced(consumer, leased=0)
                groups = []
                while not groups:
                    groups = await consumer.atake(1, LONG_S)
            done = take.done
            assert [group.instance_id for group in groups] == [key]
            groups[0].ack()
            await balanced(consumer, leased=0)
    assert at >= 2


async def wait_for(take: CancelledAt) -> list[Group]:
    return await take


def test_a_consumer_outlives_the_loops_that_it_was_used_in(name: str) -> None:
    async def one(producer: Producer, key: str) -> str:
        taking = asyncio.create_task(consumer.atake(1, LONG_S))
        await asyncio.sleep(0)
        put(producer, key)
        [group] = await taking
        group.ack()
        return group.instance_id

    with Consumer(name) as consumer, Producer(name) as producer:
        assert [asyncio.run(one(producer, key)) for key in "abc"] == ["a", "b", "c"]
        put(producer, "d")
        [group] = consumer.take(1, LONG_S)
        group.ack()


def test_threads_and_loops_take_from_one_consumer(name: str) -> None:
    seen: Counter[str] = Counter()
    lock = threading.Lock()
    groups = 120

    def note(taken: list[Group]) -> None:
        with lock:
            seen.update(group.instance_id for group in taken)
        consumer.ack(taken)

    def in_thread() -> None:
        while len(seen) < groups:
            note(consumer.take(4, 0.05))

    async def read() -> None:
        while len(seen) < groups:
            note(await consumer.atake(4, 0.05))

    async def main() -> None:
        await asyncio.gather(*(read() for _ in range(3)))

    with Consumer(name) as consumer, Producer(name) as producer:
        workers = [threading.Thread(target=in_thread) for _ in range(2)]
        workers += [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
        for worker in workers:
            worker.start()
        for number in range(groups):
            put(producer, f"k{number}")
        for worker in workers:
            worker.join(LONG_S)
        assert set(seen.values()) == {1} and len(seen) == groups
        wait_until(lambda: consumer.stats().acknowledged == 2 * groups)


async def test_an_unpickled_consumer_attaches_without_blocking_the_loop(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Consumer(bus_name, wait=LONG_S) as consumer:
        pickled = pickle.dumps(consumer)
    count = [0]
    other = asyncio.create_task(ticks(count))
    with pickle.loads(pickled) as consumer:
        taking = asyncio.create_task(consumer.atake(1, LONG_S))
        while count[0] < 10:
            await asyncio.sleep(0.005)
        assert not taking.done()
        with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
            put(producer, "a")
            [group] = await taking
            assert group.instance_id == "a"
            group.ack()
    other.cancel()


async def test_closing_ends_takes_that_wait_in_the_loop(name: str) -> None:
    consumer = Consumer(name)
    waiting = [asyncio.create_task(consumer.atake(1, None)) for _ in range(3)]
    await asyncio.sleep(0.05)
    threading.Timer(0.05, consumer.close).start()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, shmbus.BusClosedError)


async def test_a_stall_is_reported_to_a_loop_too(name: str) -> None:
    reports: list[StallReport] = []
    with Consumer(name, on_stall=reports.append, stall_timeout=0.2) as consumer:
        assert await consumer.atake(1, 1.5) == []
    assert reports and reports[0].waits_for == "a complete group"
    with (
        Consumer(name, on_stall="raise", stall_timeout=0.2) as consumer,
        pytest.raises(shmbus.StallError),
    ):
        await consumer.atake(1, None)


async def test_ranks_take_their_shards_in_a_loop(
    bus_name: str, daemon: Callable[..., Daemon]
) -> None:
    daemon("--capacity", "4MiB", "--unlink-on-exit")
    # Attaching waits for no second rank.
    ranks = [Consumer(bus_name, rank=rank, world_size=2) for rank in range(2)]
    with ranks[0], ranks[1], Producer(bus_name) as producer:
        takes = [asyncio.create_task(rank.atake(2, LONG_S)) for rank in ranks]
        for number in range(4):
            put(producer, f"k{number}")
        shards = await asyncio.gather(*takes)
        keys = [group.instance_id for shard in shards for group in shard]
        assert len(keys) == len(set(keys)) and all(shards)
        for rank, shard in zip(ranks, shards, strict=True):
            rank.ack(shard)


async def test_a_daemon_that_is_killed_and_restarted_is_waited_for(
    bus_name: str, daemon: Callable[..., Daemon]
) -> None:
    served = daemon("--capacity", "4MiB")
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        taking = asyncio.create_task(consumer.atake(1, LONG_S))
        await asyncio.sleep(0.05)
        served.kill()
        await asyncio.to_thread(served.start)
        put(producer, "a")
        [group] = await taking
        assert group.instance_id == "a"
        group.ack()
        await balanced(consumer, leased=0)


EXITS = """
import asyncio, sys, shmbus
async def main():
    with shmbus.Consumer(sys.argv[1]) as consumer:
        task = asyncio.create_task(consumer.atake(1, None))
        await asyncio.sleep(0.1)
        task.cancel()
asyncio.run(main())
print("ended", flush=True)
"""


def test_a_process_whose_take_was_cancelled_ends_without_a_warning(
    name: str, spawn: Spawner
) -> None:
    child = spawn.script(EXITS, name, until="ended")
    assert child.finish() == "ended\n"


async def test_leaving_a_loop_over_a_consumer_early_keeps_nothing_leased(name: str) -> None:
    with Consumer(name) as consumer, Producer(name) as producer:
        for key in "abc":
            put(producer, key)
        async for group in consumer:
            group.ack()
            break
        await balanced(consumer, leased=0)
        groups = await consumer.atake(4, LONG_S)
        while len(groups) < 2:
            groups += await consumer.atake(4, LONG_S)
        assert sorted(each.instance_id for each in groups) == ["b", "c"]
        consumer.ack(groups)
