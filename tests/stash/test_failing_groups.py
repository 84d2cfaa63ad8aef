"""Groups with a failing sample, in the stash: asked for again, whole after all, or given up."""

import random
from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from stash_samples import Sample

from shmbus.stash.failures import Request
from shmbus.stash.stash import Stash, StashPolicy


def sample(index: int, key: Hashable = "a", size: int = 4, **more: Any) -> Sample:
    return Sample(key, size, index, **{"meta": "out of memory", **more})


def failure(index: int, attempt: int = 0, **more: Any) -> Sample:
    return sample(index, score=attempt, failed=True, **more)


class Bench:
    def __init__(self, **policy: Any) -> None:
        self.stash: Stash[Sample] = Stash(StashPolicy(**{"retry_timeout_s": 600.0, **policy}))
        self.now = 0.0
        self.left: list[tuple[str, list[int]]] = []

    def add(self, *samples: Sample) -> None:
        self.stash.add(samples, self.now)
        self.release_discarded()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.stash.expire(self.now)
        self.stash.expire_failing(self.now)
        self.release_discarded()

    def release_discarded(self) -> None:
        for discard in self.stash.take_discards():
            self.left.append((discard.reason, [s.index for s in discard.samples]))

    @property
    def wanted(self) -> list[tuple[int, int]]:
        for request in self.requests:
            if request.deadline_s is None:
                self.stash.failures.publish(request, self.now)
        return [(request.index, request.attempt) for request in self.requests]

    @property
    def requests(self) -> list[Request]:
        return list(self.stash.failures.requests.values())

    def lease(self) -> list[list[int]]:
        self.groups = self.stash.lease(100)
        return [[s.index for s in group.samples] for group in self.groups]

    @property
    def empty(self) -> bool:
        stash = self.stash
        return stash.open_groups == stash.open_records == stash.failures.records == 0


@pytest.mark.parametrize("policy", ["drop", "partial"])
def test_a_sample_that_fails_for_good_ends_its_group_when_the_others_are_there(policy: str) -> None:
    bench = Bench(sample_retries=1, on_failure=policy)
    bench.add(sample(0), failure(1), sample(2))
    bench.add(failure(1, attempt=bench.wanted[0][1]))
    assert bench.wanted == [] and bench.lease() == [] and bench.left == [("failed", [1])]
    bench.add(sample(3))
    if policy == "drop":
        assert bench.lease() == [] and bench.left[1:] == [("failed", [0, 2, 3, 1])]
    else:
        assert bench.lease() == [[0, 2, 3]]
        # The report stays as long as its group may be delivered again.
        assert bench.left[1:] == [] and bench.stash.open_records == 1
        bench.stash.table.give_back(bench.groups[0])
        assert bench.lease() == [[0, 2, 3]] and bench.stash.open_records == 1
        bench.stash.end_lease(bench.groups[0])
        bench.release_discarded()
        assert bench.left[1:] == [("failed", [1])]
    assert bench.stash.given_up == 1 and bench.empty


def test_failures_in_one_call_keep_their_order_among_samples() -> None:
    bench = Bench()
    # Two rounds of a key in succession, each with a failure and its own end.
    bench.add(
        sample(0, size=2), failure(1, size=2), sample(0, size=2), sample(1, size=2),
        failure(0, size=2, committed_ns=9), sample(1, size=2), sample(0, size=2), sample(1, size=2),
    )  # fmt: skip
    assert bench.left == [("failed", [0, 1]), ("failed", [1, 0])]
    assert bench.lease() == [[0, 1], [0, 1]] and bench.empty


def test_a_failure_that_another_has_made_good_says_nothing() -> None:
    bench = Bench(sample_retries=1)
    bench.add(sample(0), sample(1), failure(1), sample(2))
    assert bench.wanted == [] and bench.left == [("failed", [1])]
    bench.add(sample(3))
    assert bench.lease() == [[0, 1, 2, 3]] and bench.empty
    # A report read after its group's completion changes nothing, except for the next group.
    bench.add(failure(1))
    assert bench.left[1:] == [("failed", [1])] and bench.empty
    bench.add(failure(1, committed_ns=5))
    assert bench.wanted == [(1, 1)]


