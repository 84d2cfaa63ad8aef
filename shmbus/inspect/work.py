"""Who makes which sample now, and how long whom has waited, from a segment's file.

Invariants:

- A sample counts as begun where its producer says so: by `Producer.begin`, or by having its request
  in hand. Nothing is guessed here.
- A sample that is there, failed or asked for again is that, whatever else is said of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from shmbus.inspect.request_lane import read_claims
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.view_types import GroupCells, SampleCell, WaitedStatus
from shmbus_ext import _core

__all__ = ["read_waited", "with_begun"]

_SECOND: Final = 1e9


def with_begun(file: SegmentFile, groups: Sequence[GroupCells]) -> list[GroupCells]:
    """Add who has begun the missing samples of groups."""
    begun = _noted(file, groups)
    for at, cells in enumerate(read_claims(file, groups)):
        begun[at] = {**{index: (producer, None) for index, producer in cells}, **begun[at]}
    return [_joined(group, found) for group, found in zip(groups, begun, strict=True)]


#: By index: who has begun it, and seconds since, where that is known.
_Begun = dict[int, tuple[int, "float | None"]]


def _noted(file: SegmentFile, groups: Sequence[GroupCells]) -> list[_Begun]:
    """Read what producers noted by `begin`."""
    found: list[_Begun] = [{} for _ in groups]
    if not groups:
        return found
    rows = file.begun().tolist()
    if not rows:
        return found
    labels = {file.split_label(number): number for number in range(_core.MAX_SPLITS)}
    at_key = {
        _core.begun_key(group.instance_id, group.round, labels.get(group.split, 0)): at
        for at, group in enumerate(groups)
    }
    now_ns = _core.monotonic_ns()
    for owner, key, begun_ns, index in rows:
        at = at_key.get(key)
        if at is not None:
            found[at][index] = owner >> 1, max(0.0, (now_ns - begun_ns) / _SECOND)
    return found


def _joined(group: GroupCells, begun: _Begun) -> GroupCells:
    # Of a group that is not shown whole, a sample without a cell may be there.
    if not begun or group.cells_omitted:
        return group
    known = {cell.index for cell in group.cells}
    more = [
        SampleCell(index=index, state="begun", producer=producer, age_s=age_s)
        for index, (producer, age_s) in begun.items()
        if index not in known and (not group.size or index < group.size)
    ]
    if not more:
        return group
    cells = sorted([*group.cells, *more], key=lambda cell: cell.index)
    return msgspec.structs.replace(group, cells=cells)


def read_waited(file: SegmentFile) -> tuple[WaitedStatus, list[float]]:
    """Read how long producers and trainers have waited."""
    seconds = file.waits() / _SECOND
    named = dict(zip(_core.WAITS, seconds.sum(axis=0).tolist(), strict=True))
    waited = WaitedStatus(
        space_s=named["space"],
        paused_s=named["paused"],
        ahead_s=named["ahead"],
        trainers_s=named["groups"],
    )
    return waited, seconds[:-1].sum(axis=1).tolist()
