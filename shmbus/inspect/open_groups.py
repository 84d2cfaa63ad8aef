"""Undelivered records of a segment's file, sorted into groups as the stash does it."""

from __future__ import annotations

import itertools

import msgspec

from shmbus import _encoding, limits
from shmbus._format import printable
from shmbus.inspect.segment_file import RecordRow, SegmentFile
from shmbus.inspect.undelivered import undelivered_records
from shmbus_ext import _core

__all__ = ["FailedSample", "GroupStatus", "OpenGroups"]


class FailedSample(msgspec.Struct, frozen=True):
    """A sample of an incomplete group that failed.

    Attributes
    ----------
    index : int
        Which one.
    attempts : int
        How often it has failed, as far as anybody said so.
    reason : str
        What the last one who tried said.
    """

    index: int
    attempts: int
    reason: str


class GroupStatus(msgspec.Struct, frozen=True):
    """An incomplete group.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    epoch : int | None
        Where its producers gave one.
    size, present : int
        Samples that make it complete, 0 where nobody has said it, and how many are in.
    missing : list[int]
        The first missing indices.
    age_s : float
        Seconds since its first sample was committed.
    producers : list[int]
        Who sent what is there.
    failed : list[FailedSample]
        Those of the missing that failed; the first of them.
    """

    instance_id: str
    epoch: int | None
    size: int
    present: int
    missing: list[int]
    age_s: float
    producers: list[int]
    failed: list[FailedSample] = []


class _Open(msgspec.Struct):
    """An incomplete group on its way; `size` is 0 until anybody says it."""

    size: int
    rows: dict[int, RecordRow]
    failed: dict[int, RecordRow]

    def take_in(self, row: RecordRow) -> None:
        """Take in a record as the stash does."""
        size = row.group_size if row.sized else 0
        self.size = self.size or size
        if row.failed:
            if row.index not in self.rows:
                self.failed[row.index] = row
        elif size == self.size:
            self.rows.setdefault(row.index, row)
            self.failed.pop(row.index, None)


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
            group = groups.setdefault(row.key, _Open(0, {}, {}))
            group.take_in(row)
            if len(group.rows) == group.size > 0:
                del groups[row.key]
                self.complete += 1
        now = _core.monotonic_ns()
        self.incomplete = len(groups)
        oldest = list(groups.values())[: limits.STATUS_GROUPS]
        self.oldest = [_group(file, group, now) for group in oldest]


def _reason(file: SegmentFile, row: RecordRow) -> str:
    size = min(row.meta_bytes, limits.STATUS_REASON_BYTES)
    try:
        reason = _encoding.decode_meta(file.read_payload(row, row.meta_offset, size))
    except ValueError:
        return "its reason cannot be read"
    return printable(str(reason))


def _group(file: SegmentFile, group: _Open, now_ns: int) -> GroupStatus:
    rows = [*group.rows.values(), *group.failed.values()]
    failed = [group.failed[index] for index in sorted(group.failed)]
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
        failed=[
            FailedSample(row.index, int(row.score) + 1, _reason(file, row))
            for row in failed[: limits.STATUS_MISSING]
        ],
    )
