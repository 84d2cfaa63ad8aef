"""A segment seen from outside: its file in /dev/shm, read and never mapped.

All operators' tools read through this module. It works on a live, stuck, abandoned or damaged bus,
or a bus of another layout, unnoticed by the bus.

Invariants:

- The file is opened read-only and read by `pread`: nothing here can write the file. A file
  shorter or sparser than claimed gives short reads, never a signal.
- A number from the file becomes a bound only after a check against the file's size.
- Offsets and constants come from the core; this module writes down none.
- A process lives while it holds its file lock; a pid or an age proves nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shmbus import errors
from shmbus.base.closing import ClosedByWith
from shmbus.data.schema import decode_part
from shmbus.inspect.records import STRUCTS, RecordRow, Run, Scan
from shmbus.segment.explain import not_found_error
from shmbus.segment.names import shm_path
from shmbus_ext import _core

_HEADER: Final = STRUCTS["bus_header"]
_EXTENT: Final = STRUCTS["extent_desc"]
_ANCESTOR: Final = np.dtype([("identity", "V16"), ("producers", "<u8")])
_LOW: Final = 0xFFFFFFFF
#: Records of a run read at a time: a large bus never lies in memory as a whole.
_ROWS: Final = 1024


def open_file(path: str) -> int:
    """Open for reading; never wait for, follow or truncate anything but a regular file."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


