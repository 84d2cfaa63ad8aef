"""The tables of a segment's file, as structs of `shmbus.data.status_types`, for operators.

The retry table, the request lane and the bound on groups, samples in hand, seconds of waiting,
counted deliveries, the relay's journal, the declared schema.

Invariants:

- A row of the retry table counts only with a valid checksum. The other tables may change during
  the read: an entry counts in its old or its new state, and is only shown.
- The geometry, from which the sizes follow, bounds every index in a row.
- A sample counts as begun while a producer holds its request. A state from the sample's record
  (there, failed, asked for again) wins.
- A damaged schema is a text and no exception: readers of the bus go on without the schema.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus import errors
from shmbus.base.format import printable
from shmbus.base.ledger import LanePauseStatus
from shmbus.data.schema import SchemaField, fields_of
from shmbus.data.status_types import (
    GroupCells,
    Histogram,
    LeadStatus,
    RelayStatus,
    RequestsStatus,
    SampleCell,
    WaitedStatus,
    WantedStatus,
)
from shmbus.inspect.records import STRUCTS
from shmbus.inspect.segment_file import SegmentFile
from shmbus_ext import _core

#: Names of the core's figures, by their number.
HISTOGRAMS: Final = ("lag", "age", "length", "score", "solved")
assert len(HISTOGRAMS) == len(_core.FIGURE_BOUNDS)


def read_histograms(file: SegmentFile) -> tuple[list[Histogram], int]:
    """Read the histograms of a segment, and its count of useless groups."""
    buckets, sums, useless = file.figures()
    rows = zip(HISTOGRAMS, _core.FIGURE_BOUNDS, buckets, sums, strict=True)
    return [
        Histogram(name=name, bounds=list(bounds), buckets=counts, sum=total)
        for name, bounds, counts, total in rows
    ], useless


_ROW: Final = STRUCTS["retry_entry"]
_CRC_AT, _NUMBER_AT, _TEXT_AT, _REASON_AT = (
    _ROW.fields[name][1]  # type: ignore[index]
    for name in ("crc", "number", "id", "reason")
)
_ID_ROOM: Final = _REASON_AT - _TEXT_AT


def read_lane_pause(file: SegmentFile) -> LanePauseStatus | None:
    """Read the reason of the request lane's pause; None while open."""
    for entry, row in _rows(file):
        if int(row["attempt"]) == _core.RETRY_PAUSE:
            reason = _text(entry, _ID_ROOM, int(row["reason_bytes"]))
            return LanePauseStatus(reason=reason, since_unix_s=int(row["round"]) / 1e9)
    return None


def _rows(file: SegmentFile) -> Iterator[tuple[bytes, Any]]:
    """Yield the valid rows: their bytes, and their fields."""
    if not int(file.header["retries_open"]):
        return
    raw = file.table("retries")
    for at in range(0, len(raw), _ROW.itemsize):
        entry = raw[at : at + _ROW.itemsize]
        row = np.frombuffer(entry, _ROW)[0]
        covered = entry[_NUMBER_AT:_CRC_AT] + entry[_TEXT_AT:]
        if (
            int(row["claim"]) != _core.RETRY_BUSY
            and int(row["number"])
            and _core.crc32c(covered) == int(row["crc"])
        ):
            yield entry, row


def read_wanted(file: SegmentFile) -> list[WantedStatus]:
    """Read the open retry requests, in the order of publication."""
    now_ns = time.monotonic_ns()
    found = []
    for entry, row in _rows(file):
        if int(row["attempt"]) == _core.RETRY_PAUSE:
            continue
        claim = int(row["claim"]) & ~_core.RETRY_ANSWERED
        round = int(row["round"])
        wanted = WantedStatus(
            instance_id=_text(entry, 0, int(row["id_bytes"])),
            round=None if round == _core.NO_ROUND else round,
            split=printable(file.split_label(int(row["split"]))),
            index=int(row["index"]),
            attempt=int(row["attempt"]),
            reason=_text(entry, _ID_ROOM, int(row["reason_bytes"])),
            asked_s=max(0.0, (now_ns - int(row["asked_ns"])) / 1e9),
            taken_by=claim - 1 if claim else None,
        )
        found.append((int(row["number"]), wanted))
    return [wanted for _, wanted in sorted(found, key=lambda pair: pair[0])]


