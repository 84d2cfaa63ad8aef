"""A segment seen from outside: what a file in /dev/shm says of itself, read and never mapped.

Everything that operators use looks through this: it works on a bus that is live, stuck, abandoned,
damaged or of another layout, and the bus does not notice.

Invariants:

- The file is opened read-only and read by `pread`: nothing here can write to it, and a file that
  is shorter or sparser than it claims gives short reads, never a signal.
- No number of the file is used as a bound before it was checked against the file's size.
- Offsets and constants come from the core; none is written down here.
- Who is alive is told by the file locks alone, never by a pid or by age.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus import errors
from shmbus.segment.explain import layout_error
from shmbus.segment.names import shm_path
from shmbus_ext import _core

_LAYOUT: Final = _core.layout()
_HEADER: Final[np.dtype[Any]] = np.dtype(dict(_LAYOUT["bus_header"]))  # type: ignore[call-overload]
_SLOT: Final[np.dtype[Any]] = np.dtype(dict(_LAYOUT["producer_slot"]))  # type: ignore[call-overload]
_EXTENT: Final[np.dtype[Any]] = np.dtype(dict(_LAYOUT["extent_desc"]))  # type: ignore[call-overload]
_SCHEMA: Final[np.dtype[Any]] = np.dtype(dict(_LAYOUT["schema_entry"]))  # type: ignore[call-overload]
_WANTED_BYTES: Final = _core.WANTED_ROWS * _LAYOUT["wanted_row"]["itemsize"]
_LOW: Final = 0xFFFFFFFF
#: Records of a run that are described at a time, so that a large bus is never in memory at once.
_ROWS: Final = 1024


class Run(msgspec.Struct, frozen=True):
    """Neighbouring extents that a lane leases together.

    Attributes
    ----------
    extent, span : int
        Its first extent, and how many there are.
    slot : int
        The lane that leases it; the collector's own has the number `max_producers`.
    generation : int
        Of the lease.
    order : int
        Place in the lane.
    used, room : int
        Bytes that hold records, and bytes that there are.
    sealed : bool
        Whether nothing more will be written there.
    writer_pins : int
        Writable views that are still out.
    producer_id : int
        Who leased it.
    """

    extent: int
    span: int
    slot: int
    generation: int
    order: int
    used: int
    room: int
    sealed: bool
    writer_pins: int
    producer_id: int


class Field(msgspec.Struct, frozen=True):
    """One array of a record: its name, dtype as text, shape, and offset within the record."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    itemsize: int


class RecordRow(msgspec.Struct, frozen=True):
    """One record as the walk found it; `read_records` explains the fields."""

    extent: int
    generation: int
    slot: int
    offset: int
    state: str
    verdict: str
    nbytes: int
    producer_id: int
    sequence: int
    lane_number: int
    flags: int
    policy_version: int
    score: float
    group_size: int
    index: int
    epoch: int | None
    committed_ns: int
    meta_offset: int
    meta_bytes: int
    payload_bytes: int
    instance_id: str
    field_count: int
    schema: bytes
    shape: bytes

    @property
    def key(self) -> str | tuple[str, int]:
        """What groups it: the instance id, with the epoch where its producer gave one."""
        return self.instance_id if self.epoch is None else (self.instance_id, self.epoch)

    @property
    def moved(self) -> bool:
        """Whether the collector has written it again, out of the way of others."""
        return bool(self.flags & _core.FLAG_MOVED)

    @property
    def failed(self) -> bool:
        """Whether it reports that its sample failed."""
        return bool(self.flags & _core.FLAG_FAILED)

    @property
    def sized(self) -> bool:
        """Whether its group_size is what its producer said."""
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


class Scan(msgspec.Struct, frozen=True):
    """What counting one run's records has found.

    Attributes
    ----------
    keys : bytes
        (producer, sequence) of each committed record, as pairs of u64.
    reserved, committed, aborted, released, unknown : int
        Records by state; committed without those whose owner has not counted them yet.
    nbytes : int
        Ring bytes of the committed ones.
    newest_ns : int
        When the newest was committed, also of those that were released; 0 for none.
    unreadable : int
        Bytes behind a damaged frame, which nobody can walk.
    changed : bool
        Whether the run was freed meanwhile, so that the rest says nothing.
    """

    keys: bytes
    reserved: int
    committed: int
    aborted: int
    released: int
    unknown: int
    nbytes: int
    newest_ns: int
    unreadable: int
    changed: bool


