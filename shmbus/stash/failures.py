"""Failing groups: retries of failed samples, and the end of hopeless groups.

A pure state machine beside the stash, with the pause of the request lane: time is an argument, and
the collector carries the requests to producers (`shmbus.stash.retries`).

A group with a failed sample is a failing group. It leaves the group table and is kept here. Each
failed sample is requested again, alone, up to a number of times. The group ends when each index is
received or finally failed: complete, or given up following the policy.

Invariants
----------
- Each index of a group is received, pending or failed (FailedIndex); a failed index is final or
  has an open retry request.
- A failing group always has a deadline: its requests' deadline, or the limit of the wait for its
  other samples. So a failure never makes a group wait for ever.
- A failed sample is requested again only after its backoff.
- A request whose answer is being committed at its deadline never goes to another producer.
- A failure during a pause of the request lane for like failures uses up no attempt of its sample,
  however often it comes. Neither does a failure the engine may have caused: no sample came since
  the retry request, and either as many prompts fail as pause the lane, or the lane holds untaken
  samples. At most `limits.ALIKE_FAILURES` such failures of a sample are excused.
- A failure read by an earlier collector uses up no attempt: its own effect is unknown.
- The report of a failure stays in the ring until its sample arrived or its group ended. So the
  next collector finds the failed samples and their numbers of failures.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from shmbus.base import limits
from shmbus.base.backoff import backoff_s
from shmbus_ext import _core
from shmbus_ext._core import GroupEntry

DiscardReason = Literal["failed", "duplicate", "size_mismatch"]


# -- the pause of the request lane -----------------------------------------------------------------
# An absent engine fails every sample in the same words, regardless of the prompt. So the lane
# closes, and probes: a single sample passes per interval, and the first success reopens the lane.
# Invariants: the lane pauses only after failures without a success between them, of several
# prompts, in the same words but for words with a digit; a prompt that cannot be sampled never
# pauses the lane alone. Failures read together with successes count for nothing: their order is
# unknown.


#: Words outside of a reason's meaning: numbers, addresses, ids.
_WITH_DIGIT: Final = re.compile(r"[\w.:-]*\d[\w.:-]*")


def words_of(reason: str) -> str:
    """Return the common words of like failures."""
    return _WITH_DIGIT.sub("#", reason)


class LanePause:
    """Follows successes and failures of samples requested through the lane."""

    def __init__(self, backoff: tuple[float, float]) -> None:
        self._backoff = backoff
        #: Attached producers; twice as many failures imply more than one each.
        self.workers = 0
        #: Reason of the lane's pause; None while the lane is open.
        self.reason: str | None = None
        #: True after a pause or an opening workers do not know yet.
        self.changed = False
        #: Time of the next probe during a pause.
        self.probe_due_s = 0.0
        #: Samples received since construction.
        self.successes = 0
        self._probes = 0
        self._accepted = 0
        self._mixed = False
        #: Common words of the last failures, their number, and some of their groups.
        self._alike = ""
        self._count = 0
        self._keys: set[Hashable] = set()
        #: Number of successes that ends the trial of a reopened lane.
        self._tried_at = 0

    @property
    def paused(self) -> bool:
        """True while samples pass one at a time."""
        return self.reason is not None

    def look(self, accepted: int) -> None:
        """Note the group table's count of accepted samples, before failures are told."""
        self._mixed = accepted != self._accepted
        if self._mixed:
            self.succeeded(accepted - self._accepted)
            self._accepted = accepted

    def succeeded(self, count: int = 1) -> None:
        """Note received samples: the lane opens, or stays open."""
        self.successes += count
        self._count = 0
        self._keys.clear()
        if self.reason is not None:
            self.reason = None
            self.changed = True
            self._tried_at = self.successes + limits.ALIKE_FAILURES

    def failed(self, key: Hashable, reason: str, now_s: float) -> None:
        """Note a group's sample reported as failed by a worker."""
        if self._mixed:
            return
        alike = words_of(reason)
        if alike != self._alike:
            self._alike, self._count = alike, 0
            self._keys.clear()
            self._tried_at = 0
        self._count += 1
        if len(self._keys) < limits.ALIKE_PROMPTS:
            self._keys.add(key)
        if self.reason is not None:
            return
        needed = max(limits.ALIKE_FAILURES, 2 * self.workers)
        if self.successes < self._tried_at:
            self._pause("a probe succeeded, and the next sample failed as before", reason, now_s)
        elif self._count >= needed and len(self._keys) >= limits.ALIKE_PROMPTS:
            self._pause(f"the last {self._count} samples all failed", reason, now_s)

    def _pause(self, what: str, reason: str, now_s: float) -> None:
        self.restore(f"{what}: {reason}; asked again one at a time", now_s)

    def restore(self, reason: str, now_s: float) -> None:
        """Pause, following an earlier collector or the failures."""
        self.reason = reason
        self.changed = True
        self.probe_due_s = now_s
        self._probes = 0

    def probe(self, now_s: float) -> None:
        """Note a probe: a sample passed."""
        self._probes += 1
        wait_s = backoff_s(self._backoff, self._probes, (self._probes, self._alike))
        self.probe_due_s = now_s + max(wait_s, limits.PROBE_S)


