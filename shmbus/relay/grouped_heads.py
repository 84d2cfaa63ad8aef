"""Heads of all sources in one stash: how they come, leave again, and what of a group crosses.

Invariant: `known` has each head that is in the stash, under lease or not, and no other one.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Hashable, Iterable

from shmbus._keys import split_key
from shmbus.relay.messages import MissingSample
from shmbus.relay.origin_head import OriginHead
from shmbus.relay.origins import Origin
from shmbus.stash.failures import FailingGroup
from shmbus.stash.stash import Stash, StashPolicy
from shmbus_ext._core import GroupEntry

__all__ = ["GroupedHeads", "find_missing"]

#: What a trainer is told of a sample that never came.
_NOT_COMING = "not there when the time of its group was over"

_NBYTES = operator.attrgetter("nbytes")
#: More groups than any stash has.
_ALL = 1 << 30


class GroupedHeads:
    """A stash of heads.

    Parameters
    ----------
    policy : StashPolicy, optional
        What happens to groups that are late, stale, useless, failed or too many.
    """

    def __init__(self, policy: StashPolicy | None = None) -> None:
        self.stash: Stash[OriginHead] = Stash(policy)
        #: Heads in the stash, those under lease too.
        self.known: dict[Origin, OriginHead] = {}
        #: Of each bus, the clock of its machine minus this one's, for comparing heads.
        self.clocks_ns: dict[str, int] = {}

    def _withdraw(self, gone: Iterable[Origin], now_s: float) -> None:
        """Take heads out of groups that are not placed; what is left of those waits again."""
        lost = {origin: self.known.pop(origin) for origin in gone}
        if not lost:
            return
        table = self.stash.table
        rest: list[OriginHead] = []
        for key in {head.key for head in lost.values()}:
            entry = table.take(key)
            if entry is not None:
                rest += [sample for sample in entry.samples if sample.origin not in lost]
            failing = self.stash.failures.groups.get(key)
            if failing is not None:
                rest += self._take_failing(failing, lost)
        # In reverse, since what is given back comes first again.
        for group in reversed(table.lease(_ALL)):
            samples = [*group.samples, *self.stash.reports.get(group, ())]
            if any(sample.origin in lost for sample in samples):
                table.end_lease(group)
                self.stash.reports.pop(group, None)
                rest += [sample for sample in samples if sample.origin not in lost]
            else:
                table.give_back(group)
        self._regroup(rest, now_s)

    def _take_failing(
        self, group: FailingGroup[OriginHead], lost: Container[Origin]
    ) -> list[OriginHead]:
        """Take a failing group apart; how often its samples were asked for is remembered."""
        failures = self.stash.failures
        for index, failed in group.failed.items():
            failures.earlier_attempts[group.key, index] = failed.attempts
        samples = [*group.samples, *group.reports]
        failures.end(group)
        return [sample for sample in samples if sample.origin not in lost]

    def _regroup(self, samples: list[OriginHead], now_s: float) -> None:
        """Group samples again, whose group was complete before and was not delivered."""
        for key in {sample.key for sample in samples}:
            self.stash.table.recent.pop(key, None)
        # A report after the samples beside it: it makes of an open group a failing one.
        self.stash.add(sorted(samples, key=lambda sample: sample.failed), now_s)
        self.stash.failures.earlier_attempts.clear()

    def _fail_lost(self, samples: Iterable[OriginHead], now_s: float) -> None:
        """Have samples that went with their bus asked for elsewhere, where the policy retries."""
        if not self.stash.policy.sample_retries:
            return
        by_key: dict[Hashable, list[OriginHead]] = {}
        for sample in samples:
            by_key.setdefault(sample.key, []).append(sample)
        for lost in by_key.values():
            self.stash.fail_lost(lost, "the bus that had it has gone", now_s)

    def _records(self, group: GroupEntry[OriginHead]) -> list[OriginHead]:
        """Return what of a group crosses: its samples, and reports of those that failed for good.

        They go together, so that no part of it is ever left behind alone.
        """
        reports = self.stash.reports.get(group) if self.stash.reports else None
        return [*group.samples, *reports] if reports else group.samples

    def _weight(self, group: GroupEntry[OriginHead]) -> int:
        return sum(map(_NBYTES, self._records(group)))


def find_missing(
    group: GroupEntry[OriginHead], records: Iterable[OriginHead]
) -> tuple[MissingSample, ...]:
    """Return samples that a group goes without, and of which no record says that they failed."""
    id_, round, _ = split_key(group.key)
    there = {sample.index for sample in records}
    return tuple(
        MissingSample(id_, round, group.size, group.need, index, 0, _NOT_COMING)
        for index in range(group.size)
        if index not in there
    )
