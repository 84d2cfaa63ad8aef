"""The stash: interleaved samples in, complete groups out. A pure state machine.

No clock, no lock, no socket, no payload: time and the policy version are arguments, and a sample is
anything with ``key``, ``group_size``, ``index`` (and ``score``, ``policy_version``, ``nbytes``
where a policy asks for them). Which cell of which group a sample belongs to is the business of a
table in C (`_core.GroupTable`), made for a million open groups, which also keeps the complete ones
in their order; what follows from it is decided here.

Invariants
----------
- A sample is in exactly one place: an open group, a ready group, a leased group, or `discards`.
- A group that is complete, or that its deadline ended, has left the table of open ones.
- A group leaves whole: nothing here ever delivers or discards part of a group that was complete.

The rules where a producer is unclear
-------------------------------------
- A key is an instance id, or (instance id, epoch) where producers give epochs. When its group is
  complete, the next sample of a key begins a new group; with an epoch it is surplus instead.
- A duplicate index keeps the first sample. A sample whose group_size disagrees with its open group
  is discarded; the group goes on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from shmbus import limits
from shmbus.stash.failures import FailingGroup, Failures, Request
from shmbus_ext._core import (
    REFUSED_DUPLICATE,
    REFUSED_FAILING,
    REFUSED_GROUP_SIZE,
    REFUSED_SURPLUS,
    GroupEntry,
    GroupTable,
)

__all__ = ["Discard", "Sample", "Stash", "StashPolicy"]

Reason = Literal[
    "duplicate",
    "size_mismatch",
    "surplus",
    "timeout",
    "stale",
    "zero_variance",
    "overflow",
    "failed",
]


class Sample(Protocol):
    """What the stash needs to know of a trajectory."""

    @property
    def key(self) -> Hashable: ...  # noqa: D102
    @property
    def group_size(self) -> int: ...  # noqa: D102
    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def score(self) -> float: ...  # noqa: D102
    @property
    def policy_version(self) -> int: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102
    @property
    def failed(self) -> bool: ...  # noqa: D102
    @property
    def meta(self) -> object: ...  # noqa: D102
    @property
    def committed_ns(self) -> int: ...  # noqa: D102


S = TypeVar("S", bound=Sample)

#: Keys of completed groups that are remembered, where epochs are given, to recognise surplus
#: samples: some MiB of keys, and many steps' worth of groups.
RECENT_KEYS = 65_536

_REFUSALS: dict[int, Reason] = {
    REFUSED_DUPLICATE: "duplicate",
    REFUSED_GROUP_SIZE: "size_mismatch",
    REFUSED_SURPLUS: "surplus",
}


class StashPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to groups that are late, stale, useless or too many.

    Attributes
    ----------
    group_timeout_s : float | None
        Seconds that a group may stay incomplete; None for ever.
    on_timeout : "wait" | "drop" | "partial"
        Keep it, discard it, or deliver what there is.
    max_policy_lag : int | None
        A group is stale if its oldest sample is more than this many versions behind.
    skip_zero_variance : bool
        Discard complete groups whose scores are all the same: they have no gradient.
    max_stash_bytes : int | None
        Ring bytes that incomplete groups may hold.
    on_overflow : "wait" | "drop" | "partial"
        What becomes of the oldest incomplete groups above that.
    sample_retries : int
        How often a sample that failed, or is missing at its group's deadline, is asked for again.
    retry_timeout_s : float
        Seconds for an answer; and that a group of which a sample failed for good waits for others.
    on_failure : "drop" | "partial"
        What becomes of a group of which a sample failed for good, when the others are there.
    """

    group_timeout_s: float | None = None
    on_timeout: Literal["wait", "drop", "partial"] = "wait"
    max_policy_lag: int | None = None
    skip_zero_variance: bool = False
    max_stash_bytes: int | None = None
    on_overflow: Literal["wait", "drop", "partial"] = "wait"
    sample_retries: int = 0
    retry_timeout_s: float = limits.RETRY_TIMEOUT_S
    on_failure: Literal["drop", "partial"] = "drop"


class Discard(Generic[S]):
    """Samples that left for a reason other than acknowledgement."""

    __slots__ = ("key", "reason", "samples")

    def __init__(self, reason: Reason, key: Hashable, samples: list[S]) -> None:
        self.reason: Reason = reason
        self.key = key
        self.samples = samples


