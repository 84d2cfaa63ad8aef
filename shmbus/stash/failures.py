"""Groups in which a sample has failed: what is asked for again, and when a group is given up.

A pure state machine beside the stash: time is an argument, and who is asked, and how, is the
collector's business (`shmbus.stash.retries`).

From a sample's failure on, its group is kept here, apart from the table of open groups. A failed
sample is asked for again, alone, a set number of times. A group ends when each of its samples has
come or has failed for good: whole, or given up as its policy says.

Invariants
----------
- Each index of a group is delivered, pending or failed (FailedIndex); a failed index is final or
  has an open retry request.
- While a sample has failed, its group has a deadline: of what is asked for, or of how long it
  lingers. So none waits for ever because of that.
- The report of a failure stays in the ring until its sample has come or its group has ended: who
  reads the ring anew finds what has failed, and how often.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, Literal, Protocol, TypeVar

from shmbus import limits

__all__ = ["FailingGroup", "Failures", "FailedIndex", "Reported", "Request"]

Left = Literal["failed", "duplicate", "size_mismatch"]


class Reported(Protocol):
    """What is asked of a sample, and of the report that one failed."""

    @property
    def key(self) -> Hashable: ...  # noqa: D102
    @property
    def group_size(self) -> int: ...  # noqa: D102
    @property
    def index(self) -> int: ...  # noqa: D102
    @property
    def score(self) -> float: ...  # noqa: D102
    @property
    def failed(self) -> bool: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102
    @property
    def meta(self) -> object: ...  # noqa: D102


S = TypeVar("S", bound=Reported)

#: No report says more; one that does has been scribbled, or is a forgery.
_ATTEMPTS = 1 << 20


class Request:
    """A sample that is asked for again."""

    __slots__ = ("attempt", "deadline_s", "group_size", "index", "key", "reason")

    def __init__(
        self, key: Hashable, group_size: int, index: int, attempt: int, reason: str
    ) -> None:
        self.key = key
        self.group_size = group_size
        self.index = index
        #: 1 for the first time that it is asked for.
        self.attempt = attempt
        self.reason = reason
        #: None until somebody can take it.
        self.deadline_s: float | None = None


class FailedIndex(Generic[S]):
    """An index that has failed, or was not there in time."""

    __slots__ = ("attempts", "reason", "report", "reported", "request")

    def __init__(self) -> None:
        #: How often it has failed.
        self.attempts = 0
        self.reason = ""
        self.report: S | None = None
        #: Whether anybody said so; False for one that merely stayed away.
        self.reported = False
        #: None where it is for good.
        self.request: Request | None = None


class FailingGroup(Generic[S]):
    """A group that is kept apart. `size` is 0 until anybody says it."""

    __slots__ = ("born_s", "came", "due_s", "key", "misses", "overdue", "size", "touched_s")

    def __init__(self, key: Hashable, size: int, born_s: float, now_s: float) -> None:
        self.key = key
        self.size = size
        self.born_s = born_s
        self.touched_s = now_s
        self.came: dict[int, S] = {}
        self.misses: dict[int, FailedIndex[S]] = {}
        #: Whether its own deadline is over, and with it the time of what was merely missing.
        self.overdue = False
        self.due_s = 0.0

    @property
    def samples(self) -> list[S]:
        """What came, by index."""
        return [self.came[index] for index in sorted(self.came)]

    @property
    def reports(self) -> list[S]:
        """The reports that are in the ring."""
        return [miss.report for miss in self.misses.values() if miss.report is not None]

    @property
    def reported(self) -> bool:
        """Whether a sample failed for good that somebody said has failed."""
        return any(m.reported and m.request is None for m in self.misses.values())

    @property
    def waits_for_rest(self) -> bool:
        """Whether it waits for no answer, and cannot become whole any more."""
        return bool(self.misses) and all(m.request is None for m in self.misses.values())

    @property
    def decided(self) -> bool:
        """Whether each sample has come, or will not."""
        for_good = sum(miss.request is None for miss in self.misses.values())
        return self.size > 0 and len(self.came) + for_good >= self.size


class Failures(Generic[S]):
    """The groups that are kept apart.

    Parameters
    ----------
    retries : int
        How often a sample is asked for again.
    retry_timeout_s : float
        Seconds that a request may stay unanswered, which is a failed attempt; and that a group with
        a sample that failed for good waits for its others.
    group_timeout_s : float, optional
        Seconds that a group may stay incomplete before what is missing is taken for failed.
    groups : dict
        Where the groups are, by key: what the table of open groups knows as apart. None for one
        whose first failure the table has met, and nobody here yet.
    """

    def __init__(
        self,
        retries: int,
        retry_timeout_s: float,
        group_timeout_s: float | None,
        groups: dict[Hashable, FailingGroup[S] | None],
    ) -> None:
        self.retries = retries
        self.retry_timeout_s = retry_timeout_s
        self._group_timeout_s = group_timeout_s
        self.groups = groups
        #: What is asked for, by key and index, in the order of asking.
        self.requests: dict[tuple[Hashable, int], Request] = {}
        #: Attempts that an earlier collector had asked for, by key and index.
        self.before: dict[tuple[Hashable, int], int] = {}
        #: Whether `requests` has changed since the collector looked.
        self.dirty = False
        self.left: list[tuple[Left, S]] = []
        self.records = 0
        self.nbytes = 0
        self._due: list[tuple[float, int, FailingGroup[S]]] = []
        self._ticket = 0

    # -- coming and failing ---------------------------------------------------------------------

    def begin(
        self, key: Hashable, size: int, samples: Iterable[S], born_s: float, now_s: float
    ) -> FailingGroup[S]:
        """Keep a group apart from now on."""
        group: FailingGroup[S] = FailingGroup(key, size, born_s, now_s)
        for sample in samples:
            group.came[sample.index] = sample
            self._count(sample, 1)
        self.groups[key] = group
        return group

    def take_in(self, group: FailingGroup[S], sample: S, now_s: float) -> None:
        """Take in a sample of the group, or the report that one failed."""
        if sample.group_size and not group.size:
            self._learn_size(group, sample.group_size)
        index = sample.index
        if sample.failed:
            self._report(group, sample, now_s)
        elif sample.group_size != group.size:
            self.left.append(("size_mismatch", sample))
        elif index in group.came:
            self.left.append(("duplicate", sample))
        else:
            group.came[index] = sample
            self._count(sample, 1)
            self._forget(group, index)
        self._touch(group, now_s)

    def _learn_size(self, group: FailingGroup[S], size: int) -> None:
        group.size = size
        for index in [index for index in group.misses if index >= size]:
            self._forget(group, index)

    def _forget(self, group: FailingGroup[S], index: int) -> None:
        """Settle a miss: its sample is here, or there is no such index."""
        miss = group.misses.pop(index, None)
        if miss is not None:
            self._withdraw(group, index, miss)
            self._replace(miss, None)

    def _report(self, group: FailingGroup[S], report: S, now_s: float) -> None:
        index = report.index
        sized = report.group_size in (0, group.size) and (not group.size or index < group.size)
        miss = group.misses.get(index)
        # What fails after another has delivered it, or has been asked for since, says nothing new.
        attempt = int(report.score) if 0 <= report.score <= _ATTEMPTS else 0
        late = miss is not None and attempt < miss.attempts
        if index in group.came or not sized or late:
            self.left.append(("failed", report))
            return
        if miss is None:
            miss = group.misses[index] = FailedIndex()
        miss.reported = True
        self._replace(miss, report)
        self._fail(group, index, attempt, _reason(report))

    def fail(self, request: Request, reason: str, now_s: float) -> None:
        """Count an attempt that ended without a word: who had taken it died, or time is over."""
        group = self.groups.get(request.key)
        if group is None or self.requests.get((request.key, request.index)) is not request:
            return
        self._fail(group, request.index, request.attempt, reason)
        self._touch(group, now_s)

    def _fail(self, group: FailingGroup[S], index: int, attempt: int, reason: str) -> None:
        """Count a failed attempt, 0 for the first; ask for the next, or be content with it."""
        miss = group.misses[index]
        self._withdraw(group, index, miss)
        miss.reason = reason
        attempt = max(attempt + 1, self.before.get((group.key, index), 0))
        miss.attempts = attempt
        if attempt <= self.retries:
            miss.request = Request(group.key, group.size, index, attempt, reason)
            self.requests[group.key, index] = miss.request
            self.dirty = True

    def _withdraw(self, group: FailingGroup[S], index: int, miss: FailedIndex[S]) -> None:
        if miss.request is not None:
            miss.request = None
            del self.requests[group.key, index]
            self.dirty = True

    def _replace(self, miss: FailedIndex[S], report: S | None) -> None:
        if miss.report is not None:
            self._count(miss.report, -1)
            self.left.append(("failed", miss.report))
        if report is not None:
            self._count(report, 1)
        miss.report = report

    def _count(self, sample: S, sign: int) -> None:
        self.records += sign
        self.nbytes += sign * sample.nbytes

    # -- time -----------------------------------------------------------------------------------

    def publish(self, request: Request, now_s: float) -> None:
        """Begin the time of a request: from now on somebody can take it."""
        request.deadline_s = now_s + self.retry_timeout_s
        group = self.groups[request.key]
        assert group is not None
        self._schedule(group)

    def _touch(self, group: FailingGroup[S], now_s: float) -> None:
        group.touched_s = now_s
        self._schedule(group)

    def _deadline_s(self, group: FailingGroup[S]) -> float:
        due = [
            miss.request.deadline_s
            for miss in group.misses.values()
            if miss.request is not None and miss.request.deadline_s is not None
        ]
        if group.waits_for_rest:
            due.append(group.touched_s + self.retry_timeout_s)
        if self._group_timeout_s is not None and not group.overdue:
            due.append(group.born_s + self._group_timeout_s)
        return min(due, default=float("inf"))

    def _schedule(self, group: FailingGroup[S]) -> None:
        group.due_s = self._deadline_s(group)
        self._ticket += 1
        heapq.heappush(self._due, (group.due_s, self._ticket, group))

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next; None if never. A little early at times."""
        return self._due[0][0] if self._due and self._due[0][0] != float("inf") else None

    def expire(self, now_s: float) -> list[FailingGroup[S]]:
        """Count attempts whose time is over; return the groups whose own time is, to be ended."""
        over = []
        while self._due and self._due[0][0] <= now_s:
            due_s, _, group = heapq.heappop(self._due)
            if self.groups.get(group.key) is not group or group.due_s != due_s:
                continue  # it has ended since, or has another deadline
            if self._expire(group, now_s):
                over.append(group)
            else:
                self._schedule(group)
        return over

    def _expire(self, group: FailingGroup[S], now_s: float) -> bool:
        timeout_s = self._group_timeout_s
        if timeout_s is not None and not group.overdue and now_s >= group.born_s + timeout_s:
            self.miss_all(group, f"not there {timeout_s:g} s after the first of its group", now_s)
        for index, miss in list(group.misses.items()):
            request = miss.request
            if request is None or request.deadline_s is None or now_s < request.deadline_s:
                continue
            reason = f"not there {self.retry_timeout_s:g} s after it was asked for"
            self._fail(group, index, request.attempt, reason)
        return group.decided or (
            group.waits_for_rest and now_s >= group.touched_s + self.retry_timeout_s
        )

    def miss_all(self, group: FailingGroup[S], reason: str, now_s: float) -> None:
        """Take what is merely missing for failed, since the group's time is over."""
        group.overdue = True
        for index in range(group.size):
            if index not in group.came and index not in group.misses:
                group.misses[index] = FailedIndex()
                self._fail(group, index, 0, reason)
        self._touch(group, now_s)

    # -- ending ---------------------------------------------------------------------------------

    def end(self, group: FailingGroup[S]) -> None:
        """Forget a group: its samples and its reports are the caller's now."""
        del self.groups[group.key]
        for index, miss in group.misses.items():
            self._withdraw(group, index, miss)
            if miss.report is not None:
                self._count(miss.report, -1)
        for sample in group.came.values():
            self._count(sample, -1)

    def oldest(self) -> FailingGroup[S] | None:
        """Return the group that has waited longest."""
        groups = [group for group in self.groups.values() if group is not None]
        return min(groups, key=lambda group: group.born_s, default=None)

    def samples(self) -> list[S]:
        """Everything that is kept here, reports too."""
        found: list[S] = []
        for group in self.groups.values():
            if group is not None:
                found += group.samples
                found += group.reports
        return found


def _reason(report: Reported) -> str:
    try:
        return str(report.meta)[: limits.STATUS_REASON_BYTES]
    except ValueError:
        return "its reason cannot be read"