def test_reports_of_an_attempt_that_is_over_use_up_nothing() -> None:
    bench = Bench(sample_retries=2)
    bench.add(failure(1), failure(1), failure(1))
    assert bench.wanted == [(1, 1)] and bench.left == [("failed", [1])] * 2
    bench.add(failure(1, attempt=1), failure(1, attempt=1), failure(1))
    assert bench.wanted == [(1, 2)] and bench.stash.open_records == 1


@pytest.mark.parametrize("policy", ["drop", "partial"])
def test_what_is_missing_at_the_deadline_is_asked_for_before_the_group_ends(policy: str) -> None:
    bench = Bench(sample_retries=1, group_timeout_s=60, on_timeout=policy, retry_timeout_s=10)
    bench.add(sample(0), sample(2))
    bench.wait(59)
    assert bench.wanted == []
    bench.wait(1)
    assert bench.wanted == [(1, 1), (3, 1)] and "not there 60 s" in bench.requests[0].reason
    bench.add(sample(3))
    assert bench.wanted == [(1, 1)] and bench.stash.timeouts == 0
    bench.wait(10)
    # Without a report of failure the group ends like a late group.
    assert bench.stash.timeouts == 1 and bench.stash.given_up == 0
    assert bench.lease() == ([[0, 2, 3]] if policy == "partial" else [])
    assert bench.left == ([] if policy == "partial" else [("timeout", [0, 2, 3])])
    assert bench.empty


def test_a_group_with_a_failure_keeps_its_own_deadline() -> None:
    bench = Bench(group_timeout_s=60, on_timeout="drop", on_failure="partial")
    bench.add(sample(0))
    bench.wait(30)
    bench.add(failure(1))
    assert bench.stash.next_deadline_s() == 60
    bench.wait(30)
    assert bench.lease() == [[0]] and bench.stash.given_up == 1


def test_a_group_that_failed_for_good_does_not_wait_for_ever_for_the_rest() -> None:
    bench = Bench(retry_timeout_s=10, on_failure="partial")
    bench.add(sample(0), failure(1))
    bench.wait(9)
    bench.add(sample(2))
    bench.wait(9)
    assert bench.lease() == []
    bench.wait(1)
    assert bench.lease() == [[0, 2]] and bench.empty is False  # the report, until its end


def test_a_group_whose_failure_was_made_good_waits_as_any_other() -> None:
    bench = Bench(sample_retries=1, retry_timeout_s=10, on_timeout="wait")
    bench.add(sample(0), failure(1), sample(1))
    bench.wait(1e6)
    assert bench.stash.open_groups == 1 and bench.stash.next_deadline_s() is None
    bench.add(sample(2), sample(3))
    assert bench.lease() == [[0, 1, 2, 3]]


def test_a_failure_need_not_know_its_groups_size() -> None:
    bench = Bench(sample_retries=1, retry_timeout_s=10)
    bench.add(failure(1, size=0), failure(9, size=0))
    assert bench.wanted == [(1, 1), (9, 1)] and bench.requests[0].group_size == 0
    bench.add(sample(0))  # of four, by a later sample
    assert bench.wanted == [(1, 1)] and bench.left == [("failed", [9])]
    bench.add(sample(1), sample(2), sample(3))
    assert bench.lease() == [[0, 1, 2, 3]] and bench.empty
    bench.add(failure(1, key="never", size=0, attempt=1))
    bench.wait(10)
    assert bench.empty and bench.stash.given_up == 1


def test_with_rounds_what_comes_behind_a_group_that_was_given_up_is_surplus() -> None:
    bench = Bench()
    key = ("a", 3)
    bench.add(sample(0, key, 2), failure(1, key=key, size=2), sample(1, key, 2))
    assert bench.left == [("failed", [0, 1]), ("surplus", [1])]
    bench.add(failure(0, key=key, size=2))
    assert bench.left[2:] == [("failed", [0])] and bench.empty


