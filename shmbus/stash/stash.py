"""The stash: interleaved samples in, complete groups out. A pure state machine.

No clock, no lock, no socket, no payload: time and the policy version are arguments. A sample is
an object with ``key``, ``group_size``, ``need``, ``index`` (and ``score``, ``policy_version``,
``nbytes`` if a policy asks for them). A table in C (`_core.GroupTable`), made for a million open
groups, finds the place of a sample in its group, and keeps the complete groups of each split in
their order. The decisions are made here.

Invariants
----------
- A sample is in exactly one place: an open group, a ready group, a leased group, or `discards`.
- A complete group has left the open groups. An overdue group leaves them at `expire`, the oldest
  first.
- A complete group stays whole: no part of it is ever delivered or discarded alone.
- A group leased incomplete by an earlier collector contains the same samples again, regardless of
  later arrivals.

Ambiguous samples
-----------------
- A key is an instance id, or (instance id, round) if producers give rounds; the split is a part
  of it. After its group's completion, the next sample of a key begins a new group. A sample with a
  round is surplus instead, unless its prompt was offered again after that group's end.
- A group is complete with `need` different indices, which may be fewer than group_size.
- Of two samples with the same index the first is kept. A sample whose group_size or need differs
  from its open group's is discarded, and the group is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Generic, Literal

import msgspec

from shmbus import errors
from shmbus.base import limits
from shmbus.batch.scores import are_equal
from shmbus.data.keys import has_round, split_of
from shmbus.stash.failures import FailingGroup, Failures, Reported, Request, S
from shmbus_ext import _core
from shmbus_ext._core import (
    REFUSED_DUPLICATE,
    REFUSED_FAILING,
    REFUSED_GROUP_SIZE,
    REFUSED_LEASED,
    REFUSED_SURPLUS,
    SPLIT_TRAIN,
    GroupEntry,
    GroupTable,
)

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


#: Keys of completed groups to remember, if producers give rounds, for recognising surplus
#: samples: some MiB of keys, and many steps' worth of groups.
RECENT_KEYS = 65_536

_REFUSALS: dict[int, Reason] = {
    REFUSED_DUPLICATE: "duplicate",
    REFUSED_GROUP_SIZE: "size_mismatch",
    REFUSED_SURPLUS: "surplus",
}


class StashPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Policies for late, stale, useless and excess groups."""

    #: Seconds that a group may stay incomplete; None for ever.
    group_timeout_s: float | None = limits.GROUP_TIMEOUT_S
    #: Keep the group, discard it, or deliver its present samples.
    on_timeout: Literal["wait", "drop", "partial"] = "drop"
    #: A group is stale if its oldest sample lags more than this many versions behind. Only for the
    #: split "train", like `skip_zero_variance`: other splits train nothing.
    max_policy_lag: int | None = None
    #: Discard complete groups of equal scores: they give no gradient.
    skip_zero_variance: bool = False
    #: Ring bytes that incomplete groups may hold.
    max_stash_bytes: int | None = None
    #: Action on the oldest incomplete groups above that bound.
    on_overflow: Literal["wait", "drop", "partial"] = "wait"
    #: Retry requests for a sample failed, or missing at its group's deadline.
    sample_retries: int = 0
    #: Seconds that a request may stay unanswered, and that a group with a finally failed sample
    #: waits for its remaining samples.
    retry_timeout_s: float = limits.RETRY_TIMEOUT_S
    #: Seconds before a failed sample is requested again: first and maximum.
    retry_backoff_s: tuple[float, float] = limits.RETRY_BACKOFF_S
    #: Action on a group with a finally failed sample, once its remaining samples arrived.
    on_failure: Literal["drop", "partial"] = "drop"


class Discard(msgspec.Struct, Generic[S], eq=False):
    """Samples that leave without acknowledgement."""

    reason: Reason
    key: Hashable
    samples: list[S]
    #: Obsolete failure reports, without further cost to their group.
    superseded: bool = False


