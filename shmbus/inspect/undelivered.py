"""Undelivered records of a segment's file: counted, each once, and grouped as in a stash.

Invariants: a release in effect counts as done, regardless of the finishing process; a commit
counts once its lane has counted it; of the two copies left by an interrupted move, a single copy
counts.
"""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from shmbus.base import limits
from shmbus.base.format import printable
from shmbus.data import encoding
from shmbus.data.status_types import GroupCells, SampleCell
from shmbus.inspect.records import RecordRow, Run
from shmbus.inspect.segment_file import SegmentFile


def counters(file: SegmentFile) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (released by reason, committed by slot, intent); releases never exceed commits."""
    file.refresh()
    released = list(file.released())
    reason, count, _ = file.intent()
    if count:
        # A release in effect counts as done, regardless of the finishing process.
        released[reason] = int(file.header["intent_base"]) + count
    committed = tuple(file.slots()["committed"][:-1].tolist())
    return tuple(released), committed, (reason, count)


def count_undelivered(file: SegmentFile) -> int | None:
    """Count committed, unreleased records, each once; None if a run changed."""
    _, _, ended = file.intent()
    below = [*file.slots()["committed"][:-1].tolist(), 0]
    moved = False
    keys = []
    for run in file.runs():
        scan = file.scan(run, below[run.slot])
        if scan.changed:
            return None
        moved = moved or (run.slot == file.max_producers and bool(scan.keys))
        keys.append(scan.keys)
    pairs = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
    # An interrupted move leaves two copies with the same identity.
    total = len(np.unique(pairs, axis=0) if moved else pairs)
    return total - _still_committed(file, ended)


def _still_committed(file: SegmentFile, ended: frozenset[tuple[int, int]]) -> int:
    """Count the unmarked records of a release in effect."""
    if not ended:
        return 0
    return sum(
        row.committed and (row.extent, row.offset) in ended
        for run in file.runs()
        for row in file.read_records(run)
    )


def _readable(file: SegmentFile, *, payload: bool) -> Iterator[tuple[Run, RecordRow]]:
    """Yield readable undelivered records run by run; of two copies the last one counts."""
    _, _, ended = file.intent()
    below = file.slots()["committed"].tolist()
    for run in file.runs():
        for row in file.read_records(run, payload=payload):
            counted = row.lane_number < below[run.slot] or row.moved
            here = row.committed and (row.extent, row.offset) not in ended
            if here and counted and row.intact:
                yield run, row


def undelivered_records(file: SegmentFile) -> list[RecordRow]:
    """Find every readable committed record, each identity once, in the order of commits."""
    # The collector's lane comes last: of two copies the moved copy counts.
    found = {(row.producer_id, row.sequence): row for _, row in _readable(file, payload=False)}
    return sorted(found.values(), key=lambda row: row.committed_ns)


#: Words of a record's place: commit time, producer, sequence, number of the run, offset.
_PLACE_WORDS: Final = 5


def stream_undelivered(file: SegmentFile) -> Iterator[RecordRow]:
    """Yield the same records with checked payloads, in memory of a few words a record."""
    runs: list[Run] = []
    places = array("Q")
    for run, row in _readable(file, payload=True):
        if not runs or runs[-1] is not run:
            runs.append(run)
        places.extend((row.committed_ns, row.producer_id, row.sequence, len(runs) - 1, row.offset))
    table = np.frombuffer(places, "<u8").reshape(-1, _PLACE_WORDS)
    by_identity = np.lexsort((table[:, 2], table[:, 1]))
    identities = table[by_identity, 1:3]
    last = np.ones(len(table), bool)
    last[:-1] = (identities[1:] != identities[:-1]).any(axis=1)
    kept = np.sort(by_identity[last])
    for number, offset in table[kept[np.argsort(table[kept, 0], kind="stable")], 3:]:
        yield file.read_record(runs[number], int(offset))


#: Maximum records sorted into groups: about two seconds of work. Beyond that no group is named.
MAX_RECORDS = 200_000
#: Samples shown singly; the largest group fits.
_MAX_CELLS = 16_384


class _Open(msgspec.Struct):
    """A group while records are sorted; `size` and `need` are 0 while unknown."""

    size: int
    need: int
    rows: dict[int, RecordRow]
    failed: dict[int, RecordRow]

    def add(self, row: RecordRow) -> None:
        size = row.group_size if row.sized else 0
        self.size = self.size or size
        if row.failed:
            if row.index not in self.rows:
                self.failed[row.index] = row
        elif size == self.size and self.need in (0, row.need):
            self.need = row.need
            self.rows.setdefault(row.index, row)
            self.failed.pop(row.index, None)


class OpenGroups:
    """Undelivered records, grouped as in the stash, in the order of commits."""

    # A sample the stash would discard (a duplicate, another size) joins no group here either.

    def __init__(self, file: SegmentFile, undelivered: int) -> None:
        #: Number of groups; None if records were not sorted.
        self.incomplete: int | None = None
        self.complete: int | None = None
        #: Instance ids, rounds and splits of complete groups.
        self.whole: list[tuple[str, int | None, str]] = []
        self._groups: dict[object, _Open] = {}
        if undelivered > MAX_RECORDS:
            return
        groups: dict[object, _Open] = {}
        for row in undelivered_records(file):
            group = groups.setdefault(row.key, _Open(0, 0, {}, {}))
            group.add(row)
            if len(group.rows) == group.need > 0:
                del groups[row.key]
                self.whole.append((row.instance_id, row.round, file.split_label(row.split)))
        self.complete = len(self.whole)
        self.incomplete = len(groups)
        self._file, self._groups, self._now_ns = file, groups, time.monotonic_ns()

    def cells(self, count: int) -> tuple[list[GroupCells], int]:
        """Show the oldest incomplete groups sample by sample, before `file` is closed."""
        found: list[GroupCells] = []
        room = _MAX_CELLS
        for group in itertools.islice(self._groups.values(), count):
            if room <= 0:
                break
            shown = _cells(self._file, group, self._now_ns, room)
            room -= len(shown.cells)
            found.append(shown)
        return found, len(self._groups) - len(found)

    def find(self, instance_id: str, round: int | None, split: str) -> GroupCells | None:
        """Show an incomplete group, before `file` is closed; None if not found."""
        for group in self._groups.values():
            row = next(iter({**group.rows, **group.failed}.values()))
            if (row.instance_id, row.round) == (instance_id, round) and (
                self._file.split_label(row.split) == split
            ):
                return _cells(self._file, group, self._now_ns, _MAX_CELLS)
        return None


def _cells(file: SegmentFile, group: _Open, now_ns: int, room: int) -> GroupCells:
    rows = {**group.failed, **group.rows}
    first = min(rows.values(), key=lambda row: row.committed_ns)
    return GroupCells(
        instance_id=first.instance_id,
        round=first.round,
        need=group.need or group.size,
        split=file.split_label(first.split),
        size=group.size,
        present=len(group.rows),
        age_s=max(0.0, (now_ns - first.committed_ns) / 1e9),
        cells=[_cell(file, rows[index], now_ns) for index in sorted(rows)[:room]],
        cells_omitted=max(0, len(rows) - room),
    )


def _cell(file: SegmentFile, row: RecordRow, now_ns: int) -> SampleCell:
    age_s = max(0.0, (now_ns - row.committed_ns) / 1e9)
    if row.failed:
        return SampleCell(
            index=row.index,
            state="failed",
            producer=row.producer_id,
            age_s=age_s,
            attempts=int(row.score) + 1,
            reason=_reason(file, row),
        )
    score = row.score if math.isfinite(row.score) else None
    return SampleCell(index=row.index, score=score, producer=row.producer_id, age_s=age_s)


def _reason(file: SegmentFile, row: RecordRow) -> str:
    size = min(row.meta_bytes, limits.STATUS_REASON_BYTES)
    try:
        reason = encoding.decode_meta(file.read_payload(row, row.meta_offset, size))
    except ValueError:
        return "its reason cannot be read"
    return printable(str(reason))
