"""Reports of incomplete groups: samples present, missing, failed or asked again.

Invariants:

- An answer is bounded by bytes, whatever producers wrote, and counts omissions.
- Nothing here changes the stash, and time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from shmbus.base import limits
from shmbus.daemon.leases import Lease
from shmbus.data.keys import split_key
from shmbus.data.status_types import GroupCells, GroupState, SampleCell
from shmbus.stash.collector import Collector
from shmbus.stash.failures import FailedIndex, FailingGroup
from shmbus_ext import _core

#: Bytes of a cell and of a group in an answer, beside their texts: names of fields and numbers.
_CELL_BYTES = 70
_GROUP_BYTES = 120


def group_cells(
    collector: Collector, count: int, now_s: float, most: int = limits.MAX_CELLS_SHOWN
) -> tuple[list[GroupCells], int]:
    """Show the oldest incomplete groups, sample by sample."""
    found: list[GroupCells] = []
    room = limits.GROUPS_REPLY_BYTES
    for group in collector.stash.oldest(count):
        room -= _GROUP_BYTES + 4 * len(split_key(group.key)[0])
        if room <= 0:
            break
        shown, room = _cells(collector, group, room, now_s, most)
        found.append(shown)
    return found, max(0, collector.stash.open_groups - len(found))


def find_group(
    collector: Collector, leases: Iterable[tuple[Lease, str]], key: Hashable, now_s: float
) -> tuple[GroupState, GroupCells | None, str, float]:
    """Find a group's state; among several of the same key, prefer the unleased."""
    room = limits.GROUPS_REPLY_BYTES
    stash = collector.stash
    group = stash.failures.groups.get(key) or stash.table.find(key)
    if group is not None:
        return "open", _cells(collector, group, room, now_s)[0], "", 0.0
    for lease, holder in leases:
        if lease.samples and lease.samples[0].key == key:
            shown, _ = _cells(collector, _whole(lease.samples), room, now_s)
            return "leased", shown, holder, max(0.0, now_s - lease.born_s)
    for entry in stash.table.full(key):
        return "ready", _cells(collector, _whole(entry.samples), room, now_s)[0], "", 0.0
    return "gone", None, "", 0.0


class _Whole(NamedTuple):
    key: Hashable
    size: int
    need: int
    born_s: float
    samples: list[_core.Trajectory]


def _whole(samples: list[_core.Trajectory]) -> _Whole:
    first, born_s = samples[0], min(sample.committed_ns for sample in samples) / 1e9
    return _Whole(first.key, first.group_size, first.need, born_s, samples)


def _cells(
    collector: Collector,
    group: _core.GroupEntry[_core.Trajectory] | FailingGroup[_core.Trajectory] | _Whole,
    room: int,
    now_s: float,
    most: int = limits.MAX_CELLS_SHOWN,
) -> tuple[GroupCells, int]:
    """Show a group; also return the room left."""
    failed = group.failed if isinstance(group, FailingGroup) else {}
    samples, size = group.samples, group.size
    instance_id, round, split = split_key(group.key)
    # Samples come in index order: take the first.
    cells = [_there(sample, now_s) for sample in samples[:most]]
    cells += [_failed(index, failed[index], now_s) for index in sorted(failed)[:most]]
    cells.sort(key=lambda cell: cell.index)
    shown = []
    for cell in cells[:most]:
        room -= _CELL_BYTES + 4 * len(cell.reason)
        if room <= 0:
            break
        shown.append(cell)
    cells_of_group = GroupCells(
        instance_id=instance_id,
        round=round,
        split=_core.split_label(collector.segment, split),
        need=group.need or size,
        size=size,
        present=len(samples),
        age_s=max(0.0, now_s - group.born_s),
        cells=shown,
        cells_omitted=len(samples) + len(failed) - len(shown),
    )
    return cells_of_group, room


def _there(sample: _core.Trajectory, now_s: float) -> SampleCell:
    return SampleCell(
        index=sample.index,
        score=sample.score if sample.scored and math.isfinite(sample.score) else None,
        producer=sample.producer_id,
        age_s=max(0.0, now_s - sample.committed_ns / 1e9),
    )


def _failed(index: int, failed: FailedIndex[_core.Trajectory], now_s: float) -> SampleCell:
    request, report = failed.request, failed.report
    return SampleCell(
        index=index,
        state="failed" if request is None else "asked",
        producer=None if report is None else report.producer_id,
        age_s=None if report is None else max(0.0, now_s - report.committed_ns / 1e9),
        attempts=failed.attempts,
        reason=failed.reason[: limits.FAIL_REASON_CHARS],
    )
