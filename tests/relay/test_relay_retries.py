"""Samples that fail on far nodes: asked for again there, given up, or told to the trainer."""

import time
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, next_retry, take_groups, wait_until
from relay.local import CLAIM, COORDINATOR, TWICE, relay, relayed, stats

import shmbus
from shmbus.inspect.status import read_status
from shmbus.relay.messages import Wanted
from shmbus.stash.stash import StashPolicy

pytest_plugins = ["relay.relay_fixtures"]


def put(producer: shmbus.Producer, index: int, *, size: int = 2, **more: Any) -> None:
    tokens = np.full(50, index, np.int32)
    producer.put("q", group_size=size, index=index, score=float(index), tokens=tokens, **more)


def test_a_failed_sample_is_asked_for_once_its_backoff_is_over(buses: dict[str, str]) -> None:
    hour_s = 3600.0
    policy = StashPolicy(sample_retries=2, retry_backoff_s=(hour_s, hour_s))
    with relayed(buses, "a", policy=policy) as (made, _, one):
        put(one, 0)
        one.fail("q", 1, "out of memory", group_size=2)
        party = made.coordinator
        wait_until(lambda: party.pure is not None and party.pure.stash.failures.requests)
        pure = party.pure
        assert pure is not None
        with party._lock:
            now_s = time.monotonic()
            assert not pure.ask_producers(now_s) and pure.retries.open == 0
            pure.stash.expire_failing(now_s + hour_s)
            (asked,) = pure.ask_producers(now_s + hour_s)
        assert isinstance(asked, Wanted)
        assert [sample.index for sample in asked.samples] == [1]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_dead_workers_sample_is_a_failed_attempt(
    unlike: dict[str, str], spawn: Spawner, split: str
) -> None:
    of = {"split": split}
    with relayed(unlike, "a", of, policy=TWICE) as (_, consumer, producer):
        put(producer, 0, **of)
        producer.fail("q", 1, "first", group_size=2, **of)
        spawn.holder(CLAIM, unlike["a"]).kill()
        asked = next_retry(producer)
        assert asked.attempt == 2 and "died while it had it" in asked.reason
        put(producer, 1, **of)
        take_groups(consumer, 1)[0].ack()


def test_a_lasting_failure_drops_its_group_on_every_node(buses: dict[str, str]) -> None:
    with relayed(buses, "ab") as (made, _, one, other):
        put(one, 0)
        other.fail("q", 1, "out of memory", group_size=2)
        for each in "ab":
            wait_until(lambda each=each: stats(buses[each]).dropped == {"failed": 1})
        assert stats(buses["t"]).committed == 0
        wait_until(lambda: made.coordinator.note().dropped == {"failed": 2})


def test_a_failure_reaches_a_trainer_that_takes_groups_without_it(buses: dict[str, str]) -> None:
    way = {"on_failure": "partial"}
    with relayed(buses, "ab", way, policy=StashPolicy(**way)) as (
        _,
        consumer,
        one,
        other,
    ):
        put(one, 0, size=3)
        put(one, 2, size=3)
        other.fail("q", 1, "out of memory", group_size=3)
        (group,) = take_groups(consumer, 1)
        assert [t.index for t in group] == [0, 2] and len(group) == 2
        group.ack()
        assert stats(buses["t"]).committed == 3
        wait_until(lambda: stats(buses["t"]).dropped == {"failed": 1})
        wait_until(lambda: stats(buses["a"]).acknowledged == 2)
        wait_until(lambda: stats(buses["b"]).dropped == {"failed": 1})


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_group_without_missing_samples_is_whole(unlike: dict[str, str], split: str) -> None:
    policy = StashPolicy(group_timeout_s=0.3, on_timeout="partial")
    taking = {"on_failure": "partial", "split": split}
    with relayed(unlike, "a", taking, policy=policy) as (_, consumer, producer):
        put(producer, 1, size=4, split=split)
        put(producer, 2, size=4, split=split)
        (group,) = take_groups(consumer, 1)
        assert [t.index for t in group] == [1, 2] and group[0].split == split
        group.ack()
        wait_until(lambda: stats(unlike["a"]).acknowledged == 2)
        wait_until(lambda: stats(unlike["t"]).dropped == {"failed": 2})
        assert stats(unlike["t"]).undelivered == 0


def test_what_a_lost_node_had_is_asked_for_elsewhere(buses: dict[str, str]) -> None:
    with relay([buses["a"], buses["b"]], [buses["t"]], policy=TWICE) as made:
        with shmbus.Producer(buses["a"]) as producer:
            put(producer, 0)
        with shmbus.Producer(buses["b"]) as other, shmbus.Consumer(buses["t"]) as consumer:
            wait_until(lambda: made.coordinator.note().announced == 1)
            made.coordinator.forgotten.append(buses["a"])
            asked = next_retry(other)
            assert (asked.index, asked.group_size) == (0, 2) and "has gone" in asked.reason
            put(other, 0)
            put(other, 1)
            take_groups(consumer, 1)[0].ack()
            assert made.coordinator.lost == 1


@pytest.mark.parametrize("who", ["source", "coordinator"])
def test_a_claim_outlives_the_source_and_the_coordinator(buses: dict[str, str], who: str) -> None:
    with relayed(buses, "a", policy=TWICE) as (made, consumer, producer):
        put(producer, 0)
        producer.fail("q", 1, "first", group_size=2)
        next_retry(producer)
        made.restart(buses["a"] if who == "source" else COORDINATOR)
        wait_until(lambda: made.coordinator.pure is not None)
        pure = made.coordinator.pure
        assert pure is not None
        wait_until(lambda: pure.retries.open == 1)
        wait_until(lambda: made.parties[buses["a"]].rows.mark == (pure.term, 1))
        (row,) = read_status(buses["a"]).wanted
        assert row.taken_by == producer.producer_id and row.attempt == 1
        assert producer.requests.retries() == []
        put(producer, 1)
        take_groups(consumer, 1)[0].ack()
        wait_until(lambda: not read_status(buses["a"]).wanted)
