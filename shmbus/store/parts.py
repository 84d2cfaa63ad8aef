"""Records as columns in safetensors files, the parts of snapshots.

A part holds records of one schema (field names, dtypes, dimensions). Its tensors:

- ``producer_id``, ``sequence``, ``order``, ``committed_ns`` (u64), ``policy_version``, ``round``
  (i64; the minimum without a round), ``score`` (f64), ``group_size``, ``index``, ``slot`` (u32),
  ``checksum`` (u8: the record's flags), an element a record;
- ``need`` (u16) and ``version_span`` (u32), copied from the record; ``split.bytes`` and
  ``split.ends``, the label of its split;
- ``run`` (u64), the record's place in its bus: extents of the run << 32 | the run's first extent +
  1; 0 if unknown;
- ``id.bytes`` and ``id.ends``, ``meta.bytes`` and ``meta.ends``: concatenated texts and
  MessagePack, and their end offsets;
- ``schema``: the fields in the segment's encoding;
- ``field.NAME.values`` and ``field.NAME.shapes``: the concatenated arrays, and their sizes
  [records, dimensions]. A dtype unknown to safetensors is stored as bytes; the metadata names every
  dtype.

Invariants: a file is complete, on the disk and digested before a manifest names it; input is
checked against digest and bounds before any use. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus import errors
from shmbus.data import encoding
from shmbus.inspect.records import Field, RecordRow, parse_fields
from shmbus.inspect.segment_file import SegmentFile
from shmbus.segment.own_file import read_own
from shmbus_ext import _core

NO_ROUND: Final = _core.NO_ROUND
#: Bytes of waiting records that make a part: small enough for several copies in memory, large
#: enough for long writes.
_PART_BYTES: Final = 16 << 20
#: Bytes of a waiting record's Python objects, beside payload and meta.
_RECORD_BYTES: Final = 2048
#: Parts' worth of records waiting in memory, with many schemas.
_PARTS_WAITING: Final = 4
_SCALARS: Final = {
    "producer_id": "<u8",
    "sequence": "<u8",
    "order": "<u8",
    "committed_ns": "<u8",
    "policy_version": "<i8",
    "round": "<i8",
    "score": "<f8",
    "group_size": "<u4",
    "index": "<u4",
    "slot": "<u4",
    "checksum": "u1",
    "run": "<u8",
    "need": "<u2",
    "version_span": "<u4",
}
#: Dtypes native to safetensors' torch-free writer.
_KNOWN: Final = frozenset("?bBhHiIlLqQefd")


class Part(msgspec.Struct, frozen=True):
    """A snapshot's file, as the manifest names it."""

    file: str
    schema: int
    sha256: str
    nbytes: int
    records: int


class Record(msgspec.Struct, frozen=True):
    """A record with its content: head, tables, meta, and the bytes of each field."""

    producer_id: int
    sequence: int
    order: int
    committed_ns: int
    policy_version: int
    round: int
    score: float
    group_size: int
    index: int
    slot: int
    checksum: int
    instance_id: str
    schema: bytes
    shape: bytes
    meta: bytes
    fields: list[Any]
    run: int = 0
    need: int = 0
    split: str = _core.TRAIN
    version_span: int = 0

    @property
    def nbytes(self) -> int:
        """Payload and meta."""
        return len(self.meta) + sum(len(field) for field in self.fields)


def read_record(file: SegmentFile, row: RecordRow, order: int, run: int = 0) -> Record:
    """Copy a record out of a segment; `run` is its place, in a part's encoding."""
    image = file.read_payload(row, 0, row.nbytes)
    view = memoryview(image)
    fields = []
    for field in row.fields():
        count = field.itemsize
        for size in field.shape:
            count *= size
        fields.append(view[field.offset : field.offset + count])
    return Record(
        producer_id=row.producer_id,
        sequence=row.sequence,
        order=order,
        committed_ns=row.committed_ns,
        policy_version=row.policy_version,
        round=NO_ROUND if row.round is None else row.round,
        score=row.score,
        group_size=row.group_size,
        index=row.index,
        slot=row.slot,
        checksum=row.flags & _core.FLAGS_KEPT,
        instance_id=row.instance_id,
        schema=row.schema,
        shape=row.shape,
        meta=bytes(view[row.meta_offset : row.meta_offset + row.meta_bytes]),
        fields=fields,
        run=run,
        need=row.need,
        split=file.split_label(row.split),
        version_span=row.version_span,
    )


