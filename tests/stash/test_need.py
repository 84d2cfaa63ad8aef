"""A group that needs fewer samples than are made is complete with the first that come."""

import random
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from stash_samples import Sample

from shmbus import Bus, Consumer, Producer
from shmbus.stash.stash import Stash, StashPolicy

DATA = np.arange(20, dtype=np.int32)


def sample(key: Hashable, index: int, size: int = 6, need: int = 4, **more: Any) -> Sample:
    return Sample(key, size, index, fewer=need, **more)


def indices(stash: Stash[Sample]) -> list[list[int]]:
    return [[sample.index for sample in entry.samples] for entry in stash.lease(10)]


def discards(stash: Stash[Sample]) -> list[tuple[str, int]]:
    return [(d.reason, s.index) for d in stash.take_discards() for s in d.samples]


def test_the_first_that_come_complete_it_and_the_rest_is_surplus(seed: int) -> None:
    rng = random.Random(seed)
    for round_ in range(50):
        size = rng.randrange(2, 40)
        need = rng.randrange(1, size)
        order = rng.sample(range(size), size)
        stash: Stash[Sample] = Stash()
        stash.add([sample(("q", round_), i, size, need) for i in order], 0.0)
        assert indices(stash) == [sorted(order[:need])]
        assert discards(stash) == [("surplus", i) for i in order[need:]]
        assert stash.open_groups == stash.open_records == 0
        assert stash.table.cancelled == [("q", round_)]


def test_a_second_sample_of_an_index_does_not_count() -> None:
    stash: Stash[Sample] = Stash()
    stash.add([sample(("q", 0), i) for i in (3, 3, 3, 0, 5)], 0.0)
    assert indices(stash) == []
    assert discards(stash) == [("duplicate", 3), ("duplicate", 3)]
    stash.add([sample(("q", 0), 1)], 0.0)
    assert indices(stash) == [[0, 1, 3, 5]]


def test_a_sample_that_needs_another_number_is_of_another_size() -> None:
    stash: Stash[Sample] = Stash()
    stash.add([sample(("q", 0), 0), sample(("q", 0), 1, need=5), sample(("q", 0), 2)], 0.0)
    assert discards(stash) == [("size_mismatch", 1)]
    assert stash.open_records == 2


def test_failures_cost_nothing_while_enough_samples_come() -> None:
    stash: Stash[Sample] = Stash(StashPolicy(sample_retries=2))
    key = ("q", 0)
    for index in (0, 1):
        stash.add([sample(key, index, failed=True, meta="lost")], 0.0)
    assert len(stash.failures.requests) == 2
    stash.add([sample(key, i) for i in (2, 3, 4, 5)], 0.0)
    assert indices(stash) == [[2, 3, 4, 5]]
    assert stash.failures.requests == {} and stash.given_up == 0
    assert {reason for reason, _ in discards(stash)} == {"failed"}


def test_a_group_that_can_no_longer_have_enough_is_given_up() -> None:
    stash: Stash[Sample] = Stash(StashPolicy())
    key = ("q", 0)
    stash.add([sample(key, i) for i in (0, 1, 2)], 0.0)
    stash.add([sample(key, i, failed=True, meta="lost") for i in (3, 4, 5)], 0.0)
    assert indices(stash) == [] and stash.given_up == 1
    assert stash.table.cancelled == [key]


def test_who_still_works_on_the_group_is_told(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name) as consumer, Producer(bus.name) as other:
        round = producer.next_round()
        put(producer, "q", round, 0)
        consumer.take(timeout=0)
        assert not other.cancelled("q", round=round)
        put(producer, "q", round, 2)
        [group] = consumer.take(timeout=10)
        assert (len(group), group.size, group.need, group.complete) == (2, 4, 2, True)
        for worker in (producer, other):
            assert worker.cancelled("q", round=round)
            assert not worker.cancelled("q", round=round + 1)
            assert not worker.cancelled("q", round=round, split="eval")
            assert not worker.cancelled("other", round=round)
            assert not worker.cancelled("q", round=None)
        group.ack()
        for index in range(2):
            producer.put(17, group_size=4, need=2, index=index, round=round, data=DATA)
        consumer.ack(consumer.take(timeout=10))
        assert other.cancelled(17, round=round) and other.cancelled("17", round=round)
        with pytest.raises(TypeError, match="instance_id: expected a str or an int"):
            other.cancelled(None, round=round)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="round"):
            other.cancelled("q")  # type: ignore[call-arg]