def _text(entry: bytes, at: int, size: int) -> str:
    start = _TEXT_AT + at
    return printable(entry[start : start + size].decode("utf-8", "backslashreplace"))


_STATE: Final = np.uint64(15)


def read_relay(file: SegmentFile) -> RelayStatus | None:
    """Read the relay's journal; None on a bus that never met a relay."""
    head = file.rows("relay", "relay_journal")[0]
    is_sink = bool(head["incarnation"])
    if not is_sink and not head["source_incarnation"]:
        return None
    figures = np.frombuffer(head["figures"].tobytes(), "<u8").tolist()
    seen_ns = int(head["seen_ns"])
    entries = file.rows("relay_entries", "relay_entry")
    words = entries["word"]
    settled = entries["identity"][(words & _STATE) == np.uint64(_core.RELAY_SETTLED)]
    owed = words[(words & _STATE) != np.uint64(0)]
    pairs = np.frombuffer(settled.tobytes(), "<u8").reshape(-1, 2)
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    held_for = {
        identity.tobytes().hex(): int(count) for identity, count in zip(found, counts, strict=True)
    }
    return RelayStatus(
        is_sink=is_sink,
        seen_s=max(0.0, time.monotonic() - seen_ns / 1e9) if seen_ns else None,
        begun=int(head["incarnation"] if is_sink else head["source_incarnation"]),
        entries=len(entries),
        held=figures[0] if not is_sink else 0,
        released=figures[1] if not is_sink else 0,
        moving=figures[0] if is_sink else 0,
        put=figures[2] if is_sink else 0,
        refused=figures[3] if is_sink else 0,
        settled=len(settled),
        intended=len(owed) - len(settled),
        held_for=held_for,
    )


_OPEN, _ENDED = 2, 3
#: Kinds of a cell's claim, and the producer of a sample that nobody will make.
_IS_OPEN, _IS_CLAIMED, _IS_DONE = 1, 2, 3
_NOBODY = (1 << 34) - 1


def read_lead(file: SegmentFile) -> LeadStatus | None:
    """Read the producers' lead; None without a bound."""
    head = file.rows("lead", "lead_table")[0]
    limit = int(head["limit"])
    if not limit:
        return None
    rows = np.frombuffer(file.table("lead_rows"), "<u8")
    versions = int(head["max_versions"])
    return LeadStatus(
        held=int(np.count_nonzero(rows)),
        limit=limit,
        max_lead=int(head["max_groups"]) or None,
        max_lead_versions=versions - 1 if versions else None,
    )


def read_requests(file: SegmentFile) -> RequestsStatus | None:
    """Count requested samples by outcome; None without requests."""
    tables = _tables(file)
    if tables is None:
        return None
    lane, rows, cells = tables
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
        taken_s=max(0.0, (time.monotonic_ns() - taken_ns) / 1e9) if taken_ns else None,
    )


def _tables(file: SegmentFile) -> tuple[Any, NDArray[Any], NDArray[np.uint64]] | None:
    """Read the lane, its rows, and the cells' claims; None without requests."""
    lane = file.rows("lane", "request_lane")[0]
    if not int(lane["number"]):
        return None
    cells = file.rows("cells", "request_cell")
    return lane, file.rows("rows", "request_row"), cells["claim"]


