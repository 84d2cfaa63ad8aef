"""The stash: interleaved samples in, complete groups out. A pure state machine.

No clock, no lock, no socket, no payload: time and the policy version are arguments, and a sample is
anything with ``key``, ``group_size``, ``index`` (and ``score``, ``policy_version``, ``nbytes``
where a policy asks for them). Which cell of which group a sample belongs to is the business of a
table in C (`_core.Rows`), made for a million open groups; what follows from it is decided here.

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

from collections import deque
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
        self.ready_records = 0
        self.leased_records = 0
        self.timeouts = 0
        self.overflows = 0
        self._limit = self.policy.max_stash_bytes
        self._skips = self.policy.skip_zero_variance
        self._open: Rows[S] = Rows(count_bytes=self._limit is not None)
        self._ready: deque[Row[S]] = deque()
        self._leased: dict[int, Row[S]] = {}
        self._recent: dict[Hashable, None] = {}
        self._numbers = 0

    def add(self, samples: Iterable[S], now_s: float) -> None:
        """Take samples in. Costs O(1) each, however many groups are open."""
        for left in self._open.put(samples, now_s, self._recent):
            if isinstance(left, tuple):
                why, sample = left
                self.discards.append(Discard(_REFUSALS[why], sample.key, [sample]))
            elif self._skips and _scores_equal(left.samples):
                self.discards.append(Discard("zero_variance", left.key, left.samples))
            else:
                self._ready.append(left)
                self.ready_records += left.size
        while len(self._recent) > limits.RECENT_KEYS:
            del self._recent[next(iter(self._recent))]
        if self._limit is not None:
            self._overflow(self._limit)

    def _end_oldest(self, policy: str, reason: Reason) -> None:
        """End an incomplete group: it is discarded, or delivered as it is."""
        group = self._open.take_oldest()
        if policy == "partial":
            self._ready.append(group)
            self.ready_records += len(group.samples)
        else:
            self.discards.append(Discard(reason, group.key, group.samples))

    def _overflow(self, limit: int) -> None:
        if self._open.nbytes <= limit:
            return
        self.overflows += 1
        while self.policy.on_overflow != "wait" and self._open.nbytes > limit:
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
        born_s = self._open.oldest_born_s
        return None if born_s is None else born_s + timeout_s

    def lease(self, max_groups: int, policy_version: int = 0) -> list[Row[S]]:
        """Hand out ready groups, in the order of completion; stale ones are discarded instead."""
        leased: list[Row[S]] = []
        lag = self.policy.max_policy_lag
        ready = self._ready
        while ready and len(leased) < max_groups:
            group = ready.popleft()
            samples = group.samples
            self.ready_records -= len(samples)
            if lag is not None and min(s.policy_version for s in samples) < policy_version - lag:
                self.discards.append(Discard("stale", group.key, samples))
                continue
            self._numbers += 1
            group.number = self._numbers
            self._leased[group.number] = group
            self.leased_records += len(samples)
            leased.append(group)
        return leased

    def end_lease(self, group: Row[S]) -> None:
        """Forget a leased group: its samples were acknowledged or dropped."""
        del self._leased[group.number]
        self.leased_records -= len(group.samples)

    def give_back(self, group: Row[S]) -> None:
        """Make a leased group the next to be delivered."""
        self.end_lease(group)
        self._ready.appendleft(group)
        self.ready_records += len(group.samples)

    def is_leased(self, group: Row[S]) -> bool:
        """Whether the group is under lease now."""
        return self._leased.get(group.number) is group

    def take_discards(self) -> list[Discard[S]]:
        """Return the discards and forget them."""
        discards, self.discards = self.discards, []
        return discards

    def oldest(self, count: int) -> list[Row[S]]:
        """Return copies of the incomplete groups that have waited longest, oldest first."""
        return self._open.oldest(count)

    def waiting_samples(self) -> list[S]:
        """Every sample that is not leased: of open groups by age, then of ready ones."""
        found = self._open.samples()
        for group in self._ready:
            found.extend(group.samples)
        return found

    def summary(self) -> tuple[int, int, int, int]:
        """Leased groups and samples, and those of groups that nobody has taken."""
        groups = self._open
        return (
            len(self._leased),
            self.leased_records,
            len(groups) + len(self._ready),
            groups.cells + self.ready_records,
        )

    @property
    def open_records(self) -> int:
        """Samples of incomplete groups."""
        return self._open.cells

    @property
    def memory_bytes(self) -> int:
        """Bytes of the table of open groups, the samples themselves not counted."""
        return self._open.memory_bytes

    @property
    def open_groups(self) -> int:
        """Incomplete groups."""
        return len(self._open)

    @property
    def ready_groups(self) -> int:
        """Complete groups that nobody has taken."""
        return len(self._ready)

    @property
    def leased_groups(self) -> int:
        """Groups that were taken and not acknowledged."""
        return len(self._leased)


def _scores_equal(samples: Sequence[Sample]) -> bool:
    first = samples[0].score
    return all(sample.score == first for sample in samples)
