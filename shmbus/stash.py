"""The stash: interleaved samples in, complete groups out. A pure state machine.

No clock, no lock, no socket, no payload: time and the policy version are arguments, and a sample is
anything with ``key``, ``group_size``, ``index`` (and ``score``, ``policy_version``, ``nbytes``
where a policy asks for them).

Invariants
----------
- A sample is in exactly one place: an open group, a ready group, a leased group, or `discards`.
- `_open` is ordered by birth, so the first group in it is always the oldest.
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
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from shmbus import limits

__all__ = ["Discard", "OpenGroup", "Sample", "Stash", "StashPolicy"]

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


class OpenGroup(Generic[S]):
    """A group on its way: `samples[i]` is the sample of index i, or None while it is missing."""

    __slots__ = ("born_s", "key", "missing", "nbytes", "number", "samples", "size")

    def __init__(self, key: Hashable, size: int, now_s: float) -> None:
        self.key = key
        self.size = size
        self.missing = size
        self.born_s = now_s
        self.samples: list[S | None] = [None] * size
        self.number = -1
        self.nbytes = 0

    def present(self) -> list[S]:
        """Return the samples that are in, by index."""
        if not self.missing:
            return self.samples  # type: ignore[return-value]
        return [sample for sample in self.samples if sample is not None]


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
        self.open_records = 0
        self.ready_records = 0
        self.leased_records = 0
        self.timeouts = 0
        self.overflows = 0
        self._open: dict[Hashable, OpenGroup[S]] = {}
        self._ready: deque[OpenGroup[S]] = deque()
        self._leased: dict[int, OpenGroup[S]] = {}
        self._recent: dict[Hashable, None] = {}
        self._bytes = 0
        self._numbers = 0

    def add(self, samples: Iterable[S], now_s: float) -> None:
        """Take samples in. Costs O(1) each, however many groups are open."""
        groups = self._open
        find = groups.get
        counts_bytes = self.policy.max_stash_bytes is not None
        added = 0
        for sample in samples:
            key = sample.key
            group = find(key)
            if group is None:
                if key in self._recent:
                    self.discards.append(Discard("surplus", key, [sample]))
                    continue
                group = groups[key] = OpenGroup(key, sample.group_size, now_s)
            elif group.size != sample.group_size:
                self.discards.append(Discard("size_mismatch", key, [sample]))
                continue
            index = sample.index
            if group.samples[index] is not None:
                self.discards.append(Discard("duplicate", key, [sample]))
                continue
            group.samples[index] = sample
            group.missing -= 1
            added += 1
            if counts_bytes:
                group.nbytes += sample.nbytes
                self._bytes += sample.nbytes
            if not group.missing:
                del groups[key]
                self.open_records += added - group.size
                added = 0
                self._complete(group)
        self.open_records += added
        if counts_bytes:
            self._overflow()

    def _complete(self, group: OpenGroup[S]) -> None:
        self._bytes -= group.nbytes
        if type(group.key) is tuple:
            recent = self._recent
            recent[group.key] = None
            if len(recent) > limits.RECENT_KEYS:
                del recent[next(iter(recent))]
        if self.policy.skip_zero_variance and _scores_equal(group.present()):
            self.discards.append(Discard("zero_variance", group.key, group.present()))
            return
        self._ready.append(group)
        self.ready_records += group.size

    def _leave(self, group: OpenGroup[S], policy: str, reason: Reason) -> None:
        """End an incomplete group: it is discarded, or delivered as it is."""
        del self._open[group.key]
        samples = group.present()
        self.open_records -= len(samples)
        self._bytes -= group.nbytes
        if policy == "partial":
            self._ready.append(group)
            self.ready_records += len(samples)
        else:
            self.discards.append(Discard(reason, group.key, samples))

    def _overflow(self) -> None:
        limit = self.policy.max_stash_bytes
        if limit is None or self._bytes <= limit:
            return
        self.overflows += 1
        while self.policy.on_overflow != "wait" and self._bytes > limit and self._open:
            oldest = next(iter(self._open.values()))
            self._leave(oldest, self.policy.on_overflow, "overflow")

    def expire(self, now_s: float) -> None:
        """End the incomplete groups whose deadline has passed, as the policy says."""
        timeout_s = self.policy.group_timeout_s
        if timeout_s is None or self.policy.on_timeout == "wait":
            return
        while self._open:
            oldest = next(iter(self._open.values()))
            if now_s < oldest.born_s + timeout_s:
                return
            self.timeouts += 1
            self._leave(oldest, self.policy.on_timeout, "timeout")

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next, on the clock of the caller; None if never."""
        timeout_s = self.policy.group_timeout_s
        if timeout_s is None or self.policy.on_timeout == "wait" or not self._open:
            return None
        return next(iter(self._open.values())).born_s + timeout_s

    def lease(self, max_groups: int, policy_version: int = 0) -> list[OpenGroup[S]]:
        """Hand out ready groups, in the order of completion; stale ones are discarded instead."""
        leased: list[OpenGroup[S]] = []
        lag = self.policy.max_policy_lag
        ready = self._ready
        while ready and len(leased) < max_groups:
            group = ready.popleft()
            samples = group.present()
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

    def end_lease(self, group: OpenGroup[S]) -> None:
        """Forget a leased group: its samples were acknowledged or dropped."""
        del self._leased[group.number]
        self.leased_records -= group.size - group.missing

    def give_back(self, group: OpenGroup[S]) -> None:
        """Make a leased group the next to be delivered."""
        self.end_lease(group)
        self._ready.appendleft(group)
        self.ready_records += group.size - group.missing

    def is_leased(self, group: OpenGroup[S]) -> bool:
        """Whether the group is under lease now."""
        return self._leased.get(group.number) is group

    def take_discards(self) -> list[Discard[S]]:
        """Return the discards and forget them."""
        discards, self.discards = self.discards, []
        return discards

    def oldest(self, count: int) -> Iterator[OpenGroup[S]]:
        """Yield the incomplete groups that have waited longest, oldest first."""
        for position, group in enumerate(self._open.values()):
            if position >= count:
                return
            yield group

    def waiting_samples(self) -> list[S]:
        """Every sample that is not leased: of open groups by age, then of ready ones."""
        found = [s for group in self._open.values() for s in group.samples if s is not None]
        for group in self._ready:
            found.extend(group.present())
        return found

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