def open_file(path: str) -> int:
    """Open for reading, and never wait for, follow or truncate what turns out to be no file."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


class SegmentFile:
    """One file that is, or claims to be, a segment.

    Parameters
    ----------
    name : str
        The bus; also a name that `check_name` refuses, if a file is called so.

    Raises
    ------
    BusNotFoundError
        There is no such file.
    LayoutMismatchError
        It is not a regular file.
    PermissionError
        It belongs to another user.

    Attributes
    ----------
    problem : LayoutMismatchError or None
        Why this process cannot read it: unfinished, foreign, truncated or damaged.
    walkable : bool
        Whether its tables mean anything: also those of a truncated one do, where they are there.
        Otherwise only `header`, `file_bytes` and the locks do.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = shm_path(name)
        self.fd = -1
        try:
            self.fd = open_file(self.path)
        except FileNotFoundError as error:
            raise not_found(name) from error
        except PermissionError as error:
            raise PermissionError(
                f"bus {name!r}: may not read {self.path} as uid {os.geteuid()}; a bus is for the "
                "user who created it"
            ) from error
        except OSError as error:
            raise errors.LayoutMismatchError(
                f"bus {name!r}: {self.path} is no segment: {error.strerror}"
            ) from error
        try:
            self.info = os.fstat(self.fd)
            if not stat.S_ISREG(self.info.st_mode):
                raise errors.LayoutMismatchError(f"bus {name!r}: {self.path} is no regular file")
            self.file_bytes = self.info.st_size
            raw = self._read(_core.HEADER_BYTES, 0)
            self.header: Any = np.frombuffer(raw, _HEADER, count=1)[0]
            self.problem, self.walkable = self._check(raw)
        except BaseException:
            os.close(self.fd)
            raise
        self.extent_bytes = int(self.header["extent_bytes"])
        self.extent_count = int(self.header["extent_count"])
        self.max_producers = int(self.header["max_producers"])
        self.data_offset = int(self.header["data_offset"])

    def _read(self, count: int, position: int) -> bytes:
        """So many bytes; zeros where the file has none."""
        parts = []
        while count > 0:
            part = os.pread(self.fd, min(count, 1 << 26), position)
            if not part:
                parts.append(bytes(count))
                break
            parts.append(part)
            position += len(part)
            count -= len(part)
        return b"".join(parts)

    def _check(self, raw: bytes) -> tuple[errors.LayoutMismatchError | None, bool]:
        """Make the core's checks of a header, in the core's order and words."""
        header = self.header
        version, found_hash = int(header["layout_version"]), int(header["layout_hash"])
        status = None
        holds = self._geometry_holds(raw)
        if self.file_bytes == 0 or int(header["magic"]) == 0:
            status = ("unfinished", 0, 0)
        elif int(header["magic"]) != _core.MAGIC:
            status = ("magic", 0, 0)
        elif version != _core.LAYOUT_VERSION:
            status = ("version", version, _core.LAYOUT_VERSION)
        elif found_hash != _core.LAYOUT_HASH & _LOW:
            status = ("hash", found_hash, _core.LAYOUT_HASH & _LOW)
        elif int(header["segment_bytes"]) > self.file_bytes:
            status = ("truncated", self.file_bytes, 0)
        elif not holds:
            status = ("geometry", 0, 0)
        if status is None:
            return None, True
        problem = layout_error(self.name, *status)
        return problem, holds and status[0] == "truncated"

    def _geometry_holds(self, raw: bytes) -> bool:
        header = self.header
        start = _HEADER.fields["layout_version"][1] if _HEADER.fields else 0
        end = _HEADER.fields["geometry_crc"][1] if _HEADER.fields else 0
        extent, count = int(header["extent_bytes"]), int(header["extent_count"])
        offset, producers = int(header["data_offset"]), int(header["max_producers"])
        return (
            _core.crc32c(raw[start:end]) == int(header["geometry_crc"])
            and 1 <= count <= _core.MAX_EXTENTS
            and 1 <= producers <= _core.MAX_PRODUCERS
            and extent >= _core.PAGE
            and offset >= _tables_bytes(producers, count)
            and int(header["segment_bytes"]) == offset + extent * count
        )

    # -- the tables -----------------------------------------------------------------------------

    def require(self) -> None:
        """Raise `problem` where there is one."""
        if self.problem is not None:
            raise self.problem

    def refresh(self) -> None:
        """Read the header's words anew; the geometry stays what it was."""
        self.header = np.frombuffer(self._read(_core.HEADER_BYTES, 0), _HEADER, count=1)[0]

    def released(self) -> tuple[int, ...]:
        """Counters of releases, by reason."""
        raw = self._read(8 * _core.REASONS, _core.RELEASED_OFFSET)
        return tuple(np.frombuffer(raw, "<u8").tolist())

    def slots(self) -> NDArray[Any]:
        """Read the producer slots; the last is the collector's own lane."""
        count = self.max_producers + 1
        raw = self._read(count * _SLOT.itemsize, _core.HEADER_BYTES)
        return np.frombuffer(raw, _SLOT)

    def extents(self) -> NDArray[Any]:
        """Read the extents' descriptors."""
        position = _core.HEADER_BYTES + (self.max_producers + 1) * _SLOT.itemsize
        return np.frombuffer(self._read(self.extent_count * _EXTENT.itemsize, position), _EXTENT)

    def intent(self) -> tuple[int, int, frozenset[tuple[int, int]]]:
        """(reason, count, {(extent, offset)}) of a release that a dead collector left half done."""
        header = self.header
        count, reason = int(header["intent_count"]), int(header["intent_reason"])
        if not 0 < count <= _core.MAX_GROUP_SIZE or reason >= _core.REASONS:
            return 0, 0, frozenset()
        position = (
            _core.HEADER_BYTES
            + (self.max_producers + 1) * _SLOT.itemsize
            + self.extent_count * _EXTENT.itemsize
        )
        log = self._read(8 * count, position)
        about = np.array([(count << 32) | reason, int(header["intent_base"])], "<u8").tobytes()
        if _core.crc32c(about + log) != int(header["intent_crc"]):
            return 0, 0, frozenset()
        mask = (1 << _core.REF_OFFSET_BITS) - 1
        refs = np.frombuffer(log, "<u8").tolist()
        places = ((r >> _core.REF_OFFSET_BITS, (r & mask) * _core.RECORD_ALIGN) for r in refs)
        done = self.released()[reason] - int(header["intent_base"])
        return reason, 0 if done == count else count, frozenset(places)

    def wanted_table(self) -> bytes:
        """Read the table of wanted samples, as it lies there."""
        end = _tables_bytes(self.max_producers, self.extent_count)
        return self._read(_WANTED_BYTES, end - _WANTED_BYTES)

    def runs(self) -> list[Run]:
        """Every run that somebody leases, lane by lane in the order of writing."""
        table = self.extents()
        words, spans = table["word"].astype(np.uint64), table["span"].astype(np.uint64)
        low = words & np.uint64(_LOW)
        owned = (low >= 1) & (low <= self.max_producers + 1)
        whole = owned & ((words >> np.uint64(32)) == (spans >> np.uint64(32)))
        found: list[Run] = []
        covered = 0
        for i in np.flatnonzero(whole).tolist():
            span = int(spans[i]) & _LOW
            if i < covered or not 1 <= span <= self.extent_count - i:
                continue
            covered = i + span
            row = table[i]
            room = span * self.extent_bytes
            found.append(
                Run(
                    extent=i,
                    span=span,
                    slot=int(low[i]) - 1,
                    generation=int(words[i]) >> 32,
                    order=int(row["order"]),
                    used=min(int(row["used"]), room),
                    room=room,
                    sealed=bool(row["sealed"]),
                    writer_pins=int(row["writer_pins"]),
                    producer_id=int(row["producer_id"]),
                )
            )
        return sorted(found, key=lambda run: (run.slot, run.order))

    def free_extents(self) -> int:
        """Extents that nobody leases."""
        return int(np.count_nonzero((self.extents()["word"] & np.uint64(_LOW)) == 0))

    def still(self, run: Run) -> bool:
        """Whether a run is still the lease that it was when it was found."""
        position = (
            _core.HEADER_BYTES
            + (self.max_producers + 1) * _SLOT.itemsize
            + run.extent * _EXTENT.itemsize
        )
        word = int(np.frombuffer(self._read(_EXTENT.itemsize, position), _EXTENT)[0]["word"])
        return word == (run.generation << 32 | (run.slot + 1))

    # -- records --------------------------------------------------------------------------------

    def position(self, extent: int) -> int:
        """Where an extent begins in the file."""
        return self.data_offset + extent * self.extent_bytes

    def scan(self, run: Run, below: int) -> Scan:
        """Count a run's records; of the committed ones those that its lane numbered below."""
        keys, counts, nbytes, newest_ns, end, cut = _core.scan_run(
            self.fd, self.position(run.extent), run.used, run.extent, run.generation, below
        )
        changed = not self.still(run)
        return Scan(keys, *counts, nbytes, newest_ns, run.used - end if cut else 0, changed)

    def read_records(
        self, run: Run, *, payload: bool = False, start: int = 0
    ) -> Iterator[RecordRow]:
        """Yield a run's records in the order of writing.

        Parameters
        ----------
        run : Run
            From `runs`.
        payload : bool
            Also verify payload checksums, where records carry them, which reads every byte.
        start : int
            Offset of the first record to yield, from an earlier walk of the same run.

        Yields
        ------
        RecordRow
            state: "reserved" | "committed" | "aborted" | "released" | "unknown". verdict: "ok", or
            which checksum does not hold: "header", "payload"; a "frame" that does not hold ends
            the run with one row of state "unreadable", whose nbytes nobody can walk.
        """
        at = start
        while at < run.used:
            rows, end, cut = _core.read_run(
                self.fd,
                self.position(run.extent),
                run.used,
                run.extent,
                run.generation,
                at,
                _ROWS,
                payload,
            )
            bad = cut or any(row[2] != "ok" for row in rows)
            if bad and not self.still(run):
                return
            for row in rows:
                yield RecordRow(run.extent, run.generation, run.slot, *row)
            if cut:
                yield _unreadable(run, end)
                return
            at = end

    def read_payload(self, row: RecordRow, offset: int, count: int) -> bytes:
        """Bytes of a record, from an offset within it."""
        return self._read(count, self.position(row.extent) + row.offset + offset)

    # -- who is alive ---------------------------------------------------------------------------

    def in_use(self) -> bool:
        """Whether a living process has this segment open, in whatever container."""
        return _core.any_lock_held(self.fd)

    def slot_alive(self, slot: int) -> bool:
        """Whether a living process owns the slot."""
        return _core.lock_held(self.fd, _core.LOCK_SLOT + slot)

    def viewed(self, run: Run) -> bool:
        """Whether a process that a daemon serves looks at a record there."""
        extents = range(run.extent, run.extent + run.span)
        return any(_core.lock_held(self.fd, _core.LOCK_VIEW + extent) for extent in extents)

    def collector_alive(self) -> bool:
        """Whether a living process collects."""
        return _core.lock_held(self.fd, _core.LOCK_COLLECTOR)

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _tables_bytes(max_producers: int, extent_count: int) -> int:
    return (
        _core.HEADER_BYTES
        + (max_producers + 1) * _SLOT.itemsize
        + extent_count * _EXTENT.itemsize
        + 8 * _core.MAX_GROUP_SIZE
        + _WANTED_BYTES
    )