#: Samples and failure reports, or the heads of both.
Reported: TypeAlias = "_core.Trajectory | _core.OriginHead"
S = TypeVar("S", bound=Reported)

#: Most attempts a report may claim; a larger number means damage or forgery.
_MAX_ATTEMPTS = 1 << 20


class Request(msgspec.Struct, eq=False):
    """A retry request for one sample."""

    key: Hashable
    group_size: int
    #: Samples that complete the group; 0 if unknown.
    need: int
    index: int
    #: 1 for the first retry; 0 if the first attempt failed without the sample's fault.
    attempt: int
    reason: str
    #: Earliest time of publication.
    due_s: float
    #: True if the sample missed its group's deadline, and its first try may still run.
    late: bool = False
    #: None until publication to producers.
    deadline_s: float | None = None
    #: True if the last look at the deadline found a committed answer.
    answered: bool = False
    #: Samples received before publication to producers.
    successes: int | None = None


class FailedIndex(msgspec.Struct, Generic[S], eq=False):
    """An index whose sample failed, or missed its deadline."""

    #: Failed attempts, without the excused, and with them.
    attempts: int = 0
    failures: int = 0
    #: Samples received before its last failure.
    successes: int = 0
    #: True after a second failure in the same words despite other samples' successes: the sample
    #: itself may be at fault.
    suspect: bool = False
    reason: str = ""
    report: S | None = None
    #: True after a producer's report; False for a sample merely missing.
    reported: bool = False
    #: None once the failure becomes final.
    request: Request | None = None


class FailingGroup(msgspec.Struct, Generic[S], eq=False):
    """A group with a failed index. `size` is 0 while unknown."""

    key: Hashable
    size: int
    need: int
    born_s: float
    touched_s: float
    received: dict[int, S] = {}
    failed: dict[int, FailedIndex[S]] = {}
    #: True after the group's deadline: missing samples count as failed.
    overdue: bool = False
    due_s: float = 0.0

    @property
    def samples(self) -> list[S]:
        """The samples received, by index."""
        return [self.received[index] for index in sorted(self.received)]

    @property
    def reports(self) -> list[S]:
        """Its failure reports in the ring."""
        return [failed.report for failed in self.failed.values() if failed.report is not None]

    @property
    def reported(self) -> bool:
        """True if a sample reported by a producer finally failed."""
        return any(failed.reported and failed.request is None for failed in self.failed.values())

    @property
    def waits_for_rest(self) -> bool:
        """True without an open request: the group can no longer become complete."""
        return bool(self.failed) and all(failed.request is None for failed in self.failed.values())

    @property
    def complete(self) -> bool:
        """True with as many samples as needed."""
        return self.size > 0 and len(self.received) >= (self.need or self.size)

    @property
    def decided(self) -> bool:
        """True if complete, or if each index is received or finally failed."""
        final = sum(failed.request is None for failed in self.failed.values())
        return self.complete or (self.size > 0 and len(self.received) + final >= self.size)


