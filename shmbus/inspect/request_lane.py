"""The request lane and the bound on groups of a segment's file, for operators.

Invariant: the lane's sizes follow from the geometry, and every index that a row gives is bounded by
them; a row that changes while it is read may be counted as it was or as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shmbus._format import printable
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.types import LeadStatus, RequestsStatus
from shmbus.inspect.view_types import GroupCells
from shmbus_ext import _core

__all__ = ["read_claims", "read_lead", "read_requests"]

_TYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(dict(note))  # type: ignore[call-overload]
    for name, note in _core.request_layout().items()
}
_OPEN, _ENDED = 2, 3
#: Bytes in which a row counts where its prompt lies.
_UNIT: Final = _core.REQUEST_UNIT
#: Kinds of a cell's claim, and the producer of a sample that nobody will make.
_IS_OPEN, _IS_CLAIMED, _IS_DONE = 1, 2, 3
_NOBODY = (1 << 34) - 1


def read_lead(file: SegmentFile) -> LeadStatus | None:
    """Read how far producers are ahead; None where the bus does not bound it."""
    at = file.lead_offset
    head = np.frombuffer(file.read(_TYPES["lead_table"].itemsize, at), _TYPES["lead_table"])[0]
    limit = int(head["limit"])
    if not limit:
        return None
    rows = np.frombuffer(file.read(8 * _core.LEAD_ROWS, at + _TYPES["lead_table"].itemsize), "<u8")
    versions = int(head["max_versions"])
    return LeadStatus(
        held=int(np.count_nonzero(rows)),
        limit=limit,
        max_lead=int(head["max_groups"]) or None,
        max_lead_versions=versions - 1 if versions else None,
    )


def read_requests(file: SegmentFile) -> RequestsStatus | None:
    """Count requested samples by what became of them; None where none was ever requested."""
    tables = _tables(file)
    if tables is None:
        return None
    lane, rows, cells, _ = tables
    states = rows["word"] & np.uint64(3)
    ended = rows[states == _ENDED]
    done = int(lane["done"]) + int(ended["ended_done"].sum())
    given_up = int(lane["given_up"]) + int(ended["ended_given_up"].sum())
    counts = {_IS_OPEN: 0, _IS_CLAIMED: 0, _IS_DONE: 0}
    open_rows = rows[states == _OPEN]
    unmade = 0
    splits: dict[int, list[int]] = {}
    for first, group_size, split in zip(
        open_rows["first_cell"].tolist(),
        open_rows["group_size"].tolist(),
        open_rows["split"].tolist(),
        strict=True,
    ):
        claims = cells[first : first + group_size]
        kinds = claims >> np.uint64(62)
        producers = (claims >> np.uint64(28)) & np.uint64(_NOBODY)
        nobody = (kinds == _IS_DONE) & (producers == _NOBODY)
        given_up += int(np.count_nonzero(nobody))
        done -= int(np.count_nonzero(nobody))
        unmade += bool(np.any((kinds == _IS_OPEN) | (kinds == _IS_CLAIMED)))
        of_split = splits.setdefault(split, [0, 0])
        for kind in counts:
            amount = int(np.count_nonzero(kinds == kind))
            counts[kind] += amount
            if kind != _IS_DONE:
                of_split[kind - _IS_OPEN] += amount
    taken_ns = int(lane["taken_ns"])
    return RequestsStatus(
        offered=int(lane["offered"]),
        open=counts[_IS_OPEN],
        claimed=counts[_IS_CLAIMED],
        done=done + counts[_IS_DONE],
        given_up=given_up,
        groups=len(open_rows),
        unmade=unmade,
        by_split={
            printable(file.split_label(split)): (is_open, claimed)
            for split, (is_open, claimed) in splits.items()
        },
        taken_s=max(0.0, (_core.monotonic_ns() - taken_ns) / 1e9) if taken_ns else None,
    )


def _tables(file: SegmentFile) -> tuple[Any, NDArray[Any], NDArray[np.uint64], int] | None:
    """Read the lane, its rows and its cells' claims, and where prompts begin; None without any."""
    start = file.requests_offset
    size = _TYPES["request_lane"].itemsize
    lane = np.frombuffer(file.read(size, start), _TYPES["request_lane"])[0]
    parts = _core.request_divide(file.data_offset - start)
    if parts is None or not int(lane["number"]):
        return None
    size = _TYPES["request_row"].itemsize
    rows = np.frombuffer(
        file.read(parts["row_count"] * size, start + parts["rows"]), _TYPES["request_row"]
    )
    cells = np.frombuffer(
        file.read(parts["units"] - parts["cells"], start + parts["cells"]), _TYPES["request_cell"]
    )["claim"]
    return lane, rows, cells, start + parts["units"]


def read_claims(file: SegmentFile, groups: Sequence[GroupCells]) -> list[list[tuple[int, int]]]:
    """Read which samples of groups workers have in hand."""
    found: list[list[tuple[int, int]]] = [[] for _ in groups]
    tables = _tables(file) if groups else None
    if tables is None:
        return found
    _, rows, cells, units_at = tables
    at_name = {
        (_bytes(group.instance_id), _round(group.round), group.split): at
        for at, group in enumerate(groups)
    }
    is_open = (rows["word"] & np.uint64(3)) == _OPEN
    asked = np.isin(rows["round"], [round for _, round, _ in at_name])
    for row in rows[is_open & asked]:
        split = file.split_label(int(row["split"]))
        at = at_name.get((_id_of(file, row, units_at), int(row["round"]), split))
        if at is None or groups[at].size != int(row["group_size"]):
            continue
        first = int(row["first_cell"])
        claims = cells[first : first + int(row["group_size"])]
        for index in np.flatnonzero((claims >> np.uint64(62)) == _IS_CLAIMED).tolist():
            # A claim has the number of its producer, plus 1.
            found[at].append((index, (int(claims[index]) >> 28 & _NOBODY) - 1))
    return found


def _bytes(instance_id: str) -> bytes:
    return instance_id.encode("utf-8", "surrogateescape")


def _round(round: int | None) -> int:
    return _core.NO_ROUND if round is None else round


def _id_of(file: SegmentFile, row: Any, units_at: int) -> bytes:
    """Return the id of a row; a number that points outside of the lane gives other bytes."""
    position = units_at + int(row["first_unit"]) * _UNIT
    size = min(int(row["id_bytes"]), _core.MAX_ID_BYTES)
    return file.read(size, min(position, file.data_offset))
