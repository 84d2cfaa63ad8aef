"""Groups ahead of the trainer: a bound visible to producers, without effect on begun groups."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Spawner, ends_of, wait_until, work_until
from counted_calls import count
from counted_work import instructions
from lane import held

import shmbus
from shmbus import Bus, Consumer, Producer
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

X = np.zeros(4, np.float32)

# Puts a sample of each group, in order.
WORKER = """
import sys, numpy as np, shmbus
name, index, size, groups = sys.argv[1], *map(int, sys.argv[2:])
with shmbus.Producer(name) as producer:
    for number in range(groups):
        producer.put(f"g{number}", group_size=size, index=index, round=0, x=np.ones(8), timeout=60)
print("done", flush=True)
"""

# Begins a group and never ends it: its claim on the bound stays unsettled.
HOLDER = """
import sys, time, shmbus
producer = shmbus.Producer(sys.argv[1])
slot = producer.reserve("held", group_size=2, index=0, fields={"x": ("f4", 4)})
print("holds", flush=True)
time.sleep(600)
"""

# Takes and acknowledges groups; dies by itself at the end.
TRAINER = """
import sys, shmbus
with shmbus.Consumer(sys.argv[1]) as consumer:
    print("reads", flush=True)
    for group in consumer:
        group.ack()
"""


@pytest.fixture
def one(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, "1MiB", max_lead=1) as bus:
        yield bus


def put(producer: Producer, key: str, index: int, size: int = 2, timeout: float = 0) -> None:
    producer.put(key, group_size=size, index=index, x=X, timeout=timeout)


def test_a_sample_that_would_begin_a_group_waits_until_one_is_delivered(one: Bus) -> None:
    with Producer(one.name) as producer, Consumer(one.name) as consumer:
        put(producer, "a", 0)
        with pytest.raises(shmbus.BusFullError, match=r"1 group is begun .* at most 1 .max_lead"):
            put(producer, "b", 0, timeout=0.05)
        put(producer, "a", 1)
        (group,) = consumer.take(timeout=10)
        put(producer, "b", 0)  # delivery suffices, without acknowledgement
        group.ack()
        assert consumer.stats().balanced


def test_many_workers_that_share_large_groups_get_through_a_bound_of_one(
    one: Bus, spawn: Spawner
) -> None:
    workers = [spawn.script(WORKER, one.name, index, 4, 40) for index in range(4)]
    with Consumer(one.name) as consumer:
        seen = []
        while len(seen) < 40:
            for group in consumer.take(8, timeout=30):
                seen.append(group.instance_id)
                group.ack()
                stats = consumer.stats()
                assert stats.groups_open + stats.groups_ready <= 1, stats
        assert sorted(seen) == sorted(f"g{number}" for number in range(40))
        for worker in workers:
            worker.finish()
        assert held(one) == 0


def test_the_claim_of_a_worker_that_died_is_free_again(one: Bus, spawn: Spawner) -> None:
    holder = spawn.script(HOLDER, one.name, until="holds")
    with Producer(one.name) as producer, Consumer(one.name) as consumer:
        with pytest.raises(shmbus.BusFullError):
            put(producer, "b", 0)
        put(producer, "held", 1)  # a sibling of a begun sample
        holder.kill()
        work_until(consumer, lambda: consumer.stats().in_ring == 0)
        time.sleep(1.5)  # a sweep; the open group keeps its place
        consumer.take(timeout=0.05)
        assert held(one) == 1
        put(producer, "held", 0)
        consumer.take(timeout=10)[0].ack()
        assert held(one) == 0


def test_a_claim_without_any_sample_is_free_after_its_owners_death(
    one: Bus, spawn: Spawner
) -> None:
    holder = spawn.script(HOLDER, one.name, until="holds")
    holder.kill()
    with Producer(one.name) as producer, Consumer(one.name) as consumer:
        work_until(consumer, lambda: held(one) == 0)
        put(producer, "b", 0)


def test_an_aborted_reservation_and_one_that_commits(one: Bus) -> None:
    with Producer(one.name) as producer:
        fields = {"x": ("f4", 4)}
        slot = producer.reserve("a", group_size=2, index=0, fields=fields)
        assert held(one) == 1
        slot.abort()
        assert held(one) == 0
        with producer.reserve("b", group_size=2, index=0, fields=fields):
            pass
        assert held(one) == 1
        with pytest.raises(shmbus.BusFullError, match="max_lead=1"):
            producer.reserve("c", group_size=2, index=0, fields=fields, timeout=0)


# Lets waiting workers begin group after group; prints the woken waiters of each group.
BEGINNERS = """
import threading, time, numpy as np
from shmbus_ext import _core
workers, kind = int(sys.argv[2]), sys.argv[3]
shmbus.base.limits.REQUEST_WAIT_S = 1000.0
with ExitStack() as stack:
    bus = stack.enter_context(
        shmbus.Bus.create(sys.argv[1], "64MiB", max_lead=1, max_producers=workers + 1)
    )
    consumer = stack.enter_context(shmbus.Consumer(bus.name))
    producers = [shmbus.Producer(bus.name, on_stall=None) for _ in range(workers)]
    x = np.zeros(1, np.float32)
    ahead = threading.Semaphore(0)
    def work(number):
        if kind == "put":
            producers[number].put(f"g{number}", group_size=1, index=0, x=x)
        else:
            request = producers[number].requests.next()
            producers[number].requests.answer(request, x=x)
        ahead.release()
    if kind == "lane":
        for number in range(workers):
            consumer.request(f"q{number}", group_size=1, prompt=x)
    for number in range(workers):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    found = []
    for _ in range(3):
        assert ahead.acquire(timeout=60)
        time.sleep(0.3)  # the rest falls asleep
        woken()
        (group,) = consumer.take(1, timeout=60)
        found.append(woken())
        group.ack()
    print(json.dumps(found), flush=True)
    import os
    os._exit(0)
