"""A consumer's deliveries, and their fate: groups, leases, restarts, views, stragglers."""

import gc
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, take_groups, wait_until

import shmbus
from shmbus import Bus, Consumer, Group, Producer
from shmbus.base import limits


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, capacity="2MiB", max_producers=8) as handle:
        yield handle


def put(producer: Producer, key: str, index: int, size: int = 2, **more: Any) -> None:
    arguments: dict[str, Any] = {"x": np.full(20, index, np.int32), "timeout": 30, **more}
    producer.put(key, group_size=size, index=index, **arguments)


def put_group(producer: Producer, key: str, size: int = 2, **more: Any) -> None:
    for index in range(size):
        put(producer, key, index, size, **more)


def take_all(consumer: Consumer, count: int) -> list[Group]:
    """Take exactly `count` groups, and check that no further group comes."""
    groups = take_groups(consumer, count) if count else []
    assert consumer.take(1, 0) == []
    return groups


def names(groups: list[Group]) -> list[str]:
    return [group.instance_id for group in groups]


def assert_whole(group: Group, size: int = 2) -> None:
    assert group.complete
    assert [t.index for t in group] == list(range(size))
    assert all(np.array_equal(t["x"], np.full(20, t.index)) for t in group)


def balanced(consumer: Consumer) -> shmbus.Ledger:
    ledger = consumer.stats()
    assert ledger.balanced, ledger
    return ledger


# --- groups


def test_scrambled_and_interleaved_samples_of_many_producers_come_out_as_whole_groups(
    bus: Bus, seed: int
) -> None:
    rng = random.Random(seed)
    sizes = {f"k{number}": rng.choice([1, 2, 8, 16]) for number in range(100)}
    order = [(key, index) for key, size in sizes.items() for index in range(size)]
    rng.shuffle(order)
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(bus.name)) for _ in range(5)]
        consumer = stack.enter_context(Consumer(bus.name))
        groups: list[Group] = []
        for key, index in order:
            put(rng.choice(producers), key, index, sizes[key])
            if rng.random() < 0.1:
                groups += consumer.take(rng.randrange(1, 9), 0)
        groups += take_all(consumer, len(sizes) - len(groups))
        assert sorted(names(groups)) == sorted(sizes)
        for group in groups:
            assert_whole(group, sizes[group.instance_id])
            assert (group.size, len(group), group.round) == (
                len(group.trajectories),
                group.size,
                None,
            )
        # Each producer's numbers arrive without a gap and without a repetition.
        for producer in producers:
            of_it = [t.sequence for g in groups for t in g if t.producer_id == producer.producer_id]
            assert sorted(of_it) == list(range(producer.stats().committed))


def test_groups_come_in_the_order_of_completion_and_a_prompt_again_begins_a_new_one(
    bus: Bus, producer: Producer
) -> None:
    with Consumer(bus.name) as consumer:
        for key, index in [("a", 0), ("b", 1), ("c", 0), ("c", 1), ("b", 0), ("a", 1), ("b", 0)]:
            put(producer, key, index)
        assert consumer.take(1, 10)[0].instance_id == "c"
        put(producer, "b", 1)
        assert names(take_all(consumer, 3)) == ["b", "a", "b"]


def test_what_was_open_when_the_reader_passed_comes_in_order_too(
    bus: Bus, producer: Producer
) -> None:
    with Consumer(bus.name) as consumer:
        slots = [
            producer.reserve(f"g{i}", group_size=1, index=0, fields={}, score=0.0) for i in range(9)
        ]
        assert consumer.take(timeout=0) == []
        for i, slot in enumerate(slots):
            if i != 4:
                slot.commit()
        assert names(take_all(consumer, 8)) == [f"g{i}" for i in range(9) if i != 4]
        slots[4].commit()
        assert names(take_all(consumer, 1)) == ["g4"]


def test_a_prompt_sampled_in_several_rounds_at_once_never_mixes(
    bus: Bus, producer: Producer, seed: int
) -> None:
    order = [(round, index) for round in range(20) for index in range(4)]
    random.Random(seed).shuffle(order)
    with Consumer(bus.name) as consumer:
        for round, index in order:
            put(producer, "a", index, 4, round=round, meta=round)
        put(producer, "a", 0, 4, round=3, meta="surplus")
        groups = take_all(consumer, 20)
        assert sorted(group.round or 0 for group in groups) == list(range(20))
        for group in groups:
            assert_whole(group, 4)
            assert {t.meta for t in group} == {group.round}
        assert balanced(consumer).dropped == {"surplus": 1}


