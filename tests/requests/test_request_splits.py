"""One prompt in two splits is two groups: for the bound on groups, and in the request lane."""

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import Daemon, Spawner, ends_of, wait_until, work_until
from lane import ask, held, take_all, totals

import shmbus
from shmbus import Bus, Consumer, Feeder, Producer

X = np.zeros(4, np.float32)

# Takes a group of a split, acknowledges it, and sleeps until killed.
TRAINER = """
import shmbus, sys, time
consumer = shmbus.Consumer(sys.argv[1])
(group,) = consumer.take(1, split=sys.argv[2], timeout=30)
group.ack()
print("acknowledged", flush=True)
time.sleep(600)
"""


@pytest.fixture
def two(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, "1MiB", max_lead=2) as bus:
        yield bus


def put(producer: Producer, index: int, split: str = "train", key: str = "q") -> None:
    producer.put(key, group_size=2, index=index, round=0, split=split, x=X, timeout=0)


def test_a_prompt_of_two_splits_takes_two_places(two: Bus) -> None:
    with Producer(two.name) as producer, Consumer(two.name) as consumer:
        put(producer, 0)
        put(producer, 0, "eval")
        assert held(two) == 2
        with pytest.raises(shmbus.BusFullError, match="max_lead"):
            put(producer, 0, "test")
        put(producer, 1, "eval")
        (group,) = consumer.take(split="eval", timeout=10)
        group.ack()
        assert held(two) == 1  # the second is still open
        put(producer, 0, "test")
        put(producer, 1)
        put(producer, 1, "test")
        assert [each.instance_id for each in consumer.take(timeout=10)] == ["q"]
        assert held(two) == 1
        consumer.take(split="test", timeout=10)
        assert held(two) == 0


def test_a_wait_for_a_group_of_a_split_is_not_ended_by_another_split(two: Bus) -> None:
    async def work(producer: Producer) -> None:
        put(producer, 0)
        put(producer, 0, key="other")
        ready = producer.wait_ready
        assert await ready(instance_id="q", round=0, timeout=0)
        assert not await ready(instance_id="q", round=0, split="eval", timeout=0)

    with Producer(two.name) as producer:
        asyncio.run(work(producer))


def test_the_places_of_open_groups_of_each_split_outlive_a_check(two: Bus, spawn: Spawner) -> None:
    with Producer(two.name) as producer:
        put(producer, 0)
        put(producer, 0, "eval")
        put(producer, 1, "eval")
        trainer = spawn.script(TRAINER, two.name, "eval", until="acknowledged")
        trainer.kill()
        with Consumer(two.name) as consumer:  # checks the dead consumer's remains
            work_until(consumer, lambda: held(two) == 1)
            put(producer, 1)
            consumer.take(timeout=10)[0].ack()
            assert held(two) == 0


def test_a_group_that_ends_ends_the_request_of_its_split(bus: Bus, feeder: Feeder) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        for split in ("train", "eval"):
            feeder.request("q", group_size=2, round=0, split=split, prompt=np.ones(3))
        requests = take_all(producer)
        assert [each.split for each in requests] == ["train"] * 2 + ["eval"] * 2
        for request in requests[2:]:
            assert producer.requests.answer(request, x=X)
        (group,) = consumer.take(split="eval", timeout=10)
        group.ack()
        assert totals(bus) == (4, 0, 2, 2, 0, 1)
        for request in requests[:2]:
            assert producer.requests.is_wanted(request)
            assert producer.requests.answer(request, x=X)
        consumer.take(timeout=10)[0].ack()
        stats = consumer.stats()
        assert totals(bus) == (4, 0, 0, 4, 0, 0) and stats.balanced and not stats.dropped
        assert stats.requests.balanced


def test_a_failed_sample_of_a_split_comes_again_with_its_own_prompt(
    bus: Bus, feeder: Feeder
) -> None:
    with ends_of(bus, sample_retries=1, retry_backoff=(0, 0)) as (producer, consumer):
        feeder.request("q", group_size=1, round=0, prompt=np.full(2, 7))
        feeder.request("q", group_size=1, round=0, split="eval", prompt=np.full(2, 8))
        training, evaluation = take_all(producer)
        assert producer.requests.fail(evaluation, "first time")
        (again,) = ask(consumer, producer)
        assert (again.split, again.attempt, again["prompt"][0]) == ("eval", 1, 8)
        assert producer.requests.answer(again, x=X)
        (group,) = consumer.take(split="eval", timeout=10)
        group.ack()
        assert producer.requests.answer(training, x=X)
        consumer.take(timeout=10)[0].ack()
        stats = consumer.stats()
        assert stats.requests.groups == 0 and stats.balanced and stats.dropped == {"failed": 1}


def test_a_retry_of_a_split_that_fails_gives_up_its_own_group(bus: Bus, feeder: Feeder) -> None:
    with ends_of(bus, sample_retries=1, retry_backoff=(0, 0)) as (producer, consumer):
        feeder.request("q", group_size=2, need=1, round=0, split="eval", prompt=np.ones(2))
        feeder.request("q", group_size=2, round=0, prompt=np.ones(2))
        requests = take_all(producer)
        for request in requests[:2]:
            assert producer.requests.fail(request, "first time")
        for again in ask(consumer, producer):
            assert (again.split, again.need) == ("eval", 1)
            assert producer.requests.fail(again, "second time")
        work_until(consumer, lambda: consumer.stats().requests.groups == 1)
        for request in requests[2:]:
            assert producer.requests.answer(request, x=X)
        consumer.take(timeout=10)[0].ack()
        assert consumer.stats().balanced and consumer.stats().requests.groups == 0


def test_a_request_of_a_split_is_closed_by_the_next_collector(
    bus: Bus, feeder: Feeder, spawn: Spawner
) -> None:
    with Producer(bus.name) as producer:
        for split in ("eval", "train"):
            feeder.request("q", group_size=1, round=0, split=split, prompt=np.ones(3))
        evaluation, training = take_all(producer)
        assert producer.requests.answer(training, x=X)
        assert producer.requests.answer(evaluation, x=X)
        trainer = spawn.script(TRAINER, bus.name, "eval", until="acknowledged")
        trainer.kill()
        with Consumer(bus.name) as consumer:
            (group,) = consumer.take(timeout=30)
            work_until(consumer, lambda: totals(bus)[5] == 1)
            group.ack()
            assert consumer.stats().requests.groups == 0 and consumer.stats().balanced


def test_a_daemon_keeps_the_requests_of_splits_apart(
    daemon: Callable[..., Daemon], bus_name: str
) -> None:
    daemon()
    with (
        Feeder(bus_name) as feeder,
        Producer(bus_name) as producer,
        Consumer(bus_name, split="eval") as evaluator,
        Consumer(bus_name) as trainer,
    ):
        for split in ("train", "eval"):
            feeder.request("q", group_size=1, round=0, split=split, prompt=np.ones(3))
        training, evaluation = take_all(producer)
        assert producer.requests.answer(evaluation, x=X)
        evaluator.take(timeout=10)[0].ack()
        wait_until(lambda: evaluator.stats().requests.groups == 1)
        assert producer.requests.answer(training, x=X)
        trainer.take(timeout=10)[0].ack()
        wait_until(lambda: trainer.stats().requests.groups == 0)
        assert trainer.stats().balanced
