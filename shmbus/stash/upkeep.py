"""What the reader of a bus does for it beside reading: the dead are swept, space is made.

It also frees what groups that are gone hold back: rows of the bound on the lead, and requests.

Invariant: a row or a request of a group is freed without its end only once all that was committed
before the check began has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

from shmbus import limits
from shmbus._keys import split_key
from shmbus.stash.requests import Requests
from shmbus_ext import _core

#: Stragglers are moved when less than this fraction of the extents is free ...
_EVACUATE_FREE_FRACTION = 0.125
#: ... from run to run, a share of so many records at once: at once again where a run was freed,
#: else after so many seconds.
_EVACUATE_RECORDS = 2048
_EVACUATE_INTERVAL_S = 0.05
#: Living producers that a sweep asks about where space is short, at that interval.
_SHORT_SWEEP = 64

#: Id, round, split and origin of a record that holds a run nearly alone.
Straggler: TypeAlias = "tuple[str, int | None, int, bytes]"
#: Finds the samples that stragglers may be.
Find: TypeAlias = "Callable[[list[Straggler]], list[_core.Trajectory]]"


class Lead:
    """The collector's side of the bound on the lead: frees rows that puts have claimed."""

    def __init__(self, segment: _core.Segment) -> None:
        self._segment = segment
        limit, _, _, max_versions, _ = _core.lead_state(segment)
        #: Whether the bus has a bound.
        self.bounded = limit > 0
        #: Whether it is one in policy versions, which needs to know what was trained.
        self.in_versions = max_versions >= 0
        #: Whether rows may be taken whose groups have gone, as after another collector's death.
        self._doubtful = self.bounded
        #: Rows that had no claimant when `begin_check` looked.
        self._settled: dict[int, int] | None = None

    def delivered(
        self, groups: list[_core.GroupEntry[_core.Trajectory]], leased_groups: int
    ) -> None:
        """Let others begin in the place of these groups."""
        for group in groups:
            sample = group.samples[0]
            _core.lead_leave(self._segment, *split_key(sample.key))
        self.follow(leased_groups)

    def follow(self, leased_groups: int, ended_groups: int = 0) -> None:
        """Let a bound in versions follow the policy version, and what was trained under it."""
        if self.in_versions:
            _core.lead_follow(self._segment, leased_groups, ended_groups)

    def doubt(self) -> None:
        """Check the table soon: samples were discarded, or a producer died."""
        self._doubtful = self.bounded

    def begin_check(self) -> None:
        """Note which rows are in doubt; what was committed for them is in the ring by now."""
        if self._doubtful and self._settled is None:
            self._settled = _core.lead_settled(self._segment)
            self._doubtful = False

    @property
    def checks(self) -> bool:
        """Whether a check has begun that `end_check` ends."""
        return self._settled is not None

    def end_check(self, present: Iterable[Hashable]) -> None:
        """Free rows in doubt, once the ring was read to its end."""
        settled, self._settled = self._settled, None
        if settled:
            kept = {_core.lead_key(self._segment, *split_key(key)) for key in present}
            for row, word in settled.items():
                if word not in kept:
                    _core.lead_free(self._segment, row, word)


class Upkeep:
    """Keeps a bus in order for its one reader."""

    def __init__(
        self,
        segment: _core.Segment,
        reader: _core.Reader,
        recent: dict[Hashable, int | None] | None = None,
    ) -> None:
        self._segment = segment
        self._reader = reader
        self.lead = Lead(segment)
        self.requests = Requests(segment, recent)
        #: Of attached producers, that this has reaped.
        self.deaths = 0
        self.next_sweep_s = 0.0
        self._swept_s = 0.0
        self.next_evacuation_s = 0.0
        self._attach_epoch = segment.attach_epoch

    def sweep(self, now: float) -> None:
        """Reap dead producers, unless a sweep of the last second has."""
        if now - self._swept_s >= limits.SWEEP_INTERVAL_S:
            self._swept_s = now
            self.deaths += self._reader.sweep()

    def sweep_all(self) -> None:
        """Reap all dead producers now."""
        self.deaths += self._reader.sweep(self._segment.max_producers)

    def run(self, now: float, find: Find, leased_groups: int) -> bool:
        """Sweep, and make space by moving what waits, each at its interval; True if it swept."""
        sweeps = now >= self.next_sweep_s
        if sweeps:
            self.next_sweep_s = now + limits.SWEEP_INTERVAL_S
            self.sweep(now)
            if self._segment.attach_epoch != self._attach_epoch:
                # Whoever died may have been reaped by another producer.
                self._attach_epoch = self._segment.attach_epoch
                self.doubt()
            self.lead.follow(leased_groups)
        if now >= self.next_evacuation_s:
            self.next_evacuation_s = now + _EVACUATE_INTERVAL_S
            self._free_space(find)
        return sweeps

    def _free_space(self, find: Find) -> None:
        """Free space: reuse empty runs, and move stragglers where space is short."""
        self._reader.tidy()
        few = self._segment.extent_count * _EVACUATE_FREE_FRACTION
        if self._segment.space_wanted() or self._segment.free_extents() < few:
            self.deaths += self._reader.sweep(_SHORT_SWEEP)
            stragglers = self._reader.stragglers(_EVACUATE_RECORDS)
            if stragglers and self._reader.evacuate(find(stragglers)):
                self.next_evacuation_s = 0.0

    # -- groups that are gone -------------------------------------------------------------------

    def doubt(self, keys: Iterable[Hashable] | None = None) -> None:
        """Check rows and requests soon: of groups that lost samples, or all after a death."""
        self.lead.doubt()
        self.requests.doubt(keys)

    def begin_checks(self) -> None:
        """Note what is in doubt, before a portion of the ring is read."""
        self.lead.begin_check()
        self.requests.begin_check()

    @property
    def checks(self) -> bool:
        """Whether a check has begun that `end_checks` ends."""
        return self.lead.checks or self.requests.checks

    def end_checks(
        self,
        waiting: Callable[[], Iterable[Hashable]],
        is_present: Callable[[Hashable], bool],
    ) -> None:
        """Free what is in doubt, once the ring was read to its end."""
        # `waiting` lists the keys of all groups that wait here, for rows of the bound on the lead,
        # which bounds that list; `is_present` says which requests go on.
        if self.requests.checks:
            # First: a request that has ended holds no place for its group.
            self.requests.end_check(is_present)
        if self.lead.checks:
            self.lead.end_check([*waiting(), *self.requests.handed_out()])