def test_samples_that_do_not_fit_a_failing_group_are_counted_by_reason() -> None:
    bench = Bench(sample_retries=1)
    bench.add(sample(0), failure(1), sample(0), sample(2, size=5), failure(2, size=5))
    assert bench.left == [("duplicate", [0]), ("size_mismatch", [2]), ("failed", [2])]
    assert bench.wanted == [(1, 1)]


def test_failing_groups_count_against_the_memory_bound() -> None:
    bench = Bench(sample_retries=1, max_stash_bytes=450, on_overflow="drop")
    bench.add(sample(0, "old"), failure(1, key="old"))
    bench.wait(1)
    bench.add(sample(0, "new"), sample(1, "new"))
    assert bench.left == []
    bench.add(sample(2, "new"))
    assert bench.left == [("overflow", [0]), ("failed", [1])] and bench.wanted == []
    assert bench.stash.overflows == 1


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_forged_report_is_a_first_failure(score: float) -> None:
    bench = Bench(sample_retries=1)
    bench.add(failure(1, attempt=score))  # type: ignore[arg-type]
    assert bench.wanted == [(1, 1)]


def test_every_sample_is_in_one_place_whatever_fails(seed: int) -> None:
    """Samples and failures in any order: none is lost or doubled, and no group waits for ever."""
    rng = random.Random(seed)
    for _ in range(150):
        bench = Bench(
            sample_retries=rng.randrange(3),
            retry_timeout_s=rng.choice([5.0, 50.0]),
            on_failure=rng.choice(["drop", "partial"]),
            group_timeout_s=rng.choice([None, 20.0]),
            on_timeout=rng.choice(["wait", "drop", "partial"]),
            max_stash_bytes=rng.choice([None, 1500]),
            on_overflow=rng.choice(["wait", "drop", "partial"]),
        )
        added = 0
        gone: Counter[str] = Counter()
        held: list[Any] = []
        for _ in range(120):
            batch = []
            for _ in range(rng.randrange(5)):
                key: Hashable = rng.choice(["a", "b", ("a", 1), ("c", 2)])
                fails = rng.random() < 0.3
                size = rng.choice([3, 3, 3, 0 if fails else 3, 5])
                attempt = rng.randrange(3) if fails else 0
                index = rng.randrange(size or 3)
                batch.append(sample(index, key, size, failed=fails, score=attempt))
            added += len(batch)
            bench.add(*batch)
            assert bench.wanted is not None  # published
            if rng.random() < 0.3:
                bench.wait(rng.choice([1.0, 7.0, 30.0]))
            if bench.requests and rng.random() < 0.2:
                bench.stash.fail_request(rng.choice(bench.requests), "died", bench.now)
                bench.release_discarded()
            held += bench.stash.lease(rng.randrange(3))
            if held and rng.random() < 0.5:
                group = held.pop(rng.randrange(len(held)))
                if rng.random() < 0.3:
                    bench.stash.table.give_back(group)
                else:
                    gone["acked"] += len(group.samples)
                    bench.stash.end_lease(group)
            bench.release_discarded()
            for reason, indices in bench.left:
                gone[reason] += len(indices)
            bench.left.clear()
            assert bench.wanted is not None
            stash = bench.stash
            assert added == (
                gone.total()
                + stash.open_records
                + stash.table.ready_cells
                + stash.table.leased_cells
            )
            assert len(stash.waiting_samples()) == stash.open_records + stash.table.ready_cells
            for group in stash.failures.groups.values():
                assert group is not None and not group.decided
                for_good = [m for m in group.failed.values() if m.request is None]
                assert not for_good or stash.next_deadline_s() is not None
        for _ in range(20):
            assert bench.wanted is not None
            bench.wait(60.0)
        assert all(
            group is not None and not group.failed for group in bench.stash.failures.groups.values()
        )
