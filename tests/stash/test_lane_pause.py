"""Failures that come alike: the lane pauses and is probed. In virtual time, without a bus."""

import random
from collections import deque
from collections.abc import Callable

import pytest
from test_failing_groups import Sample

from shmbus.base import limits
from shmbus.base.backoff import backoff_s
from shmbus.stash.failures import LanePause
from shmbus.stash.stash import Stash, StashPolicy

REFUSED = "ConnectionRefusedError(111, 'port 8000')"


class Lane:
    """A lane of groups, a worker, and a stash as its collector."""

    def __init__(self, groups: int, size: int = 8, **policy: object) -> None:
        self.stash: Stash[Sample] = Stash(
            StashPolicy(**{"sample_retries": 2, "retry_backoff_s": (0.5, 30.0), **policy})  # type: ignore[arg-type]
        )
        self.stash.failures.in_lane = lambda key: True
        self.stash.failures.has_open = lambda: bool(self.new)
        self.size = size
        self.now = 0.0
        self.new = deque((f"{key:03}", index) for key in range(groups) for index in range(size))
        self.failed = 0
        self.whole: list[str] = []

    def take(self) -> tuple[str, int, int] | None:
        """Take like a worker after its own failure: a new sample, otherwise a due one."""
        failures = self.stash.failures
        if failures.lane.paused:
            if self.now < failures.lane.probe_due_s:
                return None
            failures.lane.probe(self.now)
        if self.new:
            return *self.new.popleft(), 0
        due = [r for r in failures.requests.values() if r.due_s <= self.now or failures.lane.paused]
        if not due:
            return None
        first = min(due, key=lambda request: request.due_s)
        return str(first.key), first.index, first.attempt

    def step(self, reason_of: Callable[[str, int], str | None]) -> None:
        self.stash.follow_lane(self.now)
        taken = self.take()
        if taken is None:
            self.now += 0.1
            return
        key, index, attempt = taken
        self.put(key, index, reason_of(key, index), attempt)

    def put(self, key: str, index: int, reason: str | None = None, attempt: int = 0) -> None:
        sample = Sample(key, self.size, index, score=attempt)
        if reason is not None:
            self.failed += 1
            sample.failed, sample.meta = True, reason
        self.now += 0.001
        self.stash.add([sample], self.now)
        for group in self.stash.lease(100):
            self.whole.append(str(group.samples[0].key))
        self.stash.take_discards()

    @property
    def ended(self) -> int:
        return len(self.whole) + self.stash.given_up


@pytest.mark.parametrize("away_s", [0.01, 5.0, 30.0, 3600.0])
def test_an_engine_that_is_away_gives_up_no_prompt(away_s: float) -> None:
    lane = Lane(20)
    paused = False
    while lane.ended < 20:
        lane.step(lambda key, index: REFUSED if lane.now < away_s else None)
        paused |= lane.stash.failures.lane.paused
    assert sorted(lane.whole) == [f"{key:03}" for key in range(20)]
    assert lane.stash.given_up == 0
    assert paused == (away_s > 1)
    # A pause's worth, and then the samples let through.
    assert lane.failed <= 25 + away_s / 15 + 10
    assert lane.now < away_s + 40


def test_the_reason_of_the_pause_says_how_many_failed_and_why() -> None:
    lane = LanePause((0.5, 30.0))
    for number in range(16):
        assert not lane.paused
        lane.failed(str(number), f"ConnectionRefusedError(111, 'port {8000 + number}')", 5.0)
    assert lane.reason == (
        "the last 16 samples all failed: ConnectionRefusedError(111, 'port 8015'); asked again "
        "one at a time"
    )
    assert lane.probe_due_s == 5.0
    waits = []
    for _ in range(12):
        before = lane.probe_due_s
        lane.probe(before)
        waits.append(lane.probe_due_s - before)
    assert 0.25 <= waits[0] <= 0.5 and all(wait <= 30 for wait in waits) and waits[-1] >= 15
    lane.succeeded()
    assert not lane.paused
    lane.failed("0", "ConnectionRefusedError(111, 'port 1')", 300.0)
    assert lane.paused, "one success is not many"


def test_more_workers_need_more_failures() -> None:
    lane = LanePause((0.5, 30.0))
    lane.workers = 20
    for number in range(39):
        lane.failed(str(number), REFUSED, 0.0)
    assert not lane.paused
    lane.failed("39", REFUSED, 0.0)
    assert lane.paused


def test_one_prompt_that_fails_is_given_up_and_pauses_nothing() -> None:
    lane = Lane(1, size=16)
    while not lane.ended:
        lane.step(lambda key, index: "the prompt has 9000 tokens")
        assert not lane.stash.failures.lane.paused
    assert lane.stash.given_up == 1 and lane.failed == 16 * 3


def test_prompts_that_fail_among_others_are_given_up_though_they_are_the_last() -> None:
    """Failures beside successes belong to the samples, even after everything else ended."""
    lane = Lane(20)
    lane.new = deque(sorted(lane.new, key=lambda at: (at[1], at[0])))
    while lane.ended < 20:
        lane.step(lambda key, index: REFUSED if key in ("003", "008", "009", "015") else None)
        assert lane.now < 1000
    assert lane.stash.given_up == 4 and len(lane.whole) == 16