def _safetensors() -> Any:
    try:
        from safetensors import numpy as safetensors_numpy
    except ImportError as error:
        raise RuntimeError(
            "snapshots need safetensors; install the extra: pip install 'shmbus[snapshot]'"
        ) from error
    return safetensors_numpy


class PartWriter:
    """Collects records by schema, and writes a part whenever a schema fills it."""

    def __init__(self, directory: Path) -> None:
        _safetensors()  # fails before the first write
        self.parts: list[Part] = []
        self._directory = directory
        self._waiting: dict[bytes, list[Record]] = {}
        self._bytes: dict[bytes, int] = {}
        self._schemas: dict[bytes, int] = {}

    def add(self, record: Record) -> None:
        """Add a record."""
        self._waiting.setdefault(record.schema, []).append(record)
        nbytes = self._bytes.get(record.schema, 0) + record.nbytes + _RECORD_BYTES
        self._bytes[record.schema] = nbytes
        if nbytes >= _PART_BYTES:
            self._write(record.schema)
        elif sum(self._bytes.values()) >= _PARTS_WAITING * _PART_BYTES:
            self._write(max(self._bytes, key=self._bytes.__getitem__))

    def finish(self) -> list[Part]:
        """Write the remaining records."""
        for schema in list(self._waiting):
            self._write(schema)
        return self.parts

    def _write(self, schema: bytes) -> None:
        records = self._waiting.pop(schema)
        self._bytes.pop(schema)
        tensors, dtypes = _columns(schema, records)
        described = msgspec.json.encode(dtypes).decode()
        metadata = {"format": "shmbus-part", "version": "1", "dtypes": described}
        data = _safetensors().save(tensors, metadata)
        name = f"part-{len(self.parts):05d}.safetensors"
        write_file(self._directory / name, data)
        digest = hashlib.sha256(data).hexdigest()
        number = self._schemas.setdefault(schema, len(self._schemas))
        self.parts.append(Part(name, number, digest, len(data), len(records)))


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, and wait for the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _joined(values: Sequence[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    ends = np.cumsum([len(value) for value in values], dtype=np.uint64)
    joined = b"".join(values)
    return np.frombuffer(joined, np.uint8) if joined else np.zeros(0, np.uint8), ends


def _columns(
    schema: bytes, records: list[Record]
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    tensors: dict[str, NDArray[Any]] = {
        name: np.array([getattr(record, name) for record in records], dtype)
        for name, dtype in _SCALARS.items()
    }
    tensors["schema"], _ = _joined([schema])
    for name, values in (
        ("id", [record.instance_id.encode() for record in records]),
        ("meta", [record.meta for record in records]),
        ("split", [record.split.encode() for record in records]),
    ):
        tensors[f"{name}.bytes"], tensors[f"{name}.ends"] = _joined(values)
    dtypes = {}
    shapes = [parse_fields(record.schema, record.shape) for record in records]
    for i, field in enumerate(shapes[0]):
        flat, _ = _joined([record.fields[i] for record in records])
        known = _known_dtype(field)
        tensors[f"field.{field.name}.values"] = flat if known is None else flat.view(known)
        tensors[f"field.{field.name}.shapes"] = np.array(
            [shape[i].shape for shape in shapes], np.uint64
        ).reshape(len(records), len(field.shape))
        dtypes[field.name] = field.dtype
    return tensors, dtypes


def _known_dtype(field: Field) -> np.dtype[Any] | None:
    try:
        dtype = encoding.decode_dtype(field.name, field.dtype.encode())
    except TypeError:
        return None
    if dtype.char in _KNOWN and dtype.isnative and dtype.itemsize == field.itemsize:
        return dtype
    return None


# -- reading ----------------------------------------------------------------------------------


def damaged(path: Path, what: str) -> errors.LayoutMismatchError:
    """Return the error for an unusable file, with the next step."""
    return errors.LayoutMismatchError(
        f"{path}: {what}; it is damaged or incomplete: use another copy"
    )


def read_part(directory: Path, part: Part) -> Iterator[Record]:
    """Read a part, after checking its digest."""
    path = directory / part.file
    if path.parent != directory:
        raise damaged(path, "the manifest names a file outside its directory")
    try:
        data = read_own(str(path), "a part of a snapshot")
    except FileNotFoundError as error:
        raise damaged(path, "listed in the manifest, and missing") from error
    if len(data) != part.nbytes or hashlib.sha256(data).hexdigest() != part.sha256:
        raise damaged(
            path,
            f"expected {part.nbytes} bytes of sha256 {part.sha256[:12]}..., got {len(data)} of "
            f"{hashlib.sha256(data).hexdigest()[:12]}...",
        )
    try:
        tensors = _load(data)
        yield from _records(tensors, part)
    except (KeyError, ValueError, IndexError, OverflowError, TypeError) as error:
        raise damaged(path, f"its tensors are not those of a part: {error!r}") from error


def _load(data: bytes) -> dict[str, NDArray[Any]]:
    safetensors_numpy = _safetensors()
    from safetensors import SafetensorError

    try:
        return cast(dict[str, NDArray[Any]], safetensors_numpy.load(data))
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def read_parts(directory: Path, parts: Sequence[Part]) -> Iterator[Record]:
    """Read parts in commit order, with a part of each schema in memory at a time."""

    def of_schema(number: int) -> Iterator[Record]:
        for part in parts:
            if part.schema == number:
                yield from read_part(directory, part)

    schemas = dict.fromkeys(part.schema for part in parts)
    yield from heapq.merge(*map(of_schema, schemas), key=lambda record: record.order)


def _slices(tensors: dict[str, NDArray[Any]], name: str) -> list[bytes]:
    data = tensors[f"{name}.bytes"].tobytes()
    ends = tensors[f"{name}.ends"].tolist()
    starts = [0, *ends[:-1]] if ends else []
    if ends and (ends[-1] != len(data) or ends != sorted(ends)):
        raise ValueError(f"{name}.ends do not divide {name}.bytes")
    return [data[start:end] for start, end in zip(starts, ends, strict=True)]


def _records(tensors: dict[str, NDArray[Any]], part: Part) -> Iterator[Record]:
    scalars = {name: tensors[name].tolist() for name in _SCALARS}
    schema = tensors["schema"].tobytes()
    ids, metas = _slices(tensors, "id"), _slices(tensors, "meta")
    splits = _slices(tensors, "split")
    if {len(column) for column in (*scalars.values(), ids, metas, splits)} != {part.records}:
        raise ValueError(f"expected {part.records} records")
    described = parse_schema(schema)
    columns = []
    for field in described:
        values = tensors[f"field.{field.name}.values"]
        shapes = tensors[f"field.{field.name}.shapes"].astype(np.uint64)
        if shapes.shape != (part.records, len(field.shape)):
            raise ValueError(f"shapes of {field.name!r}")
        data = memoryview(values.tobytes())
        columns.append((field, data, shapes.tolist()))
    at = [0] * len(columns)
    for n in range(part.records):
        words: list[int] = []
        fields = []
        for i, (field, data, shapes_list) in enumerate(columns):
            count = field.itemsize
            for size in shapes_list[n]:
                count *= size
            if at[i] + count > len(data):
                raise ValueError(f"values of {field.name!r} end early")
            fields.append(data[at[i] : at[i] + count])
            at[i] += count
            words += [0, *shapes_list[n]]
        yield Record(
            **{name: column[n] for name, column in scalars.items()},
            instance_id=ids[n].decode(),
            split=splits[n].decode(),
            schema=schema,
            shape=np.array(words, "<u8").tobytes(),
            meta=metas[n],
            fields=fields,
        )


def parse_schema(schema: bytes) -> list[Field]:
    """Parse a schema's names, dtypes and dimensions, with unchecked bounds."""
    # Zeros for as many sizes as any schema can ask for: only the number of dimensions counts here.
    fields = parse_fields(schema, bytes(8 * _core.MAX_FIELDS * (_core.MAX_NDIM + 1)))
    if len({field.name for field in fields}) != len(fields):
        raise ValueError("two fields of one name")
    return fields