def put(producer: Producer, key: str, round: int, index: int, **more: Any) -> None:
    producer.put(key, group_size=4, need=2, index=index, round=round, data=DATA, **more)


def test_the_last_groups_that_ended_are_remembered_and_no_others(
    bus: Bus, producer: Producer
) -> None:
    rounds = 1024 + 10  # SHMBUS_CANCELLED, and more
    with Consumer(bus.name) as consumer:
        for round in range(rounds):
            for index in range(2):
                put(producer, "q", round, index)
            consumer.ack(consumer.take(timeout=10))
        told = [round for round in range(rounds) if producer.cancelled("q", round=round)]
        assert told == list(range(10, rounds))


def test_a_group_that_ends_at_its_deadline_or_by_a_failure_is_cancelled_too(
    bus: Bus, producer: Producer
) -> None:
    with Consumer(bus.name, group_timeout=0.01, on_timeout="drop") as consumer:
        producer.put("late", group_size=2, index=0, round=1, data=DATA)
        while not consumer.stats().dropped:
            consumer.take(timeout=0.02)
        assert producer.cancelled("late", round=1)
        producer.put("ill", group_size=2, index=0, round=1, data=DATA)
        producer.fail("ill", 1, "lost", group_size=2, round=1)
        while not consumer.stats().groups_given_up:
            consumer.take(timeout=0.02)
        assert producer.cancelled("ill", round=1)


def test_a_group_without_an_round_cannot_need_fewer(producer: Producer) -> None:
    with pytest.raises(ValueError, match=r"need: 2 of group_size=4 needs a round.*next_round"):
        producer.put("q", group_size=4, need=2, index=0, data=DATA)
    with pytest.raises(ValueError, match="need: expected 1 to 4 for group_size=4, got 5"):
        producer.put("q", group_size=4, need=5, index=0, round=1, data=DATA)
    fields = {"data": ("int32", 3)}
    with pytest.raises(ValueError, match="need: expected 1 to 4 for group_size=4, got 5"):
        producer.reserve("q", group_size=4, need=5, index=0, round=1, fields=fields)
    with pytest.raises(ValueError, match="need: 2 of group_size=4 needs a round"):
        producer.put_many([{"instance_id": "q", "group_size": 4, "need": 2, "index": 0}])
    assert producer.stats().committed == 0


def test_a_reservation_says_split_need_and_versions(bus: Bus, producer: Producer) -> None:
    with producer.reserve(
        "q", group_size=3, need=1, index=2, round=1, split="eval", policy_version=(1, 2),
        fields={"data": ("int32", 3)},
    ) as slot:  # fmt: skip
        slot["data"][:] = 1
        assert slot.policy_version == (1, 2)
        slot.policy_version = (4, 7)
    with Consumer(bus.name) as consumer:
        [group] = consumer.take(split="eval")
        assert (group.need, group[0].index) == (1, 2)
        assert (group[0].policy_version, group[0].newest_policy_version) == (4, 7)
        group.ack()


def test_what_is_not_needed_waits_for_nobody_after_a_restart(bus: Bus, producer: Producer) -> None:
    with Consumer(bus.name) as consumer:
        for index in range(2):
            put(producer, "q", 1, index)
        assert len(consumer.take(timeout=10)) == 1
    with Consumer(bus.name) as consumer:
        put(producer, "q", 1, 3)
        [group] = consumer.take(timeout=10)
        assert [t.index for t in group] == [0, 1]
        group.ack()
        assert consumer.take(timeout=0) == []
        assert consumer.stats().dropped == {"surplus": 1}