class Stash(Generic[S]):
    """Groups samples by key and hands out complete groups under lease."""

    def __init__(self, policy: StashPolicy | None = None) -> None:
        policy = self.policy = policy or StashPolicy()
        self.discards: list[Discard[S]] = []
        self.timeouts = 0
        self.overflows = 0
        self.given_up = 0
        #: Groups of the split "train" discarded whole; the counting caller resets the number.
        self.useless = 0
        #: Failure reports of groups delivered without the failed samples.
        self.reports: dict[GroupEntry[S], list[S]] = {}
        #: Tells if an ended group was requested again.
        self.offered_again: Callable[[Hashable], bool] = lambda key: False
        #: Members of groups leased incomplete by an earlier collector, by key and their records'
        #: note of that lease; until all members of a group arrive.
        self.inherited: dict[tuple[Hashable, int], list[S]] = {}
        self._limit = self.policy.max_stash_bytes
        #: A caller that puts samples straight into the table passes the result of `put` to
        #: `apply_policy`.
        self.table: GroupTable[S] = GroupTable(
            count_bytes=self._limit is not None, judged=self.policy.skip_zero_variance
        )
        self.failures: Failures[S] = Failures(
            policy.sample_retries,
            policy.retry_timeout_s,
            None if policy.on_timeout == "wait" else policy.group_timeout_s,
            policy.retry_backoff_s,
            self.table.failing,
        )

    def add(self, samples: Iterable[S], now_s: float) -> None:
        """Add samples. Costs O(1) each, regardless of the number of open groups."""
        self.apply_policy(self.table.put(samples, now_s), now_s)

    def apply_policy(self, undecided: list[GroupEntry[S] | tuple[int, S]], now_s: float) -> None:
        """Decide on samples the table refused, and on complete groups that need a decision."""
        if undecided:
            self.failures.lane.look(self.table.accepted)
        for each in undecided:
            if isinstance(each, tuple):
                why, sample = each
                if why == REFUSED_FAILING:
                    self._add_to_failing(sample, now_s)
                elif why == REFUSED_LEASED:
                    self._inherit(sample, now_s)
                elif why == REFUSED_SURPLUS and not self._had(sample.key):
                    undecided += self.table.put([sample], now_s)
                else:
                    self.discards.append(Discard(_REFUSALS[why], sample.key, [sample]))
            elif _scores_equal(each.samples):
                self._discard_group("zero_variance", each.key, each.samples)
            else:
                self.table.push(each)
        recent = self.table.recent
        while len(recent) > RECENT_KEYS:
            del recent[next(iter(recent))]
        if self._limit is not None:
            self._overflow(self._limit, now_s)

    # -- groups of an earlier collector ---------------------------------------------------------

    def _inherit(self, sample: S, now_s: float) -> None:
        state, wanted = _core.leased_state(sample)
        lease = sample.key, state
        members = self.inherited.setdefault(lease, [])
        members.append(sample)
        if len(members) == wanted:
            del self.inherited[lease]
            self._make_again(sorted(members, key=lambda each: each.index), now_s)
        self._note_failing()

    def _make_again(self, members: list[S], now_s: float) -> None:
        """Restore a group as leased before; further samples came too late."""
        key = members[0].key
        entry = self.table.gather(members, now_s)
        failing = self.failures.groups.get(key)
        if failing is not None and (has_round(key) or not failing.received):
            self.failures.end(failing)
            self._discard("surplus", key, failing.samples)
            if failing.reports:
                self.reports[entry] = failing.reports
        if has_round(key):
            open_one = self.table.take(key)
            if open_one is not None:
                self._discard("surplus", key, open_one.samples)
            for late in self.table.full(key):
                self.table.remove(late)
                self._discard("surplus", key, late.samples)
        self.note_complete(key)
        self._cancel(key)
        self.table.push(entry)

    def settle_inherited(self, now_s: float) -> None:
        """Treat incomplete leases' samples as ordinary, after a read of all earlier commits."""
        # Their collector died while noting the lease, so the group reached no trainer.
        inherited, self.inherited = self.inherited, {}
        for members in inherited.values():
            _core.forget_leased(members)
            self.add(members, now_s)
        self._note_failing()

    def note_complete(self, key: Hashable) -> None:
        """Note a group completed elsewhere: with a round, later samples become surplus."""
        if has_round(key):
            self.table.recent[key] = None

    def _had(self, key: Hashable) -> bool:
        """Tell if a key's group was complete before, and must not be made again."""
        recent = self.table.recent
        if key in recent and self.offered_again(key):
            del recent[key]
        return key in recent

    def _take_oldest(self) -> GroupEntry[S]:
        [copy] = self.table.oldest(1)
        entry = self.table.take(copy.key)
        assert entry is not None
        return entry

    def _end_oldest(self, policy: str, reason: Reason, now_s: float) -> None:
        """End the oldest incomplete group: discard it, or deliver it incomplete."""
        failing = self.failures.oldest()
        born_s = self.table.oldest_born_s
        if failing is not None and (born_s is None or failing.born_s < born_s):
            self._end_failing(failing, now_s, policy, reason)
            return
        self._end_entry(self._take_oldest(), policy, reason)

    def _end_entry(self, group: GroupEntry[S], policy: str, reason: Reason) -> None:
        self._cancel(group.key)
        if policy == "partial":
            self.table.push(group)
        else:
            self._discard_group(reason, group.key, group.samples)

    def _cancel(self, key: Hashable) -> None:
        """Have producers told that this group needs no more samples."""
        if has_round(key):
            self.table.cancelled.append(key)

    def _overflow(self, limit: int, now_s: float) -> None:
        if self.table.nbytes + self.failures.nbytes <= limit:
            return
        self.overflows += 1
        policy = self.policy.on_overflow
        while policy != "wait" and self.table.nbytes + self.failures.nbytes > limit:
            self._end_oldest(policy, "overflow", now_s)

    def take_out(self, samples: Iterable[S]) -> list[S]:
        """Take waiting samples out; return their groups' remaining samples, to be added again."""
        out = {id(sample) for sample in samples}
        rest: list[S] = []
        for key in {sample.key for sample in samples}:
            entry = self.table.take(key)
            rest += [] if entry is None else entry.samples
            failing = self.failures.groups.get(key)
            if failing is not None:
                self.failures.end(failing)
                rest += failing.samples + failing.reports
            for ready in self.table.full(key):
                if not self.table.is_leased(ready) and any(
                    id(each) in out for each in ready.samples
                ):
                    self.table.remove(ready)
                    rest += ready.samples + self.reports.pop(ready, [])
            for lease in [each for each in self.inherited if each[0] == key]:
                rest += self.inherited.pop(lease)
        _core.forget_leased(rest)
        self._note_failing()
        return [sample for sample in rest if id(sample) not in out]

    # -- failures -------------------------------------------------------------------------------

    def _add_to_failing(self, sample: S, now_s: float) -> None:
        """Add a sample of a failing group, or the report of a failure, which makes a group fail."""
        failures, key = self.failures, sample.key
        group = failures.groups.get(key)
        if group is None:
            failures.groups.pop(key, None)
            if not sample.failed:
                # Its group ended after the table refused the sample, which begins the next group.
                self.add((sample,), now_s)
                return
            entry = self.table.take(key)
            if entry is not None:
                group = self.failures.begin_with(entry, now_s)
            elif not self._is_late(sample):
                group = failures.begin(key, sample.group_size, 0, (), now_s, now_s)
            else:
                self.discards.append(Discard("failed", key, [sample], superseded=True))
                return
        failures.add(group, sample, now_s)
        self._apply_failures(group, now_s)

    def _is_late(self, report: S) -> bool:
        """Tell if the report predates its sample, which lies in a complete group."""
        return self._had(report.key) or any(
            sample.index == report.index and sample.committed_ns >= report.committed_ns
            for group in self.table.full(report.key)
            for sample in group.samples
        )

    def _apply_failures(self, group: FailingGroup[S], now_s: float) -> None:
        discarded, self.failures.discarded = self.failures.discarded, []
        for reason, sample in discarded:
            superseded = reason == "failed"
            self.discards.append(Discard(reason, sample.key, [sample], superseded=superseded))
        self._note_failing()
        if group.decided:
            self._end_failing(group, now_s)

    def _end_failing(
        self, group: FailingGroup[S], now_s: float, policy: str = "", reason: Reason = "failed"
    ) -> None:
        """End a failing group, complete or given up."""
        key, samples, reports = group.key, group.samples, group.reports
        reported = group.reported
        self.failures.end(group)
        if group.complete:
            if reports:  # of unneeded samples
                self.discards.append(Discard("failed", key, reports, superseded=True))
            self._note_failing()
            self.add(samples, now_s)
            return
        if not policy:
            policy = self.policy.on_failure if reported else self.policy.on_timeout
            reason = "failed" if reported else "timeout"
        self.given_up += reason == "failed"
        self.timeouts += reason == "timeout"
        self.failures.dirty = True
        if policy == "partial" and samples:
            self.table.put(samples, now_s)
            entry = self.table.take(key)
            assert entry is not None
            self.table.push(entry)
            if reports:
                self.reports[entry] = reports
        elif reason == "failed":
            self._discard_group(reason, key, samples + reports)
        else:
            self._discard_group(reason, key, samples)
            self._discard("failed", key, reports)
        if has_round(key):
            # If the group was not requested on this bus, a later request begins it anew.
            self.table.recent[key] = None if self.failures.in_lane(key) else 0
        self._cancel(key)
        self._note_failing()

    def _note_failing(self) -> None:
        """Tell the table of groups kept outside of it, for messages of other processes."""
        kept = sum(map(len, (*self.reports.values(), *self.inherited.values())))
        self.table.failing_cells = self.failures.records + kept

    def _discard(self, reason: Reason, key: Hashable, samples: list[S]) -> None:
        if samples:
            self.discards.append(Discard(reason, key, samples))

    def _discard_group(self, reason: Reason, key: Hashable, samples: list[S]) -> None:
        self.useless += split_of(key) == SPLIT_TRAIN
        self._discard(reason, key, samples)

    def fail_request(self, request: Request, reason: str, now_s: float) -> None:
        """Fail a request of a dead producer, or an overdue request."""
        group = self.failures.groups.get(request.key)
        self.failures.fail(request, reason, now_s)
        if group is not None:
            self._apply_failures(group, now_s)

    def fail_lost(self, lost: Sequence[S], reason: str, now_s: float) -> None:
        """Count samples of a group, lost with their bus, as failed."""
        first = lost[0]
        group = self.failures.groups.get(first.key)
        if group is None:
            if (entry := self.table.take(first.key)) is None:
                size, need = first.group_size, first.need
                group = self.failures.begin(first.key, size, need, (), now_s, now_s)
            else:
                group = self.failures.begin_with(entry, now_s)
        self.failures.fail_samples(group, [sample.index for sample in lost], reason, now_s)
        self._apply_failures(group, now_s)

    # -- time -----------------------------------------------------------------------------------

    def expire(self, now_s: float, most: float = math.inf) -> None:
        """End overdue incomplete groups, `most` of them, following the policy."""
        # With retries, their missing samples are requested instead.
        while (deadline_s := self._open_deadline_s()) is not None and now_s >= deadline_s:
            if most <= 0:
                return
            most -= 1
            if self.policy.sample_retries:
                entry = self._take_oldest()
                group = self.failures.begin_with(entry, now_s)
                waited = f"not there {now_s - entry.born_s:.3g} s after the first of its group"
                self.failures.fail_missing(group, waited, now_s)
                self._note_failing()
            else:
                self.timeouts += 1
                self._end_entry(self._take_oldest(), self.policy.on_timeout, "timeout")

    def expire_failing(self, now_s: float, most: float = math.inf) -> None:
        """End overdue failing groups and their requests, after a full read of the ring."""
        for group in self.failures.expire(now_s, most):
            # Ending a group may overflow the stash, which may have ended another.
            if self.failures.groups.get(group.key) is group:
                self._end_failing(group, now_s)

    def follow_lane(self, now_s: float) -> None:
        """Open the request lane after a received sample, and note due requests."""
        lane = self.failures.lane
        lane.look(self.table.accepted)
        if lane.changed:
            lane.changed = False
            self.failures.dirty = True
        self.failures.look_for_due(now_s)

    def next_deadline_s(self) -> float | None:
        """Time of the next `expire` or `expire_failing`, on the caller's clock; None if never."""
        dues = (self._open_deadline_s(), self.failures.next_deadline_s())
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def _open_deadline_s(self) -> float | None:
        timeout_s = self.policy.group_timeout_s
        if timeout_s is None or self.policy.on_timeout == "wait":
            return None
        born_s = self.table.oldest_born_s
        return None if born_s is None else born_s + timeout_s

    def lease(
        self, max_groups: int, policy_version: int = 0, split: int = SPLIT_TRAIN
    ) -> list[GroupEntry[S]]:
        """Hand out ready groups of a split, in the order of completion."""
        # Stale groups of the split "train" are discarded instead.
        if self.policy.max_policy_lag is None or split != SPLIT_TRAIN:
            return self.table.lease(max_groups, split)
        fresh: list[GroupEntry[S]] = []
        while len(fresh) < max_groups and (leased := self.table.lease(max_groups - len(fresh))):
            for group in leased:
                if self.is_stale(group.samples, policy_version):
                    self.discard_leased("stale", group)
                else:
                    fresh.append(group)
        return fresh

    def is_stale(self, samples: Iterable[S], policy_version: int) -> bool:
        """Tell if a group of these samples is too old for the policy."""
        lag = self.policy.max_policy_lag
        if lag is None:
            return False
        return any(sample.policy_version < policy_version - lag for sample in samples)

    def discard_leased(self, reason: Reason, group: GroupEntry[S]) -> None:
        """End a lease by discarding the group."""
        self._discard_group(reason, group.key, group.samples)
        self.end_lease(group)

    def discard(self, reason: Reason, samples: list[S]) -> None:
        """Discard a group that never entered the stash."""
        self._discard_group(reason, samples[0].key, samples)

    def end_lease(self, group: GroupEntry[S]) -> None:
        """Forget a leased group after its acknowledgement or drop."""
        self.table.remove(group)
        self.end_reports(group)

    def end_reports(self, group: GroupEntry[S]) -> None:
        """Discard the failure reports of a group whose lease ended."""
        if self.reports:
            self._discard("failed", group.key, self.reports.pop(group, []))
            self._note_failing()

    def has(self, key: Hashable) -> bool:
        """Tell if the stash holds a waiting or leased sample or report of the group."""
        return self.waits(key) or bool(self.table.full(key))

    def waits(self, key: Hashable) -> bool:
        """Tell if the stash holds an unleased sample or report of the group."""
        failing = self.failures.groups.get(key)
        return (
            self.table.find(key) is not None
            or (failing is not None and bool(failing.received or failing.reports))
            or not all(map(self.table.is_leased, self.table.full(key)))
            or any(key == lease_key for lease_key, _ in self.inherited)
        )

    def take_discards(self) -> list[Discard[S]]:
        """Return the discards and forget them."""
        discards, self.discards = self.discards, []
        return discards

    def oldest(self, count: int) -> list[GroupEntry[S] | FailingGroup[S]]:
        """Return the incomplete groups with the longest waits, oldest first."""
        # Copies, except for failing groups.
        found: list[GroupEntry[S] | FailingGroup[S]] = [*self.table.oldest(count)]
        found += [group for group in self.failures.groups.values() if group is not None]
        return sorted(found, key=lambda group: group.born_s)[:count]

    def waiting_samples(self) -> list[S]:
        """Return every unleased sample: of open, ready and failing groups, in order."""
        found = self.table.samples() + self.failures.samples()
        for rest in (*self.reports.values(), *self.inherited.values()):
            found += rest
        return found

    def waiting_of(self, keys: Set[Hashable]) -> list[S]:
        """Return the samples of some incomplete groups; complete groups leave in their turn."""
        found: list[S] = []
        for key in keys:
            entry, failing = self.table.find(key), self.failures.groups.get(key)
            found += [] if entry is None else entry.samples
            found += [] if failing is None else failing.samples + failing.reports
        for (key, _), members in self.inherited.items():
            found += members if key in keys else []
        return found

    @property
    def open_groups(self) -> int:
        """Incomplete groups."""
        return len(self.table) + len(self.failures.groups)

    @property
    def open_records(self) -> int:
        """Their samples, and reports of failures."""
        return self.table.cells + self.table.failing_cells


def _scores_equal(samples: Sequence[Reported]) -> bool:
    try:
        scores = [sample.score for sample in samples]
        return bool(are_equal(min(scores), max(scores)))
    except errors.UnscoredError:
        return False  # unknown yet