def _unreadable(run: Run, at: int) -> RecordRow:
    return RecordRow(
        extent=run.extent,
        generation=run.generation,
        slot=run.slot,
        offset=at,
        state="unreadable",
        verdict="frame",
        nbytes=run.used - at,
        producer_id=run.producer_id,
        sequence=0,
        lane_number=0,
        flags=0,
        policy_version=0,
        score=0.0,
        group_size=0,
        index=0,
        epoch=None,
        committed_ns=0,
        meta_offset=0,
        meta_bytes=0,
        payload_bytes=0,
        instance_id="",
        field_count=0,
        schema=b"",
        shape=b"",
    )


def not_found(name: str) -> errors.BusNotFoundError:
    """Say that there is no such bus, and which ones there are."""
    others = bus_names()
    there = f"there are: {', '.join(map(repr, others[:8]))}" if others else "there is none at all"
    return errors.BusNotFoundError(
        f"there is no bus {name!r} ({shm_path(name)} does not exist); {there}; create "
        f"it with shmbus.Bus.create({name!r}), or check the name and that both sides see the same "
        "/dev/shm (containers: --ipc or a shared mount)"
    )


def bus_names() -> list[str]:
    """Names of all regular files that are called like segments, sorted."""
    prefix = Path(shm_path(""))
    names = []
    for entry in os.scandir(prefix.parent):
        with contextlib.suppress(FileNotFoundError):  # it went away meanwhile
            if entry.name.startswith(prefix.name) and entry.is_file(follow_symlinks=False):
                names.append(entry.name[len(prefix.name) :])
    return sorted(name for name in names if name)
