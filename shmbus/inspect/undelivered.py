"""Counting a segment's records from outside, so that nothing counts twice or not at all.

Invariants: a release that is in force counts as done, whoever ends it; a commit counts when its
lane has counted it; of the two copies that a dead mover left, one counts.
"""

from __future__ import annotations

import numpy as np

from shmbus.inspect.records import RecordRow
from shmbus.inspect.segment_file import SegmentFile

__all__ = ["count_undelivered", "counters", "undelivered_records"]


def counters(file: SegmentFile) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(released by reason, committed by slot, the intent): releases first, never more of them."""
    file.refresh()
    released = list(file.released())
    reason, count, _ = file.intent()
    if count:
        # A release that is in force counts as done, whoever ends it.
        released[reason] = int(file.header["intent_base"]) + count
    committed = tuple(file.slots()["committed"][:-1].tolist())
    return tuple(released), committed, (reason, count)


def count_undelivered(file: SegmentFile) -> int | None:
    """Count committed records that nobody has released, each once; None where a run changed."""
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
        # A mover that died half way leaves both copies, with one number.
        pairs = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
        total = len(np.unique(pairs, axis=0))
    return total - _still_committed(file, ended)


def _still_committed(file: SegmentFile, ended: frozenset[tuple[int, int]]) -> int:
    """How many records of a release that is in force have not been marked yet."""
    if not ended:
        return 0
    return sum(
        row.state == "committed" and (row.extent, row.offset) in ended
        for run in file.runs()
        for row in file.read_records(run)
    )


def undelivered_records(file: SegmentFile, *, payload: bool = False) -> list[RecordRow]:
    """Find every readable committed record, each number once, in the order of commits."""
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
            # Lanes come in order, the collector's last: its copy is the one that counts.
            found[row.producer_id, row.sequence] = row
    return sorted(found.values(), key=lambda row: row.committed_ns)
