"""The stash: interleaved samples in, complete groups out. A pure state machine.

No clock, no lock, no socket, no payload: time and the policy version are arguments, and a sample is
anything with ``key``, ``group_size``, ``index`` (and ``score``, ``policy_version``, ``nbytes``
where a policy asks for them). Which cell of which group a sample belongs to is the business of a
table in C (`_core.Rows`), made for a million open groups, which also keeps the complete ones in
their order; what follows from it is decided here.

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
from shmbus_ext._core import REFUSED_DUPLICATE, REFUSED_RECENT, REFUSED_WIDTH, Row, Rows

__all__ = ["Discard", "Sample", "Stash", "StashPolicy"]

Reason = Literal[
    "duplicate", "size_mismatch", "surplus", "timeout", "stale", "zero_variance", "overflow"
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


S = TypeVar("S", bound=Sample)

_REFUSALS: dict[int, Reason] = {
    REFUSED_DUPLICATE: "duplicate",
    REFUSED_WIDTH: "size_mismatch",
    REFUSED_RECENT: "surplus",
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
    """

    group_timeout_s: float | None = None
    on_timeout: Literal["wait", "drop", "partial"] = "wait"
    max_policy_lag: int | None = None
    skip_zero_variance: bool = False
    max_stash_bytes: int | None = None
    on_overflow: Literal["wait", "drop", "partial"] = "wait"


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
        self.policy = policy or StashPolicy()
        self.discards: list[Discard[S]] = []
        self.timeouts = 0
        self.overflows = 0
        self._limit = self.policy.max_stash_bytes
        #: Whoever reads samples straight into it calls `sort_out` with what `Rows.put` returns.
        self.rows: Rows[S] = Rows(
            count_bytes=self._limit is not None, judged=self.policy.skip_zero_variance
        )

    def add(self, samples: Iterable[S], now_s: float) -> None:
        """Take samples in. Costs O(1) each, however many groups are open."""
        self.sort_out(self.rows.put(samples, now_s))

    def sort_out(self, left: list[Row[S] | tuple[int, S]]) -> None:
        """Decide on what came and is in no group: refused samples, and groups to be judged."""
        for each in left:
            if isinstance(each, tuple):
                why, sample = each
                self.discards.append(Discard(_REFUSALS[why], sample.key, [sample]))
            elif _scores_equal(each.samples):
                self.discards.append(Discard("zero_variance", each.key, each.samples))
            else:
                self.rows.push(each)
        recent = self.rows.recent
        while len(recent) > limits.RECENT_KEYS:
            del recent[next(iter(recent))]
        if self._limit is not None:
            self._overflow(self._limit)

    def _end_oldest(self, policy: str, reason: Reason) -> None:
        """End an incomplete group: it is discarded, or delivered as it is."""
        group = self.rows.take_oldest()
        if policy == "partial":
            self.rows.push(group)
        else:
            self.discards.append(Discard(reason, group.key, group.samples))

    def _overflow(self, limit: int) -> None:
        if self.rows.nbytes <= limit:
            return
        self.overflows += 1
        while self.policy.on_overflow != "wait" and self.rows.nbytes > limit:
            self._end_oldest(self.policy.on_overflow, "overflow")

    def expire(self, now_s: float) -> None:
        """End the incomplete groups whose deadline has passed, as the policy says."""
        while (deadline_s := self.next_deadline_s()) is not None and now_s >= deadline_s:
            self.timeouts += 1
            self._end_oldest(self.policy.on_timeout, "timeout")

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next, on the clock of the caller; None if never."""
        timeout_s = self.policy.group_timeout_s
        if timeout_s is None or self.policy.on_timeout == "wait":
            return None
        born_s = self.rows.oldest_born_s
        return None if born_s is None else born_s + timeout_s

    def lease(self, max_groups: int, policy_version: int = 0) -> list[Row[S]]:
        """Hand out ready groups, in the order of completion; stale ones are discarded instead."""
        lag = self.policy.max_policy_lag
        if lag is None:
            return self.rows.lease(max_groups)
        fresh: list[Row[S]] = []
        while len(fresh) < max_groups and (leased := self.rows.lease(max_groups - len(fresh))):
            for group in leased:
                if min(s.policy_version for s in group.samples) < policy_version - lag:
                    self.rows.end_lease(group)
                    self.discards.append(Discard("stale", group.key, group.samples))
                else:
                    fresh.append(group)
        return fresh

    def end_lease(self, group: Row[S]) -> None:
        """Forget a leased group: its samples were acknowledged or dropped."""
        self.rows.end_lease(group)

    def give_back(self, group: Row[S]) -> None:
        """Make a leased group the next to be delivered."""
        self.rows.give_back(group)

    def is_leased(self, group: Row[S]) -> bool:
        """Whether the group is under lease now."""
        return self.rows.is_leased(group)

    def take_discards(self) -> list[Discard[S]]:
        """Return the discards and forget them."""
        discards, self.discards = self.discards, []
        return discards

    def oldest(self, count: int) -> list[Row[S]]:
        """Return copies of the incomplete groups that have waited longest, oldest first."""
        return self.rows.oldest(count)

    def waiting_samples(self) -> list[S]:
        """Every sample that is not leased: of open groups by age, then of ready ones."""
        return self.rows.samples() + self.rows.ready_samples()

    @property
    def open_groups(self) -> int:
        """Incomplete groups."""
        return len(self.rows)

    @property
    def open_records(self) -> int:
        """Their samples."""
        return self.rows.cells

    @property
    def ready_groups(self) -> int:
        """Complete groups that nobody has taken."""
        return self.rows.ready_rows

    @property
    def ready_records(self) -> int:
        """Their samples."""
        return self.rows.ready_cells

    @property
    def leased_groups(self) -> int:
        """Groups that were taken and not acknowledged."""
        return self.rows.leased_rows

    @property
    def leased_records(self) -> int:
        """Their samples."""
        return self.rows.leased_cells


def _scores_equal(samples: Sequence[Sample]) -> bool:
    first = samples[0].score
    return all(sample.score == first for sample in samples)
