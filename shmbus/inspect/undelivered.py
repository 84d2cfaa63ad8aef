"""Counting a segment's undelivered records from outside, each exactly once.

Invariants: a release that has taken effect counts as done, whichever process finishes it; a commit
counts once its lane has counted it; of the two copies that an interrupted move leaves, one counts.
"""

from __future__ import annotations

import numpy as np

from shmbus.inspect.records import RecordRow
from shmbus.inspect.segment_file import SegmentFile

__all__ = ["count_undelivered", "counters", "undelivered_records"]


def counters(file: SegmentFile) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (released by reason, committed by slot, intent); releases never exceed commits."""
    file.refresh()
    released = list(file.released())
    reason, count, _ = file.intent()
    if count:
        # A release that has taken effect counts as done, whichever process finishes it.
        released[reason] = int(file.header["intent_base"]) + count
    committed = tuple(file.slots()["committed"][:-1].tolist())
    return tuple(released), committed, (reason, count)


def count_undelivered(file: SegmentFile) -> int | None:
    """Count committed records that are not released, each once; None where a run changed."""
    _, _, ended = file.intent()
    below = [*file.slots()["committed"][:-1].tolist(), 0]
    moved = False
    keys = []
    total = 0
    for run in file.runs():
        scan = file.scan(run, below[run.slot])
        if scan.changed:
            return None
        moved = moved or (run.slot == file.max_producers and scan.committed > 0)
        total += scan.committed
        keys.append(scan.keys)
    if moved:
        # An interrupted move leaves two copies, with one identity.
        pairs = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        total = len(np.unique(pairs, axis=0))
    return total - _still_committed(file, ended)


def _still_committed(file: SegmentFile, ended: frozenset[tuple[int, int]]) -> int:
    """How many records of a release that has taken effect are not marked yet."""
    if not ended:
        return 0
    return sum(
        row.state == "committed" and (row.extent, row.offset) in ended
        for run in file.runs()
        for row in file.read_records(run)
    )


def undelivered_records(file: SegmentFile, *, payload: bool = False) -> list[RecordRow]:
    """Find every readable committed record, each identity once, in the order of commits."""
    _, _, ended = file.intent()
    below = file.slots()["committed"].tolist()
    found: dict[tuple[int, int], RecordRow] = {}
    for run in file.runs():
        for row in file.read_records(run, payload=payload):
            if row.state != "committed" or row.verdict != "ok":
                continue
            if (row.extent, row.offset) in ended:
                continue
            if row.lane_number >= below[run.slot] and not row.moved:
                continue
            # The collector's lane is the last: of two copies the moved one counts.
            found[row.producer_id, row.sequence] = row
    return sorted(found.values(), key=lambda row: row.committed_ns)