def test_the_first_of_two_samples_stays_and_the_second_is_counted(
    bus: Bus, producer: Producer
) -> None:
    with Consumer(bus.name) as consumer:
        put(producer, "a", 0, meta="first")
        put(producer, "a", 0, meta="second")
        put(producer, "a", 1)
        put(producer, "b", 0)
        put(producer, "b", 2, 3)
        put(producer, "b", 1)
        groups = take_all(consumer, 2)
        assert names(groups) == ["a", "b"]
        assert groups[0][0].meta == "first"
        assert balanced(consumer).dropped == {"duplicate": 1, "size_mismatch": 1}


def test_duplicates_can_be_errors_and_lose_nothing(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name, duplicate="error") as consumer:
        put_group(producer, "before")
        put(producer, "a", 0)
        put(producer, "a", 0)
        put(producer, "a", 0)
        put_group(producer, "after")
        put(producer, "a", 1)
        seen, raised = [], 0
        for _ in range(5):
            try:
                seen += names(consumer.take(9, 0))
            except shmbus.ProtocolError as error:
                raised += 1
                assert f"'a'[0] came twice, now from producer {producer.producer_id}" in str(error)
        assert raised == 2
        assert seen == ["before", "after", "a"]
        assert balanced(consumer).dropped == {"duplicate": 2}


@pytest.mark.parametrize("policy", ["wait", "drop", "partial"])
def test_an_incomplete_group_meets_the_policy_for_its_deadline(
    bus: Bus, producer: Producer, policy: Any
) -> None:
    with Consumer(bus.name, group_timeout=0.15, on_timeout=policy) as consumer:
        put(producer, "late", 2, 4)
        put(producer, "late", 0, 4)
        put_group(producer, "whole")
        assert names(take_all(consumer, 1)) == ["whole"]
        groups = consumer.take(9, 0.5 if policy == "wait" else 20.0) if policy != "drop" else []
        if policy == "drop":
            wait_until(lambda: consumer.take(1, 0.01) or consumer.stats().dropped)
        ledger = balanced(consumer)
        if policy == "partial":
            [group] = groups
            assert (len(group), group.size, group.complete) == (2, 4, False)
            assert [t.index for t in group] == [0, 2]
            group.ack()
            assert balanced(consumer).acknowledged == 2
        else:
            assert groups == []
            assert ledger.dropped == ({"timeout": 2} if policy == "drop" else {})
        assert ledger.groups_timed_out == (policy != "wait")
        assert ledger.groups_open == (policy == "wait")


def test_stale_groups_are_dropped_whole(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name, max_policy_lag=1) as consumer:
        put(producer, "mixed", 0, policy_version=2)
        put(producer, "mixed", 1, policy_version=5)
        put_group(producer, "old", policy_version=3)
        put_group(producer, "new", policy_version=4)
        consumer.policy_version = 5
        assert producer.policy_version == bus.policy_version == consumer.policy_version == 5
        assert names(take_all(consumer, 1)) == ["new"]
        assert balanced(consumer).dropped == {"stale": 4}


def test_groups_without_variance_are_dropped_whole(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name, skip_zero_variance=True) as consumer:
        put_group(producer, "level", 4, score=1.0)
        put(producer, "useful", 0, score=1.0)
        put(producer, "useful", 1, score=0.0)
        assert names(take_all(consumer, 1)) == ["useful"]
        assert balanced(consumer).dropped == {"zero_variance": 4}


def test_the_bound_on_stashed_bytes_drops_the_oldest_groups(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name, max_stash_bytes=20_000, on_overflow="drop") as consumer:
        for number in range(20):
            put(producer, f"k{number}", 0, x=np.zeros(4000, np.uint8))
        assert consumer.take(1, 0) == []
        assert balanced(consumer).dropped == {"overflow": 16}
        put(producer, "k19", 1)
        assert names(take_all(consumer, 1)) == ["k19"]


# --- successive consumers


KEEPS = """
import sys, time, shmbus
consumer = shmbus.Consumer(sys.argv[1])
kept = []
while len(kept) < int(sys.argv[2]):
    kept += consumer.take(9, 1)
    for group in kept:
        if group.instance_id.startswith("done") and group.state == "leased":
            group.ack()
views = [t["x"] for group in kept if group.state == "leased" for t in group]
print("holds", flush=True)
time.sleep(600)
"""