class Stash(Generic[S]):
    """Groups samples by key and hands out complete groups under lease.

    Parameters
    ----------
    policy : StashPolicy
        What happens to groups that are late, stale, useless or too many.
    """

    def __init__(self, policy: StashPolicy | None = None) -> None:
        policy = self.policy = policy or StashPolicy()
        self.discards: list[Discard[S]] = []
        self.timeouts = 0
        self.overflows = 0
        self.given_up = 0
        #: Reports of failures in groups that are delivered without those samples.
        self._reports: dict[GroupEntry[S], list[S]] = {}
        self._limit = self.policy.max_stash_bytes
        #: Whoever puts samples straight into it passes what `put` returns to `apply_policy`.
        self.rows: GroupTable[S] = GroupTable(
            count_bytes=self._limit is not None, judged=self.policy.skip_zero_variance
        )
        self.failures: Failures[S] = Failures(
            policy.sample_retries,
            policy.retry_timeout_s,
            None if policy.on_timeout == "wait" else policy.group_timeout_s,
            self.rows.apart,
        )

    def add(self, samples: Iterable[S], now_s: float) -> None:
        """Take samples in. Costs O(1) each, however many groups are open."""
        self.apply_policy(self.rows.put(samples, now_s), now_s)

    def apply_policy(self, left: list[GroupEntry[S] | tuple[int, S]], now_s: float) -> None:
        """Decide on what came and is in no group: refused samples, and groups to be judged."""
        for each in left:
            if isinstance(each, tuple):
                why, sample = each
                if why == REFUSED_FAILING:
                    self._take_apart(sample, now_s)
                else:
                    self.discards.append(Discard(_REFUSALS[why], sample.key, [sample]))
            elif _scores_equal(each.samples):
                self.discards.append(Discard("zero_variance", each.key, each.samples))
            else:
                self.rows.push(each)
        recent = self.rows.recent
        while len(recent) > RECENT_KEYS:
            del recent[next(iter(recent))]
        if self._limit is not None:
            self._overflow(self._limit, now_s)

    def _end_oldest(self, policy: str, reason: Reason, now_s: float) -> None:
        """End an incomplete group: it is discarded, or delivered as it is."""
        apart = self.failures.oldest()
        born_s = self.rows.oldest_born_s
        if apart is not None and (born_s is None or apart.born_s < born_s):
            self._end_apart(apart, now_s, policy, reason)
            return
        self._end_row(self.rows.take_oldest(), policy, reason)

    def _end_row(self, group: GroupEntry[S], policy: str, reason: Reason) -> None:
        if policy == "partial":
            self.rows.push(group)
        else:
            self.discards.append(Discard(reason, group.key, group.samples))

    def _overflow(self, limit: int, now_s: float) -> None:
        if self.rows.nbytes + self.failures.nbytes <= limit:
            return
        self.overflows += 1
        while self.policy.on_overflow != "wait" and self.rows.nbytes + self.failures.nbytes > limit:
            self._end_oldest(self.policy.on_overflow, "overflow", now_s)

    # -- failures -------------------------------------------------------------------------------

    def _take_apart(self, sample: S, now_s: float) -> None:
        """Take in a failure, or a sample of a group in which one failed."""
        failures, key = self.failures, sample.key
        group = failures.groups.get(key)
        if group is None:
            failures.groups.pop(key, None)
            if not sample.failed:
                # Its group has ended since the table refused it: this one begins the next.
                self.add((sample,), now_s)
                return
            row = self.rows.take(key)
            if row is not None:
                group = failures.begin(key, row.size, row.samples, row.born_s, now_s)
            elif not self._is_late(sample):
                group = failures.begin(key, sample.group_size, (), now_s, now_s)
            else:
                self.discards.append(Discard("failed", key, [sample]))
                return
        failures.take_in(group, sample, now_s)
        self._settle(group, now_s)

    def _is_late(self, report: S) -> bool:
        """Whether the sample came after all, in a group that is complete, and the report later."""
        return report.key in self.rows.recent or any(
            sample.index == report.index and sample.committed_ns >= report.committed_ns
            for group in self.rows.full(report.key)
            for sample in group.samples
        )

    def _settle(self, group: FailingGroup[S], now_s: float) -> None:
        left, self.failures.left = self.failures.left, []
        for reason, sample in left:
            self.discards.append(Discard(reason, sample.key, [sample]))
        self._count_apart()
        if group.decided:
            self._end_apart(group, now_s)

    def _end_apart(
        self, group: FailingGroup[S], now_s: float, policy: str = "", reason: Reason = "failed"
    ) -> None:
        """End a group in which a sample failed: it is whole, or given up."""
        key, samples, reports = group.key, group.samples, group.reports
        reported = group.reported
        self.failures.end(group)
        if group.size and len(samples) == group.size:
            self._count_apart()
            self.add(samples, now_s)
            return
        if not policy:
            policy = self.policy.on_failure if reported else self.policy.on_timeout
            reason = "failed" if reported else "timeout"
        self.given_up += reason == "failed"
        self.timeouts += reason == "timeout"
        self.failures.dirty = True
        if policy == "partial" and samples:
            self.rows.put(samples, now_s)
            row = self.rows.take(key)
            assert row is not None
            self.rows.push(row)
            if reports:
                self._reports[row] = reports
        elif reason == "failed":
            self.discards.append(Discard(reason, key, samples + reports))
        else:
            self._discard(reason, key, samples)
            self._discard("failed", key, reports)
        if isinstance(key, tuple):
            self.rows.recent[key] = None
        self._count_apart()

    def _count_apart(self) -> None:
        """Tell the table what is kept here, for messages."""
        reports = sum(map(len, self._reports.values()))
        self.rows.failing_cells = self.failures.records + reports

    def _discard(self, reason: Reason, key: Hashable, samples: list[S]) -> None:
        if samples:
            self.discards.append(Discard(reason, key, samples))

    def lost(self, request: Request, reason: str, now_s: float) -> None:
        """Note that a sample which is asked for will not come of this attempt."""
        group = self.failures.groups.get(request.key)
        self.failures.fail(request, reason, now_s)
        if group is not None:
            self._settle(group, now_s)

    # -- time -----------------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        """End the incomplete groups whose deadline has passed, as the policy says.

        Where samples are asked for again, those that are missing are asked for instead.
        """
        while (deadline_s := self._open_deadline_s()) is not None and now_s >= deadline_s:
            if self.policy.sample_retries:
                row = self.rows.take_oldest()
                group = self.failures.begin(row.key, row.size, row.samples, row.born_s, now_s)
                waited = f"not there {now_s - row.born_s:.3g} s after the first of its group"
                self.failures.miss_all(group, waited, now_s)
                self._count_apart()
            else:
                self.timeouts += 1
                self._end_row(self.rows.take_oldest(), self.policy.on_timeout, "timeout")

    def expire_apart(self, now_s: float) -> None:
        """Do so for requests and groups with failures, once all that came has been read."""
        for group in self.failures.expire(now_s):
            # The end of one may have made too much of the stash, and that the end of another.
            if self.failures.groups.get(group.key) is group:
                self._end_apart(group, now_s)

    def next_deadline_s(self) -> float | None:
        """When either has something to do next, on the clock of the caller; None if never."""
        dues = (self._open_deadline_s(), self.failures.next_deadline_s())
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def _open_deadline_s(self) -> float | None:
        timeout_s = self.policy.group_timeout_s
        if timeout_s is None or self.policy.on_timeout == "wait":
            return None
        born_s = self.rows.oldest_born_s
        return None if born_s is None else born_s + timeout_s

    def lease(self, max_groups: int, policy_version: int = 0) -> list[GroupEntry[S]]:
        """Hand out ready groups, in the order of completion; stale ones are discarded instead."""
        lag = self.policy.max_policy_lag
        if lag is None:
            return self.rows.lease(max_groups)
        fresh: list[GroupEntry[S]] = []
        while len(fresh) < max_groups and (leased := self.rows.lease(max_groups - len(fresh))):
            for group in leased:
                if min(s.policy_version for s in group.samples) < policy_version - lag:
                    self.discards.append(Discard("stale", group.key, group.samples))
                    self.end_lease(group)
                else:
                    fresh.append(group)
        return fresh

    def end_lease(self, group: GroupEntry[S]) -> None:
        """Forget a leased group: its samples were acknowledged or dropped."""
        self.rows.end_lease(group)
        if self._reports:
            self._discard("failed", group.key, self._reports.pop(group, []))
            self._count_apart()

    def give_back(self, group: GroupEntry[S]) -> None:
        """Make a leased group the next to be delivered."""
        self.rows.give_back(group)

    def is_leased(self, group: GroupEntry[S]) -> bool:
        """Whether the group is under lease now."""
        return self.rows.is_leased(group)

    def take_discards(self) -> list[Discard[S]]:
        """Return the discards and forget them."""
        discards, self.discards = self.discards, []
        return discards

    def oldest(self, count: int) -> list[GroupEntry[S] | FailingGroup[S]]:
        """Return copies of the incomplete groups that have waited longest, oldest first.

        Those in which a sample failed are the groups themselves.
        """
        found: list[GroupEntry[S] | FailingGroup[S]] = [*self.rows.oldest(count)]
        found += [group for group in self.failures.groups.values() if group is not None]
        return sorted(found, key=lambda group: group.born_s)[:count]

    def waiting_samples(self) -> list[S]:
        """Every sample that is not leased: of open groups by age, of ready ones, and failures."""
        found = self.rows.samples() + self.rows.ready_samples() + self.failures.samples()
        for reports in self._reports.values():
            found += reports
        return found

    @property
    def open_groups(self) -> int:
        """Incomplete groups."""
        return len(self.rows) + len(self.failures.groups)

    @property
    def open_records(self) -> int:
        """Their samples, and the reports of failures."""
        return self.rows.cells + self.rows.failing_cells

    @property
    def ready_groups(self) -> int:
        """Complete groups that nobody has taken."""
        return self.rows.ready_groups

    @property
    def ready_records(self) -> int:
        """Their samples."""
        return self.rows.ready_cells

    @property
    def leased_groups(self) -> int:
        """Groups that were taken and not acknowledged."""
        return self.rows.leased_groups

    @property
    def leased_records(self) -> int:
        """Their samples."""
        return self.rows.leased_cells


def _scores_equal(samples: Sequence[Sample]) -> bool:
    first = samples[0].score
    return all(sample.score == first for sample in samples)
