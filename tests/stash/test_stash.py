"""The stash alone: delivered groups, and discarded samples with reasons, for each policy.

The last part drives it together with a reference model that keeps everything in plain lists.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from stash_samples import Sample

from shmbus.stash.stash import RECENT_KEYS, Discard, Stash, StashPolicy
from shmbus_ext._core import GroupEntry


def group_of(key: Hashable, size: int = 2, **more: Any) -> list[Sample]:
    return [Sample(key, size, index, **more) for index in range(size)]


def stash_with(**policy: Any) -> Stash[Sample]:
    return Stash(StashPolicy(**policy))


def keys(groups: Iterable[GroupEntry[Sample]]) -> list[Hashable]:
    return [group.key for group in groups]


def discarded(stash: Stash[Sample]) -> list[tuple[str, Hashable, int]]:
    return [(d.reason, d.key, len(d.samples)) for d in stash.take_discards()]


def counts(stash: Stash[Sample]) -> tuple[int, int, int, int, int, int]:
    return (
        stash.open_groups,
        stash.open_records,
        stash.table.ready_groups,
        stash.table.ready_cells,
        stash.table.leased_groups,
        stash.table.leased_cells,
    )


# --- mistakes of producers


def test_as_many_finished_rounds_are_remembered_as_the_limit_says() -> None:
    stash = stash_with()
    for round in range(RECENT_KEYS + 1):
        stash.add([Sample(("a", round), 1)], 0.0)
    stash.add([Sample(("a", 1), 1), Sample(("a", 0), 1)], 0.0)
    assert discarded(stash) == [("surplus", ("a", 1), 1)]
    assert stash.table.ready_groups == RECENT_KEYS + 2


# --- deadlines


@pytest.mark.parametrize("policy", ["drop", "partial"])
def test_a_group_ends_when_its_deadline_is_there_and_not_before(policy: str) -> None:
    stash = stash_with(group_timeout_s=10.0, on_timeout=policy)
    stash.add([Sample("a", 3, 2), Sample("a", 3, 0)], 5.0)
    stash.add([Sample("b", 3, 1)], 6.0)
    assert stash.next_deadline_s() == 15.0
    stash.expire(14.9)
    assert stash.open_groups == 2
    stash.expire(15.0)
    assert stash.next_deadline_s() == 16.0
    assert stash.timeouts == 1
    if policy == "drop":
        assert discarded(stash) == [("timeout", "a", 2)]
        assert counts(stash) == (1, 1, 0, 0, 0, 0)
    else:
        assert counts(stash) == (1, 1, 1, 2, 0, 0)
        [group] = stash.lease(9)
        assert [sample.index for sample in group.samples] == [0, 2]
        assert counts(stash) == (1, 1, 0, 0, 1, 2)
        stash.end_lease(group)
        assert counts(stash) == (1, 1, 0, 0, 0, 0)


def test_a_clock_that_goes_back_ends_nothing() -> None:
    stash = stash_with(group_timeout_s=10.0, on_timeout="drop")
    stash.add([Sample("a")], 100.0)
    stash.expire(-100.0)
    assert stash.open_groups == 1


def test_waiting_samples_are_all_those_that_nobody_leases_oldest_group_first() -> None:
    stash = stash_with()
    old, ready, leased = Sample("old", 3, 1), group_of("ready"), group_of("leased")
    stash.add([old, *leased], 0.0)
    assert keys(stash.lease(1)) == ["leased"]
    stash.add([*ready, Sample("young")], 0.0)
    waiting = stash.waiting_samples()
    assert waiting[0] is old
    assert Counter(sample.key for sample in waiting) == {"old": 1, "young": 1, "ready": 2}
    assert keys(stash.oldest(1)) == ["old"]
    assert keys(stash.oldest(5)) == ["old", "young"]


# --- size


def test_hundreds_of_thousands_of_open_groups_complete_like_a_few(seed: int) -> None:
    stash = stash_with()
    count = 200_000
    stash.add((Sample(f"prompt-{number}") for number in range(count)), 0.0)
    assert counts(stash) == (count, count, 0, 0, 0, 0)
    chosen = [f"prompt-{n}" for n in random.Random(seed).sample(range(count), 10_000)]
    stash.add((Sample(key, 2, 1) for key in chosen), 1.0)
    assert keys(stash.lease(count)) == chosen
    assert counts(stash) == (count - 10_000, count - 10_000, 0, 0, 10_000, 20_000)


# --- against a model


class Model:
    def __init__(self, policy: StashPolicy) -> None:
        self.policy = policy
        self.open: list[tuple[Hashable, int, float, dict[int, Sample]]] = []
        self.ready: list[dict[int, Sample]] = []
        self.leased: list[dict[int, Sample]] = []
        self.finished: set[Hashable] = set()
        self.discards: list[tuple[str, list[Sample]]] = []

    def add(self, sample: Sample, now: float) -> None:
        found = [group for group in self.open if group[0] == sample.key]
        if not found and sample.key in self.finished:
            self.discards.append(("surplus", [sample]))
            return
        if not found:
            found = [(sample.key, sample.group_size, now, {})]
            self.open += found
        [(key, size, _, samples)] = found
        if size != sample.group_size:
            self.discards.append(("size_mismatch", [sample]))
        elif sample.index in samples:
            self.discards.append(("duplicate", [sample]))
        else:
            samples[sample.index] = sample
        if len(samples) == size:
            self.open.remove(found[0])
            if isinstance(key, tuple):
                self.finished.add(key)
            if self.policy.skip_zero_variance and len({s.score for s in samples.values()}) == 1:
                self.discards.append(("zero_variance", by_index(samples)))
            else:
                self.ready.append(samples)

    def leave(self, policy: str, reason: str) -> None:
        samples = self.open.pop(0)[3]
        if policy == "partial":
            self.ready.append(samples)
        else:
            self.discards.append((reason, by_index(samples)))

    def shrink(self) -> None:
        limit, policy = self.policy.max_stash_bytes, self.policy.on_overflow
        while limit is not None and policy != "wait" and self.open:
            if sum(s.nbytes for group in self.open for s in group[3].values()) <= limit:
                return
            self.leave(policy, "overflow")

    def expire(self, now: float) -> None:
        timeout, policy = self.policy.group_timeout_s, self.policy.on_timeout
        while timeout is not None and policy != "wait" and self.open:
            if now < self.open[0][2] + timeout:
                return
            self.leave(policy, "timeout")

    def lease(self, count: int, version: int) -> list[list[Sample]]:
        taken: list[list[Sample]] = []
        lag = self.policy.max_policy_lag
        while self.ready and len(taken) < count:
            samples = self.ready.pop(0)
            if lag is not None and min(s.policy_version for s in samples.values()) < version - lag:
                self.discards.append(("stale", by_index(samples)))
                continue
            self.leased.append(samples)
            taken.append(by_index(samples))
        return taken


def by_index(samples: dict[int, Sample]) -> list[Sample]:
    return [samples[index] for index in sorted(samples)]


KEYS = st.sampled_from(["a", "b", "c", ("a", 0), ("a", 1), ("b", 0)])
SAMPLES = st.tuples(KEYS, st.sampled_from([2, 3, 3, 3, 1]), st.integers(0, 2)).map(
    lambda drawn: (drawn[0], drawn[1], drawn[2] % drawn[1])
)
POLICIES = st.builds(
    StashPolicy,
    group_timeout_s=st.sampled_from([None, 3.0]),
    on_timeout=st.sampled_from(["wait", "drop", "partial"]),
    max_policy_lag=st.sampled_from([None, 0, 2]),
    skip_zero_variance=st.booleans(),
    max_stash_bytes=st.sampled_from([None, 1, 250, 600]),
    on_overflow=st.sampled_from(["wait", "drop", "partial"]),
)


class StashMachine(RuleBasedStateMachine):
    """Does the same to a stash and to the model, and compares every answer."""

    @initialize(policy=POLICIES)
    def begin(self, policy: StashPolicy) -> None:
        self.stash: Stash[Sample] = Stash(policy)
        self.model = Model(policy)
        self.out: list[GroupEntry[Sample]] = []
        self.now = 0.0

    @rule(
        drawn=st.lists(SAMPLES, max_size=6),
        score=st.sampled_from([0.0, 1.0]),
        version=st.integers(0, 5),
        nbytes=st.sampled_from([0, 100]),
    )
    def add(
        self, drawn: list[tuple[Hashable, int, int]], score: float, version: int, nbytes: int
    ) -> None:
        samples = [Sample(*given, score, version, nbytes) for given in drawn]
        self.stash.add(samples, self.now)
        for sample in samples:
            self.model.add(sample, self.now)
        self.model.shrink()

    @rule(passed=st.floats(0, 4))
    def let_time_pass(self, passed: float) -> None:
        self.now += passed
        self.stash.expire(self.now)
        self.model.expire(self.now)

    @rule(count=st.integers(1, 3), version=st.integers(0, 7))
    def lease(self, count: int, version: int) -> None:
        leased = self.stash.lease(count, version)
        assert [group.samples for group in leased] == self.model.lease(count, version)
        self.out += leased

    @rule(choice=st.integers(0, 9), back=st.booleans())
    def end(self, choice: int, back: bool) -> None:
        if not self.out:
            return
        position = choice % len(self.out)
        group, samples = self.out.pop(position), self.model.leased.pop(position)
        if back:
            self.stash.table.give_back(group)
            self.model.ready.insert(0, samples)
        else:
            self.stash.end_lease(group)
        assert not self.stash.table.is_leased(group)

    @invariant()
    def agree(self) -> None:
        model, stash = self.model, self.stash
        seen: list[Discard[Sample]] = stash.discards
        assert [(d.reason, d.samples) for d in seen] == model.discards
        assert counts(stash) == (
            len(model.open),
            sum(len(group[3]) for group in model.open),
            len(model.ready),
            sum(map(len, model.ready)),
            len(model.leased),
            sum(map(len, model.leased)),
        )
        assert keys(stash.oldest(99)) == [group[0] for group in model.open]
        assert all(stash.table.is_leased(group) for group in self.out)


def test_whatever_comes_in_the_stash_does_what_the_model_does(seed: int) -> None:
    run_state_machine_as_test(
        hypothesis.seed(seed)(StashMachine),
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