class Failures(Generic[S]):
    """All failing groups of a stash."""

    def __init__(
        self,
        retries: int,
        retry_timeout_s: float,
        group_timeout_s: float | None,
        backoff: tuple[float, float],
        groups: dict[Hashable, FailingGroup[S] | None],
    ) -> None:
        self.retries = retries
        self.retry_timeout_s = retry_timeout_s
        self._group_timeout_s = group_timeout_s
        self._backoff = backoff
        self.lane = LanePause(backoff)
        #: Tells if a group was requested through the lane.
        self.in_lane: Callable[[Hashable], bool] = lambda key: False
        #: Tells if the lane holds untaken samples.
        self.has_open: Callable[[], bool] = lambda: False
        self.groups = groups
        #: Open requests by key and index, in order of creation.
        self.requests: dict[tuple[Hashable, int], Request] = {}
        #: Attempts requested by an earlier collector, by key and index.
        self.earlier_attempts: dict[tuple[Hashable, int], int] = {}
        #: True if `requests` changed since the last update of the retry table.
        self.dirty = False
        self.discarded: list[tuple[DiscardReason, S]] = []
        self.records = 0
        self.nbytes = 0
        #: Callback for every failed attempt: key, index and state.
        self.told: Callable[[Hashable, int, FailedIndex[S]], None] | None = None
        #: Takes a request back from producers; False after its answer, None during the answer's
        #: commit.
        self.take_back: Callable[[Request], bool | None] = lambda request: True
        self._due: list[tuple[float, int, FailingGroup[S]]] = []
        self._asks: list[tuple[float, int, Request]] = []
        #: Unpublished requests after their backoff, longest due first: without and in the lane.
        self._ready: tuple[OrderedDict[tuple[Hashable, int], Request], ...]
        self._ready = OrderedDict(), OrderedDict()
        self._ticket = 0

    @property
    def active(self) -> bool:
        """True while a group fails or the lane is paused: read samples need a look."""
        return bool(self.groups) or self.lane.paused or self.lane.changed

    # -- receiving and failing ------------------------------------------------------------------

    def begin(
        self, key: Hashable, size: int, need: int, samples: Iterable[S], born_s: float, now_s: float
    ) -> FailingGroup[S]:
        """Turn an incomplete group into a failing group."""
        group: FailingGroup[S] = FailingGroup(key, size, need, born_s, now_s)
        for sample in samples:
            group.received[sample.index] = sample
            self._count(sample, 1)
        self.groups[key] = group
        return group

    def begin_with(self, entry: GroupEntry[S], now_s: float) -> FailingGroup[S]:
        """Turn an entry taken from the group table into a failing group."""
        return self.begin(entry.key, entry.size, entry.need, entry.samples, entry.born_s, now_s)

    def add(self, group: FailingGroup[S], sample: S, now_s: float) -> None:
        """Add a sample to its group, or its failure report."""
        if sample.group_size and not group.size:
            group.size = sample.group_size
            for index in [index for index in group.failed if index >= group.size]:
                self._resolve(group, index)
        index = sample.index
        if sample.failed:
            self._add_report(group, sample, now_s)
        elif sample.group_size != group.size or group.need not in (0, sample.need):
            self.discarded.append(("size_mismatch", sample))
        elif index in group.received:
            self.discarded.append(("duplicate", sample))
        else:
            group.need = sample.need
            group.received[index] = sample
            self._count(sample, 1)
            self.lane.succeeded()
            self._resolve(group, index)
        self._touch(group, now_s)

    def _resolve(self, group: FailingGroup[S], index: int) -> None:
        """End a failure whose sample arrived, or whose index the group lacks."""
        failed = group.failed.pop(index, None)
        if failed is not None:
            self._withdraw(group, index, failed)
            self._replace(failed, None)

    def _add_report(self, group: FailingGroup[S], report: S, now_s: float) -> None:
        index = report.index
        sized = report.group_size in (0, group.size) and (not group.size or index < group.size)
        failed = group.failed.get(index)
        # A report is stale if another producer delivered the sample, or a later attempt failed.
        attempt = int(report.score) if 0 <= report.score <= _MAX_ATTEMPTS else 0
        late = failed is not None and attempt < failed.attempts
        if index in group.received or not sized or late:
            self.discarded.append(("failed", report))
            return
        if failed is None:
            failed = group.failed[index] = FailedIndex()
        failed.reported = True
        self._replace(failed, report)
        self._fail(group, index, attempt, _reason(report), now_s, reported=True)

    def fail(self, request: Request, reason: str, now_s: float) -> None:
        """Count an attempt without a report: its producer died, or its time is over."""
        group = self.groups.get(request.key)
        if group is None or self.requests.get((request.key, request.index)) is not request:
            return
        self._fail(group, request.index, request.attempt, reason, now_s)
        self._touch(group, now_s)

    def _fail(
        self,
        group: FailingGroup[S],
        index: int,
        attempt: int,
        reason: str,
        now_s: float,
        *,
        reported: bool = False,
        late: bool = False,
    ) -> None:
        """Count a failed attempt, 0 for the first, and request the next, if allowed."""
        failed = group.failed[index]
        in_lane, successes = self.in_lane(group.key), self.lane.successes
        alike = words_of(reason) == words_of(failed.reason)
        failed.suspect |= failed.failures > 0 and successes > failed.successes and alike
        asked = None if failed.request is None else failed.request.successes
        alone = successes == (failed.successes if asked is None else asked)
        if reported and in_lane and not failed.suspect:
            self.lane.failed(group.key, reason, now_s)
        excused = in_lane and (
            self.lane.paused
            or (attempt > 0 and not failed.failures)
            or (alone and self._may_be_engine(failed))
        )
        self._withdraw(group, index, failed)
        failed.reason = reason
        failed.successes = successes
        at = (group.key, index)
        attempt = max(attempt + (not excused), self.earlier_attempts.get(at, 0))
        failed.attempts = attempt
        failed.failures += 1
        if excused or attempt <= self.retries:
            due_s = now_s + backoff_s(self._backoff, failed.failures, (*at, failed.failures))
            failed.request = self.requests[at] = Request(
                group.key, group.size, group.need, index, attempt, reason, due_s, late=late
            )
            self._ticket += 1
            heapq.heappush(self._asks, (due_s, self._ticket, failed.request))
            self.dirty = True
        if self.told is not None:
            self.told(group.key, index, failed)

    def _may_be_engine(self, failed: FailedIndex[S]) -> bool:
        """Tell if the engine may have failed a sample, while no other sample comes."""
        if failed.suspect or failed.failures - failed.attempts >= limits.ALIKE_FAILURES:
            return False
        several = len(self.groups) >= limits.ALIKE_PROMPTS
        return failed.failures > 0 and (several or self.has_open())

    def _withdraw(self, group: FailingGroup[S], index: int, failed: FailedIndex[S]) -> None:
        if failed.request is not None:
            failed.request = None
            del self.requests[group.key, index]
            self._forget_ready((group.key, index))
            self.dirty = True

    def _replace(self, failed: FailedIndex[S], report: S | None) -> None:
        if failed.report is not None:
            self._count(failed.report, -1)
            self.discarded.append(("failed", failed.report))
        if report is not None:
            self._count(report, 1)
        failed.report = report

    def _count(self, sample: S, sign: int) -> None:
        self.records += sign
        self.nbytes += sign * sample.nbytes

    # -- time -----------------------------------------------------------------------------------

    def publish(self, request: Request, now_s: float) -> None:
        """Start the timeout of a request: from now on producers can take it."""
        request.deadline_s = now_s + self.retry_timeout_s
        request.successes = self.lane.successes
        self._forget_ready((request.key, request.index))
        group = self.groups[request.key]
        assert group is not None
        self._schedule(group)

    def take_ready(self) -> Request | None:
        """Take the longest due request that the lane's pause does not hold."""
        for ready in self._ready[: 1 if self.lane.paused else 2]:
            if ready:
                return ready.popitem(last=False)[1]
        return None

    def next_probe(self) -> Request | None:
        """Return the lane's unpublished request with the earliest due time."""
        if self._ready[1]:
            return next(iter(self._ready[1].values()))
        waiting = (
            request
            for request in self.requests.values()
            if request.deadline_s is None and self.in_lane(request.key)
        )
        return min(waiting, key=lambda request: request.due_s, default=None)

    def put_back(self, request: Request) -> None:
        """Put a request first in line for publication, again or after all."""
        request.deadline_s = None
        ready, at = self._ready[self.in_lane(request.key)], (request.key, request.index)
        ready[at] = request
        ready.move_to_end(at, last=False)

    def _forget_ready(self, at: tuple[Hashable, int]) -> None:
        for ready in self._ready:
            ready.pop(at, None)

    def _touch(self, group: FailingGroup[S], now_s: float) -> None:
        group.touched_s = now_s
        self._schedule(group)

    def _deadline_s(self, group: FailingGroup[S]) -> float:
        due = [
            failed.request.deadline_s
            for failed in group.failed.values()
            if failed.request is not None and failed.request.deadline_s is not None
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
        """Time of the next needed `expire` or `look_for_due`; None if never. It may be early."""
        dues = [each[0][0] for each in (self._due, self._asks) if each]
        if self.lane.paused:
            dues.append(self.lane.probe_due_s)
        due_s = min(dues, default=float("inf"))
        return None if due_s == float("inf") else due_s

    def look_for_due(self, now_s: float) -> None:
        """Note due requests, and a due probe."""
        while self._asks and self._asks[0][0] <= now_s:
            _, _, request = heapq.heappop(self._asks)
            at = (request.key, request.index)
            if self.requests.get(at) is request and request.deadline_s is None:
                self._ready[self.in_lane(request.key)][at] = request
                self.dirty = True
        if self.lane.paused and now_s >= self.lane.probe_due_s:
            self.dirty = True

    def expire(self, now_s: float, most: float = math.inf) -> list[FailingGroup[S]]:
        """Fail overdue requests, of `most` groups; return the groups that must end."""
        self.look_for_due(now_s)
        over = []
        while self._due and self._due[0][0] <= now_s and most > 0:
            due_s, _, group = heapq.heappop(self._due)
            if self.groups.get(group.key) is not group or group.due_s != due_s:
                continue  # the group ended, or got another deadline
            most -= 1
            if self._expire(group, now_s):
                over.append(group)
            else:
                self._schedule(group)
        return over

    def _expire(self, group: FailingGroup[S], now_s: float) -> bool:
        timeout_s = self._group_timeout_s
        if timeout_s is not None and not group.overdue and now_s >= group.born_s + timeout_s:
            reason = f"not there {timeout_s:g} s after the first of its group"
            self.fail_missing(group, reason, now_s)
        for index, failed in list(group.failed.items()):
            request = failed.request
            if request is None or request.deadline_s is None or now_s < request.deadline_s:
                continue
            # The last look came before the newest full read of the ring. An answer committed by
            # that look, and missing here, was discarded.
            before, taken = request.answered, self.take_back(request)
            if taken is None or (taken is False and not before):
                request.answered = taken is False
                request.deadline_s = now_s + self.retry_timeout_s
                continue
            reason = f"not there {self.retry_timeout_s:g} s after it was asked for"
            self._fail(group, index, request.attempt, reason, now_s)
        return group.decided or (
            group.waits_for_rest and now_s >= group.touched_s + self.retry_timeout_s
        )

    def fail_missing(self, group: FailingGroup[S], reason: str, now_s: float) -> None:
        """Count missing samples as failed after the group's deadline."""
        group.overdue = True
        self.fail_samples(group, range(group.size), reason, now_s, late=True)

    def fail_samples(
        self,
        group: FailingGroup[S],
        indexes: Iterable[int],
        reason: str,
        now_s: float,
        *,
        late: bool = False,
    ) -> None:
        """Count the given samples as failed if missing."""
        for index in indexes:
            if index not in group.received and index not in group.failed:
                group.failed[index] = FailedIndex()
                self._fail(group, index, 0, reason, now_s, late=late)
        self._touch(group, now_s)

    # -- ending ---------------------------------------------------------------------------------

    def end(self, group: FailingGroup[S]) -> None:
        """Forget a group: the caller takes its samples and reports."""
        del self.groups[group.key]
        for index, failed in group.failed.items():
            self._withdraw(group, index, failed)
            if failed.report is not None:
                self._count(failed.report, -1)
        for sample in group.received.values():
            self._count(sample, -1)

    def oldest(self) -> FailingGroup[S] | None:
        """Return the failing group with the longest wait."""
        groups = [group for group in self.groups.values() if group is not None]
        return min(groups, key=lambda group: group.born_s, default=None)

    def samples(self) -> list[S]:
        """Return all samples and reports of failing groups."""
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
