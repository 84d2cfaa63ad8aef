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


class Scan(msgspec.Struct, frozen=True):
    """The records of a run, counted."""

    #: (producer, sequence) of each committed record counted by its lane, as pairs of u64.
    keys: bytes
    #: Open reservations.
    reserved: int
    #: Commit time of the newest, released records included; 0 without records.
    newest_ns: int
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
    """A committed record, released or not."""

    extent: int
    slot: int
    offset: int
    #: False once released.
    committed: bool
    #: True if its checked sums hold.
    intact: bool
    nbytes: int
    producer_id: int
    sequence: int
    lane_number: int
    flags: int
    policy_version: int
    version_span: int
    score: float
    group_size: int
    need: int
    index: int
    split: int
    round: int | None
    committed_ns: int
    meta_offset: int
    meta_bytes: int
    payload_bytes: int
    instance_id: str
    schema: bytes
    shape: bytes

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
