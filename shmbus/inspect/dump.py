"""Dump of a segment: header, slots, runs, records, and the obstacles to each run's reuse.

For a stuck or damaged bus, or a bus of another layout. The dump reads the file and maps nothing
(`shmbus.inspect.segment_file`).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from shmbus.base.format import label_text, printable, several
from shmbus.data.schema import SchemaField
from shmbus.data.status_types import ProducerSlot
from shmbus.inspect.records import RecordRow, Run, Scan
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.tables import read_schema
from shmbus_ext import _core

_SLOT_STATES = {_core.SLOT_FREE: "free", _core.SLOT_ACTIVE: "active", _core.SLOT_CLOSED: "closed"}


#: Attributes a run's view copies from its scan.
_COUNTS = ("reserved", "committed", "aborted", "released", "unknown", "unreadable")


class SlotView(ProducerSlot, frozen=True, kw_only=True):
    """A slot of the segment; the collector's own comes last."""

    #: "free", "active", "closed", or "damaged" for every other value.
    state: str
    #: True if a living process holds its lock.
    locked: bool
    #: True if the owner stopped or died between the beginning of a commit and its count.
    commit_under_way: bool


class RunView(Run, frozen=True, kw_only=True):
    """A run and its records, counted by state."""

    #: True for the collector's lane of stragglers.
    collector: bool
    reserved: int
    committed: int
    aborted: int
    released: int
    unknown: int
    #: Bytes behind a damaged frame.
    unreadable: int
    #: Obstacles to the run's reuse.
    pinned_by: list[str]


class RecordView(msgspec.Struct, frozen=True):
    """A record."""

    extent: int
    offset: int
    producer_id: int
    sequence: int
    #: Place in the group; "" and 0 while reserved.
    instance_id: str
    round: int | None
    index: int
    group_size: int
    #: "reserved", "committed", "aborted", "released", "unknown" or "unreadable".
    state: str
    #: "ok", or the failed checksum: "frame", "header", "payload".
    verdict: str
    #: Header and padding included.
    nbytes: int
    age_s: float | None
    #: The producer's values; None for a score that is not finite.
    score: float | None
    policy_version: int
    moved: bool
    #: Its arrays, as in "tokens <i4 (2048,)".
    fields: list[str]


class Inspection(msgspec.Struct, frozen=True):
    """A segment laid open."""

    name: str
    path: str
    file_bytes: int
    #: Reason why no process of this version can use the segment.
    problem: str | None
    #: True if a living process holds the segment open, and if a living process collects.
    in_use: bool
    collector_alive: bool
    #: The header's fields; a header of another layout is read by this layout.
    header: dict[str, Any]
    #: The requested parts; empty for an unusable header.
    slots: list[SlotView]
    runs: list[RunView]
    records: list[RecordView]
    records_omitted: int
    #: The declared fields; None without a declaration.
    schema: list[SchemaField] | None = None
    #: Reason for an unreadable schema; "" if readable.
    schema_problem: str = ""


def inspect(name: str, *, limit: int = 20, payload: bool = False) -> Inspection:
    """Walk a segment."""
    with SegmentFile(name) as file:
        slots: list[SlotView] = []
        runs: list[RunView] = []
        records: list[RecordView] = []
        omitted = 0
        schema, schema_problem = None, ""
        if file.tables:
            schema, schema_problem = read_schema(file)
            slots = _slots(file)
            leased = file.runs()
            collects = file.collector_alive()
            for run in leased:
                # All committed records, counted by their lane or not.
                scan = file.scan(run, 2**64 - 1)
                if not scan.changed:
                    runs.append(_run(file, run, scan, collects))
            records, omitted = _records(file, leased, limit, payload)
        return Inspection(
            name=printable(name),
            path=printable(file.path),
            file_bytes=file.file_bytes,
            problem=None if file.problem is None else printable(str(file.problem)),
            in_use=file.in_use(),
            collector_alive=file.collector_alive(),
            header={name: _header_value(file.header[name]) for name in file.header.dtype.names},
            slots=slots,
            runs=runs,
            records=records,
            records_omitted=omitted,
            schema=schema,
            schema_problem=schema_problem,
        )


def _header_value(value: np.generic) -> str | int:
    if isinstance(value, np.void):
        return value.tobytes().hex()
    return label_text(value) if isinstance(value, bytes) else int(value)


def _slots(file: SegmentFile) -> list[SlotView]:
    rows = file.slots()
    found = []
    for slot in np.flatnonzero(rows["producer_id"] | rows["committed"]).tolist():
        row = rows[slot]
        own = slot == file.max_producers
        committed = int(row["committed"])
        found.append(
            SlotView(
                slot=slot,
                producer_id=int(row["producer_id"]),
                pid=int(row["pid"]),
                label=label_text(row["label"]),
                state=_SLOT_STATES.get(int(row["state"]), "damaged"),
                locked=file.collector_alive() if own else file.slot_alive(slot),
                committed=committed,
                aborted=int(row["aborted"]),
                commit_under_way=int(row["committing"]) == committed + 1,
            )
        )
    return found


def _run(file: SegmentFile, run: Run, scan: Scan, collects: bool) -> RunView:
    own = run.slot == file.max_producers
    alive = collects if own else file.slot_alive(run.slot)
    pins = []
    if not run.sealed:
        pins.append(
            "its owner still writes there" if alive else "its dead owner, until the next sweep"
        )
    if scan.reserved:
        pins.append(several(scan.reserved, "open reservation"))
    if scan.committed:
        pins.append(f"{scan.committed:,} undelivered or unacknowledged")
    if run.writer_pins:
        pins.append(several(run.writer_pins, "writable view"))
    if file.viewed(run):
        pins.append("views in a process that the daemon serves")
    if not pins:
        pins.append(
            "views in the collector's process, or its next poll" if collects else "no collector"
        )
    counts = msgspec.structs.asdict(scan)
    return RunView(
        **msgspec.structs.asdict(run),
        **{name: counts[name] for name in _COUNTS},
        collector=own,
        pinned_by=pins,
    )


def _records(
    file: SegmentFile, runs: list[Run], limit: int, payload: bool
) -> tuple[list[RecordView], int]:
    shown: list[RecordView] = []
    omitted = 0
    now = time.monotonic_ns()
    for run in runs:
        if len(shown) >= limit:
            scan = file.scan(run, 2**64 - 1)
            omitted += scan.reserved + scan.committed + scan.aborted + scan.released + scan.unknown
            continue
        for row in file.read_records(run, payload=payload):
            if len(shown) < limit:
                shown.append(_record(row, now))
            else:
                omitted += 1
    return shown, omitted


def _record(row: RecordRow, now_ns: int) -> RecordView:
    has_body = row.state in ("committed", "released") and row.verdict in ("ok", "payload")
    return RecordView(
        extent=row.extent,
        offset=row.offset,
        producer_id=row.producer_id,
        sequence=row.sequence if has_body else 0,
        instance_id=printable(row.instance_id),
        round=row.round,
        index=row.index if has_body else 0,
        group_size=row.group_size if has_body else 0,
        state=row.state,
        verdict=row.verdict,
        nbytes=row.nbytes,
        age_s=max(0.0, (now_ns - row.committed_ns) / 1e9) if has_body else None,
        # JSON lacks nan and infinity.
        score=row.score if has_body and np.isfinite(row.score) else None,
        policy_version=row.policy_version if has_body else 0,
        moved=row.moved,
        fields=[
            f"{printable(field.name)} {printable(field.dtype)} {field.shape}"
            for field in row.fields()
        ],
    )
