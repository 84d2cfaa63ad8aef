"""Undelivered records of a segment's file, sorted into groups as the stash does it."""

from __future__ import annotations

import itertools

import msgspec

from shmbus import limits
from shmbus._counting import undelivered_records
from shmbus._segment_file import RecordRow, SegmentFile, printable
from shmbus_ext import _core

__all__ = ["GroupStatus", "OpenGroups"]


class GroupStatus(msgspec.Struct, frozen=True):
    """An incomplete group.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    epoch : int | None
        Where its producers gave one.
    size, present : int
        Samples that make it complete, and how many are in.
    missing : list[int]
        The first missing indices.
    age_s : float
        Seconds since its first sample was committed.
    producers : list[int]
        Who sent what is there.
    """

    instance_id: str
    epoch: int | None
    size: int
    present: int
    missing: list[int]
    age_s: float
    producers: list[int]


class _Open(msgspec.Struct):
    """An incomplete group on its way."""

    size: int
    rows: dict[int, RecordRow]


class OpenGroups:
    """Undelivered records, grouped as the stash does it, in the order of commits.

    A sample that the stash will discard (a duplicate, another size) joins no group here either.

    Parameters
    ----------
    file : SegmentFile
        Open and readable.
    undelivered : int
        How many there are; more than `limits.STATUS_RECORDS` are not looked at.

    Attributes
    ----------
    incomplete, complete : int | None
        How many groups; None where they were not looked at.
    oldest : list[GroupStatus]
        The incomplete ones that have waited longest.
    """

    def __init__(self, file: SegmentFile, undelivered: int) -> None:
        self.incomplete: int | None = None
        self.complete: int | None = None
        self.oldest: list[GroupStatus] = []
        if undelivered > limits.STATUS_RECORDS:
            return
        groups: dict[object, _Open] = {}
        self.complete = 0
        for row in undelivered_records(file):
            group = groups.setdefault(row.key, _Open(row.group_size, {}))
            if group.size == row.group_size:
                group.rows.setdefault(row.index, row)
            if len(group.rows) == group.size:
                del groups[row.key]
                self.complete += 1
        now = _core.monotonic_ns()
        self.incomplete = len(groups)
        self.oldest = [_group(groups[key], now) for key in list(groups)[: limits.STATUS_GROUPS]]


def _group(group: _Open, now_ns: int) -> GroupStatus:
    rows = group.rows.values()
    first = min(rows, key=lambda row: row.committed_ns)
    missing = (index for index in range(group.size) if index not in group.rows)
    return GroupStatus(
        instance_id=printable(first.instance_id),
        epoch=first.epoch,
        size=group.size,
        present=len(group.rows),
        missing=list(itertools.islice(missing, limits.STATUS_MISSING)),
        age_s=max(0.0, (now_ns - first.committed_ns) / 1e9),
        producers=sorted({row.producer_id for row in rows}),
    )