def test_a_worker_that_fails_one_in_a_hundred_never_pauses_the_lane(seed: int) -> None:
    rng = random.Random(seed)
    words = ["sandbox timed out", "judge raised", "no answer", "bad output"]
    lane = Lane(400)
    while lane.ended < 400:
        lane.step(lambda key, index: rng.choice(words) if rng.random() < 0.01 else None)
        assert not lane.stash.failures.lane.paused
    assert len(lane.whole) >= 398


def test_failures_that_differ_do_not_pause_the_lane() -> None:
    lane = LanePause((0.5, 30.0))
    for number in range(200):
        lane.failed(str(number), ("no judge", "no engine")[number % 2], 0.0)
    assert not lane.paused


def test_failures_that_come_together_with_successes_count_for_nothing() -> None:
    lane = LanePause((0.5, 30.0))
    for accepted in range(1, 40):
        lane.look(accepted)
        for number in range(10):
            lane.failed(str(number), REFUSED, 0.0)
    assert not lane.paused


@pytest.mark.parametrize("before", [None, "tool call 7 failed"])
def test_a_sample_that_fails_alone_while_no_other_comes_is_not_given_up(before: str | None) -> None:
    """The engine may be away, and what else workers take they give back."""
    lane = Lane(2, size=2)
    if before is not None:
        lane.put("000", 0, before)
    lane.put("000", 1)
    for _ in range(12):
        request = lane.stash.failures.requests.get(("000", 0))
        lane.put("000", 0, REFUSED, request.attempt if request else 0)
        assert lane.stash.given_up == 0 and not lane.stash.failures.lane.paused
    lane.put("000", 0)
    assert lane.whole == ["000"]


def test_a_failure_counts_only_where_a_sample_has_come_since_it_was_asked_for() -> None:
    lane = Lane(2, size=2)
    failures = lane.stash.failures
    lane.put("000", 0, "tool call 7 failed")
    lane.put("000", 1)
    lane.stash.follow_lane(1.0)
    failures.publish(failures.requests["000", 0], 1.0)  # and the engine goes away
    lane.put("000", 0, REFUSED, attempt=1)
    assert failures.requests["000", 0].attempt == 1
    failures.publish(failures.requests["000", 0], 2.0)
    lane.put("001", 0)
    lane.put("000", 0, "tool call 8 failed", attempt=1)
    assert failures.requests["000", 0].attempt == 2


@pytest.mark.parametrize("away_s", [0.4, 5.0, 30.0, 3600.0])
def test_few_prompts_of_one_sample_outlive_an_engine_that_is_away(away_s: float) -> None:
    lane = Lane(3, size=1)
    while lane.ended < 3:
        lane.step(lambda key, index: REFUSED if lane.now < away_s else None)
    assert lane.stash.given_up == 0 and lane.now < away_s + 40


def test_a_new_collector_gives_up_nothing_for_failures_of_the_last_one() -> None:
    """The last failure may have excused the earlier: reports do not tell."""
    lane = Lane(1, size=2)
    lane.new.clear()
    lane.put("000", 0)
    lane.put("000", 1, REFUSED, attempt=2)
    assert lane.stash.given_up == 0
    lane.put("000", 1, REFUSED, attempt=2)
    assert lane.stash.given_up == 1


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("prompts", [1, 2])
def test_prompts_that_fail_and_are_the_last_are_given_up_after_their_retries(
    prompts: int, size: int
) -> None:
    """Fewer failures than a pause needs: nothing points to the engine."""
    lane = Lane(prompts, size)
    while lane.ended < prompts:
        lane.step(lambda key, index: f"the prompt has {lane.failed} tokens")
        assert not lane.stash.failures.lane.paused
    assert lane.failed == prompts * size * 3


def test_groups_that_did_not_come_by_the_lane_fail_as_ever() -> None:
    lane = Lane(20)
    lane.stash.failures.in_lane = lambda key: False
    while lane.ended < 20:
        lane.step(lambda key, index: REFUSED)
        assert not lane.stash.failures.lane.paused
    assert lane.stash.given_up == 20


@pytest.mark.parametrize("retries", [0, 1])
def test_few_retries_lose_no_more_than_came_before_the_pause(retries: int) -> None:
    lane = Lane(20, sample_retries=retries)
    while lane.ended < 20:
        lane.step(lambda key, index: REFUSED if lane.now < 60 else None)
    assert lane.stash.given_up <= (3 if retries == 0 else 0)


def test_a_backoff_doubles_up_to_its_cap() -> None:
    for attempt in range(1, 2000):
        longest = min(30.0, 0.5 * 2.0 ** min(attempt - 1, 60))
        waits = [backoff_s((0.5, 30.0), attempt, each) for each in range(5)]
        assert all(longest / 2 <= wait <= longest for wait in waits) and len(set(waits)) > 1
    assert backoff_s((0.0, 0.0), 5, "any") == 0.0
    assert limits.RETRY_BACKOFF_S == (0.5, 30.0)