def read_claims(file: SegmentFile, groups: Sequence[GroupCells]) -> list[list[tuple[int, int]]]:
    """Read which of the groups' samples are held by workers."""
    found: list[list[tuple[int, int]]] = [[] for _ in groups]
    tables = _tables(file) if groups else None
    if tables is None:
        return found
    _, rows, cells = tables
    at_name = {
        (
            group.instance_id.encode("utf-8", "surrogateescape"),
            _core.NO_ROUND if group.round is None else group.round,
            group.split,
        ): at
        for at, group in enumerate(groups)
    }
    is_open = (rows["word"] & np.uint64(3)) == _OPEN
    asked = np.isin(rows["round"], [round for _, round, _ in at_name])
    for row in rows[is_open & asked]:
        split = file.split_label(int(row["split"]))
        at = at_name.get((_id_of(file, row), int(row["round"]), split))
        if at is None or groups[at].size != int(row["group_size"]):
            continue
        first = int(row["first_cell"])
        claims = cells[first : first + int(row["group_size"])]
        for index in np.flatnonzero((claims >> np.uint64(62)) == _IS_CLAIMED).tolist():
            # A claim holds the number of its producer, plus 1; `_NOBODY` marks another node's.
            claimant = int(claims[index]) >> 28 & _NOBODY
            if claimant != _NOBODY:
                found[at].append((index, claimant - 1))
    return found


def _id_of(file: SegmentFile, row: Any) -> bytes:
    """Return the id of a row; a number that points outside of the lane gives other bytes."""
    position = file.tables["units"][0] + int(row["first_unit"]) * _core.REQUEST_UNIT
    size = min(int(row["id_bytes"]), _core.MAX_ID_BYTES)
    return file.read(size, min(position, file.data_offset))


def with_begun(file: SegmentFile, groups: Sequence[GroupCells]) -> list[GroupCells]:
    """Add the samples with requests in hand to their groups."""
    claims = read_claims(file, groups)
    return [_joined(group, dict(found)) for group, found in zip(groups, claims, strict=True)]


def _joined(group: GroupCells, begun: dict[int, int]) -> GroupCells:
    # In a partly shown group, a sample without a cell may have arrived.
    if not begun or group.cells_omitted:
        return group
    known = {cell.index for cell in group.cells}
    more = [
        SampleCell(index=index, state="begun", producer=producer)
        for index, producer in begun.items()
        if index not in known and (not group.size or index < group.size)
    ]
    if not more:
        return group
    cells = sorted([*group.cells, *more], key=lambda cell: cell.index)
    return msgspec.structs.replace(group, cells=cells)


def read_waited(file: SegmentFile) -> tuple[WaitedStatus, list[dict[str, Any]]]:
    """Read waiting times; and by slot the fields of `ProducerStatus` for waits and unmade work."""
    rows = file.rows("waits", "wait_row")
    seconds = rows["ns"].copy().view("<u8").reshape(len(rows), len(_core.WAITS)) / 1e9
    named = dict(zip(_core.WAITS, seconds.sum(axis=0).tolist(), strict=True))
    waited = WaitedStatus(
        space_s=named["space"],
        paused_s=named["paused"],
        ahead_s=named["ahead"],
        trainers_s=named["groups"],
    )
    now_ns = time.monotonic_ns()
    columns = (
        rows[name].tolist()
        for name in ("released", "given_back", "failed", "rests_until_ns", "reason")
    )
    notes = [
        {
            "waited_s": waited_s,
            "released": released,
            "given_back": given_back,
            "failed": failed,
            "rests_s": max(0.0, (until_ns - now_ns) / 1e9),
            "unmade_reason": printable(reason.decode("utf-8", "replace")),
        }
        for waited_s, released, given_back, failed, until_ns, reason in zip(
            seconds.sum(axis=1).tolist(), *columns, strict=True
        )
    ]
    return waited, notes[:-1]


def read_schema(file: SegmentFile) -> tuple[list[SchemaField] | None, str]:
    """Read the declared fields, None without a schema; and the reason for an unreadable schema."""
    try:
        declared = file.schema()
        fields = () if declared is None else fields_of(declared)
    except (errors.LayoutMismatchError, TypeError) as error:
        return None, printable(str(error))
    if declared is None:
        return None, ""
    return [
        msgspec.structs.replace(field, name=printable(field.name), dtype=printable(field.dtype))
        for field in fields
    ], ""