def test_the_ledger_balances_after_every_step(bus: Bus, seed: int) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "max_policy_lag": 3, "skip_zero_variance": True, "max_stash_bytes": 200_000,
        "on_overflow": "drop", "group_timeout": 0.05, "on_timeout": "partial",
    }  # fmt: skip
    with ExitStack() as stack:
        producers = [Producer(bus.name) for _ in range(3)]
        consumer = stack.enter_context(Consumer(bus.name, **options))
        leased: list[Group] = []
        slots: list[Any] = []
        for step in range(1500):
            chance = rng.random()
            producer = rng.choice(producers)
            key, size = f"k{rng.randrange(12)}", rng.choice([2, 2, 2, 3])
            more = {"score": rng.random() if step % 7 else 0.0, "policy_version": step // 300}
            if rng.random() < 0.5:
                more["round"] = rng.randrange(step // 200 + 1)
            with suppress(shmbus.BusFullError):
                if chance < 0.6:
                    x = np.zeros(rng.choice([0, 100, 5000, 40_000]), np.uint8)
                    put(producer, key, rng.randrange(size), size, x=x, timeout=0, **more)
                elif chance < 0.65:
                    fields = {"x": ("u1", rng.randrange(9000))}
                    arguments = {"group_size": size, "index": 0, "fields": fields, "timeout": 0}
                    slots.append(producer.reserve(key, **arguments))
            if slots and chance > 0.93:
                slot = slots.pop(rng.randrange(len(slots)))
                slot.commit() if rng.random() < 0.6 else slot.abort()
            if chance > 0.6:
                leased += consumer.take(rng.randrange(1, 5), 0)
            if leased and chance > 0.75:
                end = rng.choice([Group.ack, Group.give_back, Group.drop])
                end(leased.pop(rng.randrange(len(leased))))
            if chance > 0.99:
                consumer.policy_version = step // 300
            if chance > 0.995:
                slots.clear()
                position = producers.index(producer)
                producer.close()
                producers[position] = Producer(bus.name)
            if step % 400 == 399:
                consumer.close()
                leased.clear()
                consumer = stack.enter_context(Consumer(bus.name, **options))
            ledger = consumer.stats()
            assert ledger.balanced, f"step {step}: {ledger}"
            assert ledger.leased == sum(len(group) for group in leased)
        for producer in producers:
            producer.close()
        ledger = balanced(consumer)
        assert bus.stats().undelivered == ledger.leased + ledger.stashed + ledger.in_ring


# --- views


def test_no_view_of_the_ring_can_be_written_to(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name) as consumer:
        put_group(producer, "a", x=np.arange(20, dtype=np.int32))
        x = take_all(consumer, 1)[0][0]["x"]
        attempts: list[Callable[[], Any]] = [
            lambda: x.__setitem__(0, 1), lambda: x.sort(), lambda: x.fill(0), lambda: x.resize(5),
            lambda: x.flags.__setattr__("writeable", True), lambda: x.setflags(write=True),
            lambda: x[:5].setflags(write=True), lambda: x.view("u1").setflags(write=True),
            lambda: np.asarray(x).setflags(write=True), lambda: x.byteswap(inplace=True),
            lambda: np.copyto(x, 0), lambda: np.add(x, 1, out=x), lambda: x.T.put(0, 9),
            lambda: memoryview(x).__setitem__(0, 1), lambda: np.frombuffer(x, "u1").fill(0),
            lambda: memoryview(x.base), lambda: np.lib.stride_tricks.as_strided(x).fill(0),
        ]  # fmt: skip
        for attempt in attempts:
            with pytest.raises((ValueError, TypeError)):
                attempt()
        assert np.array_equal(x, np.arange(20))


def churn(bus: Bus, producer: Producer, consumer: Consumer, times: int) -> None:
    x = np.full(30_000, 99, np.uint8)
    for number in range(times * bus.capacity // x.nbytes):
        put(producer, f"churn{number}", 0, 1, x=x)
        consumer.ack(consumer.take(9, 0))
    consumer.ack(consumer.take(99, 0.1))


def test_views_stay_as_they_are_whatever_happens_to_all_else(bus_name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = [rng.integers(0, 256, n, np.uint8) for n in (1, 64, 5000, 100_000)]
    bus = Bus.create(bus_name, capacity="1MiB", max_producers=4)
    producer, consumer = Producer(bus_name), Consumer(bus_name)
    for index, value in enumerate(values):
        put(producer, "a", index, 4, x=value)
    [group] = take_all(consumer, 1)
    views = [t["x"] for t in group]
    views += [view[::-1][::2] for view in views]
    expected = [view.copy() for view in views]

    def unchanged() -> bool:
        gc.collect()
        return all(map(np.array_equal, views, expected))

    group.ack()
    del group
    churn(bus, producer, consumer, 5)
    assert unchanged()
    consumer.close()
    assert unchanged()
    consumer = Consumer(bus_name)
    churn(bus, producer, consumer, 5)
    assert unchanged()
    producer.close()
    bus.unlink()
    bus.close()
    consumer.close()
    del consumer, producer, bus
    assert unchanged()
    assert not any(view.flags.writeable for view in views)


def test_a_view_keeps_its_space_and_gives_it_back_when_it_is_gone(
    bus: Bus, producer: Producer
) -> None:
    with Consumer(bus.name) as consumer:
        churn(bus, producer, consumer, 1)
        free = consumer.stats().free
        views = []
        for number in range(10):
            put(producer, f"k{number}", 0, 1, x=np.zeros(60_000, np.uint8))
            [group] = take_all(consumer, 1)
            views.append(group[0]["x"])
            group.ack()
        del group
        assert consumer.stats().free < free - 500_000
        del views
        churn(bus, producer, consumer, 1)
        assert consumer.stats().free >= free - 2 * bus.extent_bytes


# --- stragglers


def put_with_stragglers(producer: Producer, capacity: int) -> list[str]:
    """Put six times the capacity, with a sample of an incomplete group in every fifth place."""
    count = 6 * capacity // 3000
    for number in range(count):
        if number % 5 == 0:
            put(producer, f"s{number}", 0, meta=f"s{number}")
        put(producer, f"n{number}", 0, 1, x=np.full(3000, 7, np.uint8))
    return [f"s{number}" for number in range(0, count, 5)]


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_stragglers_neither_stop_the_ring_nor_get_lost_with_their_consumer(
    bus_name: str, spawn: Spawner, end: str
) -> None:
    with (
        Bus.create(bus_name, capacity=262_144, max_producers=4) as bus,
        Producer(bus_name) as producer,
        ThreadPoolExecutor(1) as pool,
    ):
        with Consumer(bus_name) as consumer:
            putting = pool.submit(put_with_stragglers, producer, bus.capacity)
            while not putting.done() or consumer.stats().in_ring:
                consumer.ack(consumer.take(99, 0.01))
            stragglers = putting.result()
            ledger = balanced(consumer)
            assert ledger.moved > 0
            assert ledger.groups_open == len(stragglers) > bus.capacity // bus.extent_bytes
        if end == "killed":
            child = spawn.script(KEEPS, bus_name, 1)
            put_group(producer, "kept")
            child.expect("holds")
            child.kill()
            stragglers.append("kept")
        with Consumer(bus_name) as consumer:
            rest = [straggler for straggler in stragglers if straggler != "kept"]
            # Beside a taking consumer: the room depends on its last look.
            putting = pool.submit(lambda: [put(producer, straggler, 1) for straggler in rest])
            groups = take_all(consumer, len(stragglers))
            putting.result()
            assert sorted(names(groups)) == sorted(stragglers)
            for group in groups:
                assert_whole(group)
                assert group[0].meta == (None if group.instance_id == "kept" else group.instance_id)
            consumer.ack(groups)
            assert balanced(consumer).leased == balanced(consumer).stashed == 0


# --- threads, pickles, forks


@pytest.mark.parametrize("how", ["iterate", "take"])
def test_closing_from_another_thread_ends_what_waits(bus: Bus, how: str) -> None:
    consumer = Consumer(bus.name)
    with ThreadPoolExecutor(1) as pool:
        waits = {"iterate": lambda: list(consumer), "take": lambda: consumer.take(1, None)}
        waiting = pool.submit(waits[how])
        time.sleep(0.05)
        assert not waiting.done()
        consumer.close()
        if how == "iterate":
            assert waiting.result(30) == []
        else:
            assert isinstance(waiting.exception(30), shmbus.BusClosedError)
    assert consumer.closed
    consumer.close()
    for use in (consumer.take, consumer.stats, lambda: consumer.policy_version):
        with pytest.raises(shmbus.BusClosedError, match="closed; make a new one"):
            use()


def test_a_group_that_lies_whole_in_the_ring_is_in_time_however_long_the_trainer_thought(
    bus: Bus,
) -> None:
    """More than a portion of records lies before its remaining samples."""
    with Producer(bus.name) as producer, Consumer(bus.name, group_timeout=0.2) as consumer:
        producer.put("slow", group_size=2, index=0, tokens=np.zeros(4, np.int32))
        assert consumer.take(timeout=0) == []
        for number in range(3 * limits.POLL_RECORDS):
            producer.put(f"open-{number}", group_size=2, index=0, tokens=np.zeros(4, np.int32))
        producer.put("slow", group_size=2, index=1, tokens=np.zeros(4, np.int32))
        time.sleep(0.3)  # a step of the trainer
        (group,) = consumer.take(timeout=10)
        assert group.instance_id == "slow"
        group.ack()