class SegmentFile(ClosedByWith):
    """A file that is, or claims to be, a segment."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = shm_path(name)
        self._split_labels: dict[int, str] = {}
        self.fd = -1
        try:
            self.fd = open_file(self.path)
        except FileNotFoundError as error:
            raise not_found_error(name) from error
        except PermissionError as error:
            raise PermissionError(
                f"bus {name!r}: may not read {self.path} as uid {os.geteuid()}; run as the user "
                "that created the bus"
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
            raw = self.read(_core.HEADER_BYTES, 0)
            self.header: Any = np.frombuffer(raw, _HEADER, count=1)[0]
            #: Obstacle to reading: unfinished, foreign, truncated or damaged.
            self.problem: errors.LayoutMismatchError | None = None
            #: Offset and bytes of each table; empty if only `header`, `file_bytes` and the locks
            #: mean anything. A truncated file can be read up to its end.
            self.tables = self._survey(raw)
        except BaseException:
            os.close(self.fd)
            raise
        self.extent_bytes = int(self.header["extent_bytes"])
        self.extent_count = int(self.header["extent_count"])
        self.max_producers = int(self.header["max_producers"])
        self.data_offset = int(self.header["data_offset"])

    def read(self, count: int, position: int) -> bytes:
        """Read `count` bytes, with zeros beyond the end of the file."""
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

    def _survey(self, raw: bytes) -> dict[str, tuple[int, int]]:
        """Place the tables by the header, and keep the problem of an unusable file."""
        for file_bytes in (self.file_bytes, int(self.header["segment_bytes"])):
            try:
                return _core.Segment.survey(raw, file_bytes, self.name)
            except errors.LayoutMismatchError as error:
                self.problem = self.problem or error
        return {}

    # -- the tables -----------------------------------------------------------------------------

    def require(self) -> None:
        """Raise `problem` if set."""
        if self.problem is not None:
            raise self.problem

    def refresh(self) -> None:
        """Read the header again; the geometry stays unchanged."""
        self.header = np.frombuffer(self.read(_core.HEADER_BYTES, 0), _HEADER, count=1)[0]

    def released(self) -> tuple[int, ...]:
        """Read the counters of releases, by reason."""
        raw = self.read(8 * _core.REASONS, _core.RELEASED_OFFSET)
        return tuple(np.frombuffer(raw, "<u8").tolist())

    def table(self, name: str) -> bytes:
        """Read a table's bytes."""
        offset, count = self.tables[name]
        return self.read(count, offset)

    def rows(self, name: str, struct: str) -> NDArray[Any]:
        """Read a table of structs."""
        return np.frombuffer(self.table(name), STRUCTS[struct])

    def slots(self) -> NDArray[Any]:
        """Read the producer slots; the last is the collector's own lane."""
        return self.rows("slots", "producer_slot")

    def extents(self) -> NDArray[Any]:
        """Read the extents' descriptors."""
        return self.rows("extents", "extent_desc")

    def intent(self) -> tuple[int, int, frozenset[tuple[int, int]]]:
        """Read (reason, count, {(extent, offset)}) of a release left unfinished by a collector."""
        header = self.header
        count, reason = int(header["intent_count"]), int(header["intent_reason"])
        if not 0 < count <= _core.MAX_GROUP_SIZE or reason >= _core.REASONS:
            return 0, 0, frozenset()
        log = self.read(8 * count, self.tables["intents"][0])
        about = np.array(
            [
                (count << 32) | reason,
                int(header["intent_base"]),
                int(header["intent_split"]),
                int(header["intent_split_base"]),
            ],
            "<u8",
        ).tobytes()
        if _core.crc32c(about + log) != int(header["intent_crc"]):
            return 0, 0, frozenset()
        mask = (1 << _core.REF_OFFSET_BITS) - 1
        refs = np.frombuffer(log, "<u8").tolist()
        locations = ((r >> _core.REF_OFFSET_BITS, (r & mask) * _core.RECORD_ALIGN) for r in refs)
        done = self.released()[reason] - int(header["intent_base"])
        return reason, 0 if done == count else count, frozenset(locations)

    def schema(self) -> _core.DeclaredSchema | None:
        """Read the declared schema; LayoutMismatchError for a damaged schema."""
        return decode_part(self.name, self.table("declared"))

    def figures(self) -> tuple[list[list[int]], list[float], int]:
        """Read the histograms of deliveries, their sums, and the useless groups."""
        raw = np.frombuffer(self.table("figures"), "<u8")
        words, count = _core.FIGURE_WORDS, len(_core.FIGURE_BOUNDS)
        entries = raw[: words * count].reshape(count, words)
        sums = np.ascontiguousarray(entries[:, -1]).view("<f8")
        return entries[:, :-1].tolist(), sums.tolist(), int(raw[words * count])

    def ancestors(self) -> list[tuple[str, int]]:
        """Name the buses from which this bus was restored, the oldest first."""
        # Producers of a bus carry numbers below its own, and not below its predecessor's.
        rows = np.frombuffer(self.header["ancestors"].tobytes(), _ANCESTOR)
        named = [(row["identity"].tobytes().hex(), int(row["producers"])) for row in rows]
        return [(identity, producers) for identity, producers in named if producers]

    def splits(self) -> NDArray[Any]:
        """Read the table of splits."""
        return self.rows("splits", "split_entry")

    def split_label(self, number: int) -> str:
        """Return the label of a split, or "#" and its number without a label; not escaped."""
        label = self._split_labels.get(number, "")
        if not label and number < _core.MAX_SPLITS:
            label = _label(bytes(self.splits()["label"][number]))
            if label:
                self._split_labels[number] = label  # labels never change
        return label or f"#{number}"

    def labelled_splits(self) -> Iterator[tuple[str, Any]]:
        """Yield label and row of each split with a label."""
        for number, row in enumerate(self.splits()):
            if (label := self.split_label(number)) != f"#{number}":
                yield label, row

    def runs(self) -> list[Run]:
        """Find every leased run, lane by lane in the order of writing."""
        table = self.extents()
        words, spans = table["word"].astype(np.uint64), table["span"].astype(np.uint64)
        low = words & np.uint64(_LOW)
        owned = (low >= 1) & (low <= self.max_producers + 1)
        whole = owned & ((words >> np.uint64(32)) == (spans >> np.uint64(32)))
        found: list[Run] = []
        covered = 0
        at = np.flatnonzero(whole)
        # Column by column: a field of a row costs more than a column of a hundred.
        columns = [table[name][at].tolist() for name in ("word", "span", "order", "used")]
        for i, word, packed, order, used in zip(at.tolist(), *columns, strict=True):
            span = packed & _LOW
            if i < covered or not 1 <= span <= self.extent_count - i:
                continue
            covered = i + span
            room = span * self.extent_bytes
            found.append(
                Run(
                    extent=i,
                    span=span,
                    slot=(word & _LOW) - 1,
                    generation=word >> 32,
                    order=order,
                    used=min(used, room),
                    room=room,
                )
            )
        return sorted(found, key=lambda run: (run.slot, run.order))

    def free_extents(self) -> int:
        """Count the free extents."""
        return int(np.count_nonzero((self.extents()["word"] & np.uint64(_LOW)) == 0))

    def still(self, run: Run) -> bool:
        """Tell if a run is still under its original lease."""
        offset = self.tables["extents"][0] + run.extent * _EXTENT.itemsize
        raw = self.read(_EXTENT.itemsize, offset)
        word = int(np.frombuffer(raw, _EXTENT)[0]["word"])
        return word == (run.generation << 32 | (run.slot + 1))

    # -- records --------------------------------------------------------------------------------

    def position(self, extent: int) -> int:
        """Return the offset of an extent in the file."""
        return self.data_offset + extent * self.extent_bytes

    def scan(self, run: Run, below: int) -> Scan:
        """Count a run's records; committed records only if their lane number lies below a bound."""
        found = _core.scan_run(
            self.fd, self.position(run.extent), run.used, run.extent, run.generation, below
        )
        return Scan(*found, changed=not self.still(run))

    def read_records(self, run: Run, *, payload: bool = False) -> Iterator[RecordRow]:
        """Yield a run's committed records, released ones too, in the order of writing."""
        at = 0
        while at < run.used:
            rows, at, cut = self._read_run(run, at, _ROWS, payload)
            if (cut or not all(row.intact for row in rows)) and not self.still(run):
                return
            yield from rows
            if cut:
                return

    def read_record(self, run: Run, offset: int) -> RecordRow:
        """Read the record at an offset found by an earlier walk."""
        (row,), _, _ = self._read_run(run, offset, 1, False)
        return row

    def _read_run(
        self, run: Run, start: int, limit: int, payload: bool
    ) -> tuple[list[RecordRow], int, bool]:
        rows, end, cut = _core.read_run(
            self.fd, self.position(run.extent), run.used, run.extent, run.generation,
            start, limit, payload,
        )  # fmt: skip
        return [RecordRow(run.extent, run.slot, *row) for row in rows], end, cut

    def read_payload(self, row: RecordRow, offset: int, count: int) -> bytes:
        """Read bytes of a record, from an offset within the record."""
        return self.read(count, self.position(row.extent) + row.offset + offset)

    # -- living processes ------------------------------------------------------------------------

    def in_use(self) -> bool:
        """Tell if a living process, in an arbitrary container, holds this segment open."""
        return _core.lock_held(self.fd, 0, 0)

    def slot_alive(self, slot: int) -> bool:
        """Tell if a living process owns the slot."""
        return _core.lock_held(self.fd, _core.LOCK_SLOT + slot)

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _label(raw: bytes) -> str:
    """Decode a length and that many bytes; empty for a partial write."""
    size = raw[0] if raw else 0
    text = raw[1 : 1 + size]
    whole = 0 < size <= _core.SPLIT_LABEL_BYTES and len(text) == size and 0 not in text
    return text.decode("utf-8", "replace") if whole else ""
