"""Snapshots: every undelivered trajectory to disk and back, across a reboot.

A snapshot is a directory: ``manifest.json``, and parts (`shmbus.store.parts`) with the records.

Invariants:

- The directory appears atomically (`shmbus.store.directory`).
- A snapshot shows a single instant: no process collects during the snapshot, and trajectories
  committed after its beginning stay out.
- A restored bus appears atomically, by a link. Each record keeps its producer's number, the ledger
  its counts, and no later producer gets a used number. A snapshot is restored once, unless the
  caller insists, so no trajectory is delivered twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from shmbus import errors
from shmbus._version import VERSION
from shmbus.base.arguments import parse_size, process_label
from shmbus.base.format import show_size
from shmbus.base.ledger import REASONS
from shmbus.data.encoding import decodable
from shmbus.data.schema import SchemaField, encode, fields_of
from shmbus.data.status_types import Count, ProducerSlot
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.undelivered import counters, stream_undelivered
from shmbus.segment import creation, lifecycle
from shmbus.segment.names import check_name, shm_path
from shmbus.segment.own_file import read_own
from shmbus.store.directory import MANIFEST, sync, write_directory
from shmbus.store.parts import (
    Part,
    PartWriter,
    Record,
    damaged,
    read_parts,
    read_record,
    write_file,
)
from shmbus_ext import _core

#: Marker of a restored snapshot.
_RESTORED: Final = "restored.json"
_FORMAT: Final = "shmbus-snapshot"
_VERSION: Final = 1


@decodable
class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a snapshot."""

    #: "shmbus-snapshot" and 1.
    format: str
    version: int
    #: The writer's shmbus version.
    written_by: str
    bus: str
    taken_unix_ns: Count
    capacity: Count
    extent_bytes: Count
    max_producers: Annotated[int, msgspec.Meta(ge=1, le=_core.MAX_PRODUCERS)]
    #: The bus's counters; `next_round` is 0 from a shmbus before rounds.
    policy_version: Count
    next_producer_id: Count
    next_round: Count = 0
    #: The ledger's counts of acknowledged and dropped trajectories.
    released: dict[str, Count]
    #: The ledger's counts of committed trajectories, by slot.
    slots: list[ProducerSlot]
    #: Undelivered trajectories in the parts; and trajectories counted by the ledger but readable by
    #: no walk: the first consumer after a restore counts them as corrupt.
    records: Count
    unreadable: Count
    #: By split, in the order of their numbers: acknowledged and dropped; empty from a shmbus before
    #: splits.
    splits: dict[str, tuple[Count, Count]] = {}
    #: Buses of origin, the oldest first: an identity, and the bound above its producer numbers.
    #: Each range begins at the bound before.
    origins: list[tuple[Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")], Count]] = []
    parts: list[Part]
    #: The bus's declared fields; None without a declaration.
    schema: list[SchemaField] | None = None
    #: The bus's request capacity and bounds; of an older shmbus the defaults.
    bounds: creation.Bounds = creation.NO_BOUNDS


# -- taking -----------------------------------------------------------------------------------


def take(name: str, directory: str | os.PathLike[str], *, collecting: bool = False) -> Manifest:
    """Write undelivered trajectories to a directory; the collector passes `collecting`."""
    check_name(name)
    with contextlib.ExitStack() as stack:
        if not collecting:
            stack.enter_context(_collector(name))
        file = stack.enter_context(SegmentFile(name))
        file.require()
        return write_directory(Path(directory), lambda path: _write(file, path))


@contextlib.contextmanager
def _collector(name: str) -> Iterator[None]:
    """Act as the collector: finish a dead collector's work, and keep processes from releasing."""
    segment = lifecycle.open_segment(name)
    try:
        reader = _core.Reader(segment, f"snapshot, {process_label()}")
    except BaseException:
        segment.close()
        raise
    try:
        yield
    finally:
        reader.close()


def _write(file: SegmentFile, directory: Path) -> Manifest:
    declared = file.schema()
    writer = PartWriter(directory)
    released, committed, _ = counters(file)
    slots = _slots(file, committed)
    limit = {slot: count for slot, count in enumerate(committed)}
    written = 0
    producers: set[int] = set()
    runs = {run.extent: run.span << 32 | run.extent + 1 for run in file.runs()}
    for row in stream_undelivered(file):
        if not row.moved and row.lane_number >= limit.get(row.slot, 0):
            continue  # committed after the beginning
        writer.add(read_record(file, row, written, runs.get(row.extent, 0)))
        producers.add(row.producer_id)
        written += 1
    header = file.header
    with contextlib.closing(lifecycle.open_segment(file.name)) as segment:
        bounds = creation.Bounds.of(segment)
    return Manifest(
        format=_FORMAT,
        version=_VERSION,
        written_by=VERSION,
        bus=file.name,
        taken_unix_ns=time.time_ns(),
        capacity=file.extent_bytes * file.extent_count,
        extent_bytes=file.extent_bytes,
        max_producers=file.max_producers,
        policy_version=int(header["policy_version"]),
        next_producer_id=int(header["next_producer_id"]),
        next_round=int(header["next_round"]),
        released=dict(zip(REASONS, released, strict=True)),
        slots=slots,
        records=written,
        unreadable=max(0, sum(committed) - sum(released) - written),
        splits={
            label: (int(row["acked"]), int(row["dropped"])) for label, row in file.labelled_splits()
        },
        origins=_origins(file, producers, int(header["next_producer_id"])),
        parts=writer.finish(),
        schema=None if declared is None else list(fields_of(declared)),
        bounds=bounds,
    )


def _origins(file: SegmentFile, producers: set[int], next_id: int) -> list[tuple[str, int]]:
    """Name the origin buses of these producers' records, this bus last."""
    found = []
    first = 0
    for identity, bound in file.ancestors():
        if any(first <= producer < bound for producer in producers):
            found.append((identity, bound))
        first = max(first, bound)
    return [*found, (file.header["identity"].tobytes().hex(), next_id)]


def _slots(file: SegmentFile, committed: tuple[int, ...]) -> list[ProducerSlot]:
    return [
        ProducerSlot(
            slot=slot,
            producer_id=int(row["producer_id"]),
            pid=int(row["pid"]),
            label=row["label"].split(b"\0", 1)[0].decode("utf-8", "replace"),
            committed=committed[slot],
            aborted=int(row["aborted"]),
        )
        for slot, row in enumerate(file.slots()[:-1])
        if int(row["producer_id"])
    ]


# -- restoring --------------------------------------------------------------------------------


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read and check a snapshot's manifest; reading a part checks the part."""
    path = Path(directory) / MANIFEST
    try:
        raw = read_own(str(path), "the manifest of a snapshot")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            errno.ENOENT, "no snapshot there (`shmbus snapshot NAME DIR` makes one)", str(path)
        ) from error
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
        check_name(manifest.bus)
    except (msgspec.MsgspecError, ValueError) as error:
        raise damaged(path, f"expected the manifest of a snapshot: {error}") from error
    if manifest.format != _FORMAT or manifest.version != _VERSION:
        raise errors.LayoutMismatchError(
            f"{path}: expected {_FORMAT} of version {_VERSION}, got {manifest.format!r} of version "
            f"{manifest.version}; restore it with shmbus {manifest.written_by}"
        )
    # Older snapshots lack these counts: samples could not fail, be filtered or relayed yet.
    if {*manifest.released, "failed", "filtered", "relayed"} != set(REASONS):
        raise damaged(path, f"expected counts of {', '.join(REASONS)}")
    if sum(part.records for part in manifest.parts) != manifest.records:
        raise damaged(path, f"its parts do not hold {manifest.records} records")
    slots = {slot.slot for slot in manifest.slots}
    if len(slots) != len(manifest.slots) or max(slots, default=0) >= manifest.max_producers:
        raise damaged(path, f"expected {manifest.max_producers} slots at the most, each once")
    committed = sum(slot.committed for slot in manifest.slots)
    accounted = sum(manifest.released.values()) + manifest.records + manifest.unreadable
    if committed != accounted:
        raise damaged(path, f"{committed} were committed, and {accounted} are accounted for")
    return manifest


def restore(
    directory: str | os.PathLike[str],
    name: str | None = None,
    *,
    capacity: int | str | None = None,
    again: bool = False,
) -> Manifest:
    """Make a bus from a snapshot, once unless `again`, with records, ledger and numbers."""
    directory = Path(os.path.abspath(directory))
    manifest = read_manifest(directory)
    name = check_name(manifest.bus if name is None else name)
    size = manifest.capacity if capacity is None else parse_size(capacity, "capacity")
    extent_bytes = manifest.extent_bytes if size == manifest.capacity else 0
    if os.path.lexists(shm_path(name)):
        raise _exists(name)
    before = restored_as(directory)
    if before is not None and not again:
        raise errors.ProtocolError(
            f"{directory} was restored already, as bus {before!r}: a second restore delivers its "
            "trajectories twice; add --again to restore anyway"
        )
    how = (size, manifest.max_producers, extent_bytes)
    if not _restore_as(name, how, manifest, directory, by_runs=False) and not (
        # In commit order records fill other runs and leave other gaps; their old runs fit.
        extent_bytes and _restore_as(name, how, manifest, directory, by_runs=True)
    ):
        raise errors.CapacityError(
            f"bus {name!r}: {manifest.records} records of {directory} do not fit into "
            f"{show_size(size)}; restore with a larger capacity"
        )
    if before is None:
        write_file(directory / _RESTORED, msgspec.json.encode({"bus": name}))
        sync(directory)
    return manifest


def restored_as(directory: str | os.PathLike[str]) -> str | None:
    """Name the bus restored from a snapshot; None before a restore."""
    try:
        raw = read_own(str(Path(directory) / _RESTORED), "the note of a restored snapshot")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return str(msgspec.json.decode(raw, type=dict[str, str])["bus"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return "?"  # died while writing this note, with the bus complete


def _exists(name: str) -> errors.BusExistsError:
    return errors.BusExistsError(
        f"bus {name!r} exists already ({shm_path(name)}), and a snapshot is restored "
        "into a new one only: choose another name, or remove it with shmbus.unlink if it is "
        "not needed"
    )


def _restore_as(
    name: str, how: tuple[int, int, int], manifest: Manifest, directory: Path, *, by_runs: bool
) -> bool:
    """Make the bus and name it; return False, without a bus, if the records do not fit."""
    # A private name until the link; `shmbus gc` finds the bus if this process dies.
    hidden = f"restoring-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        declared = None if manifest.schema is None else encode(manifest.schema)
        segment = creation.create_segment(
            hidden, *how, schema=declared, crowded=True, bounds=manifest.bounds
        )
    except (TypeError, ValueError, struct.error) as error:
        if isinstance(error, errors.CapacityError):
            raise
        raise damaged(
            directory / MANIFEST, f"no bus has its sizes and its schema: {error}"
        ) from error
    try:
        if not _fill(segment, manifest, directory, by_runs=by_runs):
            return False
        try:
            os.link(shm_path(hidden), shm_path(name))
        except FileExistsError as error:
            raise _exists(name) from error
    finally:
        lifecycle.unlink(hidden)
        segment.close()
    return True


def _fill(segment: _core.Segment, manifest: Manifest, directory: Path, *, by_runs: bool) -> bool:
    """Write every record and count; return False without space."""
    restorer = _core.Restorer(segment)
    seen: set[tuple[int, int]] = set()
    for record in read_parts(directory, manifest.parts):
        number = (record.producer_id, record.sequence)
        if number in seen or record.producer_id >= manifest.next_producer_id:
            raise damaged(directory / MANIFEST, f"record {number} is there twice, or cannot be")
        seen.add(number)
        if by_runs and not record.run:
            return False  # a snapshot of a shmbus without recorded runs
        try:
            split = _core.split_number(segment, record.split)
            fits = _put(restorer, record, split, record.run if by_runs else 0)
        except (ValueError, OverflowError, TypeError) as error:
            raise damaged(directory, f"record {number}: {error}") from error
        if not fits:
            return False
    try:
        restorer.ancestors([(bytes.fromhex(name), bound) for name, bound in manifest.origins])
        for label, (acknowledged, dropped) in manifest.splits.items():
            restorer.split(_core.split_number(segment, label), acknowledged, dropped)
        restorer.finish(
            tuple(manifest.released.get(reason, 0) for reason in REASONS),
            [
                (slot.slot, slot.producer_id, slot.pid, slot.label, slot.committed, slot.aborted)
                for slot in manifest.slots
            ],
            manifest.next_producer_id,
            manifest.policy_version,
            manifest.next_round,
        )
    except ValueError as error:
        raise damaged(directory / MANIFEST, f"its counts: {error}") from error
    return True


def _put(restorer: _core.Restorer, record: Record, split: int, run: int) -> bool:
    return restorer.put(
        record.producer_id,
        record.sequence,
        record.policy_version,
        record.version_span,
        record.score,
        record.group_size,
        record.need,
        record.index,
        split,
        record.round,
        record.checksum & _core.FLAGS_KEPT,
        record.instance_id.encode(),
        record.schema,
        record.shape,
        record.meta,
        record.fields,
        run,
    )