"""


@pytest.mark.parametrize("kind", ["put", "lane"])
def test_a_delivered_group_wakes_few_workers_however_many_wait(
    bus_name: str, spawn: Spawner, tmp_path: Path, kind: str
) -> None:
    woken = count(spawn, tmp_path, BEGINNERS, bus_name, 32, kind)
    assert max(woken) <= 3, woken


def test_a_put_that_waits_to_begin_a_group_takes_no_more_space_with_each_look(one: Bus) -> None:
    with Producer(one.name) as producer, Producer(one.name) as other:
        put(other, "a", 0)
        free = one._segment.free_extents()
        with pytest.raises(shmbus.BusFullError):
            put(producer, "b", 0, timeout=0.1)
        assert one._segment.free_extents() >= free - 1


def test_put_many_commits_what_may_begin_and_says_how_much(one: Bus) -> None:
    items = [
        {"instance_id": key, "group_size": 2, "index": index, "x": X}
        for key in "ab"
        for index in range(2)
    ]
    with Producer(one.name) as producer, Consumer(one.name) as consumer:
        with pytest.raises(shmbus.BusFullError) as caught:
            producer.put_many(items, timeout=0.05)
        assert caught.value.accepted == 2
        consumer.take(timeout=10)[0].ack()
        assert producer.put_many(items[2:], timeout=0) == 2


def test_reports_of_failures_wait_for_nobody_and_a_group_given_up_makes_room(one: Bus) -> None:
    with Producer(one.name) as producer, Consumer(one.name) as consumer:
        put(producer, "a", 0)
        producer.fail("b", 0, "crashed", group_size=2, timeout=0)
        producer.fail("a", 1, "crashed", group_size=2, timeout=0)
        work_until(consumer, lambda: held(one) == 0)
        assert consumer.stats().dropped["failed"] == 2


def test_a_dropped_group_frees_its_place_without_a_look_at_the_waiting_groups(
    bus_name: str,
) -> None:
    costs = []
    for waiting in (10, 400):
        with (
            Bus.create(f"{bus_name}-{waiting}", "4MiB", max_lead=1000) as bus,
            Producer(bus.name) as producer,
        ):
            collector = Collector(bus.name, StashPolicy(skip_zero_variance=True))
            for number in range(waiting):
                put(producer, f"g{number}", 0)
            while collector.pump_once(0.0):
                pass
            put(producer, "useless", 0)
            put(producer, "useless", 1)
            collector.pump_once(0.0)
            assert held(bus) == waiting + 1

            def drop(collector: Collector = collector) -> None:
                collector.release_discards()
                collector.pump_once(0.0)

            costs.append(instructions(drop))
            assert held(bus) == waiting
            collector.close()
    assert costs[1] <= 1.1 * costs[0]


def test_surplus_samples_hold_no_place(one: Bus) -> None:
    with Producer(one.name) as producer, Consumer(one.name) as consumer:
        for index in range(2):
            producer.put("a", group_size=2, index=index, round=1, x=X)
        consumer.take(timeout=10)[0].ack()
        producer.put("a", group_size=2, index=0, round=1, x=X)  # begins, to its knowledge
        work_until(consumer, lambda: held(one) == 0)
        assert consumer.stats().dropped == {"surplus": 1}


def test_no_place_is_lost_by_deaths_of_the_consumer(one: Bus, spawn: Spawner) -> None:
    workers = [spawn.script(WORKER, one.name, index, 2, 60) for index in range(2)]
    for _ in range(4):
        trainer = spawn.script(TRAINER, one.name, until="reads")
        time.sleep(0.05)
        trainer.kill()
    with Consumer(one.name) as consumer:

        def all_done() -> bool:
            consumer.ack(consumer.take(16, timeout=0.05))
            return not any(worker.running for worker in workers)

        wait_until(all_done, 60)
        for worker in workers:
            worker.finish()
        consumer.ack(consumer.take(16, timeout=0.2))
        assert held(one) == 0
        assert consumer.stats().acknowledged >= 120


def test_what_awaits_sees_the_bound_and_siblings_do_not(one: Bus) -> None:
    async def scenario(producer: Producer, consumer: Consumer) -> None:
        await producer.aput("a", group_size=2, index=0, x=X)
        assert producer.pressure() == 1.0
        assert not await producer.wait_ready(timeout=0.05)
        assert await producer.wait_ready(timeout=5, instance_id="a")
        assert not await producer.wait_ready(timeout=0.05, instance_id="a", round=7)
        waiting = asyncio.create_task(producer.aput("b", group_size=2, index=0, x=X, timeout=30))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await producer.aput("a", group_size=2, index=1, x=X)
        await asyncio.to_thread(lambda: consumer.take(timeout=10)[0].ack())
        await waiting

    with Producer(one.name) as producer, Consumer(one.name) as consumer:
        asyncio.run(scenario(producer, consumer))


def test_a_daemon_that_leases_makes_room_as_a_consumer_does(
    bus_name: str, daemon: object, spawn: Spawner
) -> None:
    server = daemon("--capacity", "1MiB", "--max-lead", "1")  # type: ignore[operator]
    workers = [spawn.script(WORKER, bus_name, index, 2, 30) for index in range(2)]
    with Consumer(bus_name) as consumer:
        seen = 0
        while seen < 30:
            for group in consumer.take(8, timeout=30):
                group.ack()
                seen += 1
                if seen == 10:
                    server.restart()
    for worker in workers:
        worker.finish()


def test_a_bound_in_versions_follows_what_the_trainer_takes(bus_name: str) -> None:
    bus = Bus.create(bus_name, "1MiB", max_lead_versions=1)
    with ends_of(bus) as (producer, consumer):
        number = 0

        def fill() -> int:
            nonlocal number
            while True:
                try:
                    put(producer, f"g{number}", 0, size=1)
                except shmbus.BusFullError:
                    return held(bus)
                number += 1

        def train(groups: int) -> None:
            left = groups
            while left:
                fill()
                taken = consumer.take(left, timeout=10)
                consumer.ack(taken)
                left -= len(taken)

        assert fill() == 1  # without knowledge of the batch
        train(4)
        consumer.policy_version = 1
        # (1 + 1) versions of 4 groups, none yet of this version.
        assert fill() == 8
        train(3)
        assert fill() == 5
        # More than the last version's: a version ahead of this version's groups.
        train(3)
        assert fill() == 6
        consumer.policy_version = 2
        assert fill() == 12


def test_a_trainer_that_takes_what_there_is_does_not_raise_its_own_bound(bus_name: str) -> None:
    """Groups leave ahead of the batch, and the version is set before the acknowledgement."""
    bus = Bus.create(bus_name, "1MiB", max_lead_versions=1)
    with ends_of(bus) as (producer, consumer):
        number = 0
        pool: list[shmbus.Group] = []
        ahead = []
        for version in range(1, 12):
            while len(pool) < 4:
                with contextlib.suppress(shmbus.BusFullError):
                    while True:
                        put(producer, f"g{number}", 0, size=1)
                        number += 1
                pool += consumer.take(64, timeout=10)
            ahead.append(held(bus) + len(pool) - 4)
            batch, pool = pool[:4], pool[4:]
            consumer.policy_version = version
            consumer.ack(batch)
        # Begun and untrained: this version's batch, and the next.
        assert max(ahead[3:]) <= 8, ahead
        assert _core.lead_state(bus._segment)[4] == 4


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_lead": 0}, ValueError, "max_lead"),
        ({"max_lead": 5000}, ValueError, "1 to 4096"),
        ({"max_lead": "1"}, TypeError, "max_lead"),
        ({"max_lead_versions": -1}, ValueError, "max_lead_versions"),
        ({"max_lead_versions": True}, TypeError, "max_lead_versions"),
        ({"request_capacity": "1KiB"}, ValueError, "request_capacity"),
    ],
)
def test_bad_bounds_are_refused_and_make_no_bus(
    bus_name: str, options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Bus.create(bus_name, "1MiB", **options)  # type: ignore[arg-type]
    with pytest.raises(shmbus.BusNotFoundError):
        Bus.open(bus_name)
