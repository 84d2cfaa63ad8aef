"""The collector's side of the bound on how far producers are ahead.

The admission table lies in the segment: a put that begins a group claims a row, and the collector
frees it when the group is delivered. This file does the latter, and finds rows that nobody will
free.

Invariants
----------
- A group that is delivered has no row any more, so that the next group may begin.
- A row is freed without a delivery only if its group was not on the bus after everything that was
  committed before has been read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from shmbus._keys import split_key
from shmbus_ext import _core

__all__ = ["Lead"]


class Lead:
    """Frees the rows of groups that were delivered, or have ended."""

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
