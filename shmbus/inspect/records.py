"""Runs and records as a segment's file describes them.

Invariant: the core checked these sizes and offsets; texts are unchecked and unescaped.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import msgspec
import numpy as np

from shmbus.data.keys import make_key
from shmbus_ext import _core

#: The structs of the segment, by their names in the core.
STRUCTS: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(dict(note))  # type: ignore[call-overload]
    for name, note in _core.layout().items()
}
_SCHEMA: Final = STRUCTS["schema_entry"]


class Run(msgspec.Struct, frozen=True):
    """Neighbouring extents that a lane leases together."""

    #: Its first extent, and the number of extents.
    extent: int
    span: int
    #: The lane that leases the run; the collector's own carries the number `max_producers`.
    slot: int
    #: Of the lease.
    generation: int
    #: Position in the lane.
    order: int
    #: Bytes that hold records, and the total.
    used: int
    room: int
    #: True if closed for writes.
    sealed: bool
    #: Outstanding writable views.
    writer_pins: int
    producer_id: int


class Scan(msgspec.Struct, frozen=True):
    """The records of a run, counted."""

    #: (producer, sequence) of each committed record, as pairs of u64.
    keys: bytes
    #: Records by state; committed without those not yet counted by their lane.
    reserved: int
    committed: int
    aborted: int
    released: int
    unknown: int
    #: Ring bytes of committed records.
    nbytes: int
    #: Commit time of the newest, released records included; 0 without records.
    newest_ns: int
    #: Bytes behind a damaged frame, out of a walk's reach.
    unreadable: int
    #: True if the run was freed during the count, which makes the rest meaningless.
    changed: bool


class Field(msgspec.Struct, frozen=True):
    """An array of a record: its name, dtype as text, shape, and offset within the record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    itemsize: int


class RecordRow(msgspec.Struct, frozen=True):
    """A record found by the walk."""

    extent: int
    generation: int
    slot: int
    offset: int
    #: "reserved", "committed", "aborted", "released", "unknown"; "unreadable" for the last row of a
    #: run with a damaged frame, whose nbytes cannot be walked.
    state: str
    #: "ok", or the failed checksum: "frame", "header", "payload".
    verdict: str
    nbytes: int
    producer_id: int
    # Missing from a row of state "unreadable", like the fields below.
    sequence: int = 0
    lane_number: int = 0
    flags: int = 0
    policy_version: int = 0
    version_span: int = 0
    score: float = 0.0
    group_size: int = 0
    need: int = 0
    index: int = 0
    split: int = 0
    round: int | None = None
    committed_ns: int = 0
    meta_offset: int = 0
    meta_bytes: int = 0
    payload_bytes: int = 0
    instance_id: str = ""
    field_count: int = 0
    schema: bytes = b""
    shape: bytes = b""

    @property
    def key(self) -> Hashable:
        """The key of its group, in the stash's form."""
        return make_key(self.instance_id, self.round, self.split)

    @property
    def moved(self) -> bool:
        """True if the collector moved the record."""
        return bool(self.flags & _core.FLAG_MOVED)

    @property
    def failed(self) -> bool:
        """True for the report of a failed sample."""
        return bool(self.flags & _core.FLAG_FAILED)

    @property
    def sized(self) -> bool:
        """True if its producer gave the group_size."""
        return not self.flags & _core.FLAG_NO_SIZE

    def fields(self) -> list[Field]:
        """Parse its schema, whose bounds the core has checked."""
        return parse_fields(self.schema, self.shape)


def parse_fields(schema: bytes, shape: bytes) -> list[Field]:
    """Names, dtypes, shapes and offsets from a record's tables."""
    words = np.frombuffer(shape, "<u8").tolist()
    found = []
    at = word = 0
    while at < len(schema):
        entry = np.frombuffer(schema, _SCHEMA, count=1, offset=at)[0]
        at += _SCHEMA.itemsize
        name = schema[at : at + int(entry["name_bytes"])]
        at += len(name)
        dtype = schema[at : at + int(entry["dtype_bytes"])]
        at += len(dtype)
        sizes = words[word + 1 : word + 1 + int(entry["ndim"])]
        found.append(
            Field(
                name.decode("utf-8", "backslashreplace"),
                dtype.decode("utf-8", "backslashreplace"),
                tuple(sizes),
                words[word],
                int(entry["itemsize"]),
            )
        )
        word += 1 + len(sizes)
    return found


def unreadable_rest(run: Run, at: int) -> RecordRow:
    """Stand in for everything from a damaged frame to the end of its run."""
    return RecordRow(
        extent=run.extent,
        generation=run.generation,
        slot=run.slot,
        offset=at,
        state="unreadable",
        verdict="frame",
        nbytes=run.used - at,
        producer_id=run.producer_id,
    )
