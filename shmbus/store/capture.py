"""Live traffic to disk, and back onto a bus at a chosen speed, for debugging and benchmarks.

Invariants:

- Recording reads the segment from outside and holds nothing. It slows no process down; it can miss
  records that a fast consumer acknowledges before they are read, and counts them.
- A record is kept only if its run was under the same lease before and after the copy: none is torn.
- The directory of a capture appears complete or not at all, as that of a snapshot.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from shmbus import _encoding, errors
from shmbus._version import VERSION
from shmbus.inspect.records import Run, parse_fields
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.types import Count
from shmbus.producer import Producer
from shmbus.segment.names import check_name
from shmbus.store import snapshot
from shmbus.store.directory import MANIFEST, write_directory
from shmbus.store.parts import NO_ROUND, Part, PartWriter, Record, damaged, read_parts, read_record
from shmbus_ext import _core

#: Seconds between two polls of a recording that found nothing new: what is acknowledged between
#: two polls is missed, and a poll costs microseconds.
_POLL_S = 0.001

_FORMAT: Final = "shmbus-capture"
_VERSION: Final = 1


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a capture."""

    #: "shmbus-capture", 1, and the version of shmbus that wrote it.
    format: str
    version: int
    written_by: str
    #: The bus that was recorded.
    bus: str
    #: When recording began.
    taken_unix_ns: Count
    #: How long it lasted.
    seconds: float
    #: Trajectories in the parts, and those that were committed during the recording and released
    #: before they could be read.
    records: Count
    missed: Count
    #: The files.
    parts: list[Part]


class Replayed(msgspec.Struct, frozen=True):
    """The result of a replay."""

    #: Trajectories put.
    records: int
    #: Duration.
    seconds: float
    #: Largest delay against the recorded times: the bus was full, or the speed too high.
    late_s: float


class _Tap:
    """Finds the records that were committed since the last poll."""

    def __init__(self, file: SegmentFile) -> None:
        self._file = file
        self._start: list[int] = file.slots()["committed"].tolist()
        self._polled: list[int] = []
        self._at: dict[tuple[int, int], int] = {}
        self._ahead: set[tuple[int, int]] = set()
        self.records = 0

    def committed(self) -> int:
        """Count commits since the beginning."""
        now: list[int] = self._file.slots()["committed"].tolist()
        return sum(now[:-1]) - sum(self._start[:-1])

    def poll(self, writer: PartWriter) -> bool:
        """Copy new records; True if there was any commit."""
        now = self._file.slots()["committed"].tolist()
        if now == self._polled:
            return False
        self._polled = now
        known, self._at = self._at, {}
        for run in self._file.runs():
            # Stragglers in the collector's lane were there before, under the same numbers.
            if run.slot < self._file.max_producers:
                lease = (run.extent, run.generation)
                self._at[lease] = self._read(run, known.get(lease, 0), writer)
        return True

    def _read(self, run: Run, at: int, writer: PartWriter) -> int:
        """Copy a run's new records; return where the next poll begins: at the first open one."""
        complete = True
        for row in self._file.read_records(run, start=at):
            if row.state == "reserved" or row.state == "unreadable":
                complete = False
                continue
            if complete:
                at = row.offset + row.nbytes
            number = (row.producer_id, row.sequence)
            if row.state not in ("committed", "released") or row.verdict != "ok":
                continue
            if number in self._ahead:
                if complete:
                    self._ahead.discard(number)
                continue
            if row.lane_number < self._start[run.slot]:
                continue
            found = read_record(self._file, row, self.records)
            if not self._file.still(run):
                break
            if not complete:
                self._ahead.add(number)
            writer.add(found)
            self.records += 1
        return at


def record(
    name: str,
    directory: str | os.PathLike[str],
    *,
    seconds: float | None = None,
    records: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Capture:
    """Record the trajectories that producers commit from now on."""
    check_name(name)

    def write(path: Path) -> Capture:
        writer = PartWriter(path)
        began, began_unix_ns = time.monotonic(), time.time_ns()
        while not stop():
            elapsed = time.monotonic() - began
            if seconds is not None and elapsed >= seconds:
                break
            if not tap.poll(writer):
                time.sleep(_POLL_S)
            if records is not None and tap.records >= records:
                break
        committed = tap.committed()
        tap.poll(writer)
        return Capture(
            format=_FORMAT,
            version=_VERSION,
            written_by=VERSION,
            bus=name,
            taken_unix_ns=began_unix_ns,
            seconds=time.monotonic() - began,
            records=tap.records,
            missed=max(0, committed - tap.records),
            parts=writer.finish(),
        )

    with SegmentFile(name) as file:
        file.require()
        # From here on each missed record is counted; the directory appears when all is written.
        tap = _Tap(file)
        return write_directory(Path(directory), write)


def read_capture(directory: str | os.PathLike[str]) -> list[Part]:
    """Name the parts of a capture, or of a snapshot."""
    path = Path(directory) / MANIFEST
    try:
        capture = msgspec.json.decode(path.read_bytes(), type=Capture)
    except (msgspec.MsgspecError, UnicodeDecodeError, FileNotFoundError, NotADirectoryError):
        return snapshot.read_manifest(directory).parts
    if capture.format != _FORMAT or capture.version != _VERSION:
        raise errors.LayoutMismatchError(
            f"{path}: expected {_FORMAT} of version {_VERSION}, got {capture.format!r} of version "
            f"{capture.version}; replay it with shmbus {capture.written_by}"
        )
    if sum(part.records for part in capture.parts) != capture.records:
        raise damaged(path, f"its parts do not hold {capture.records} records")
    return capture.parts


def _arrays(record: Record) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for field, data in zip(parse_fields(record.schema, record.shape), record.fields, strict=True):
        dtype = _encoding.decode_dtype(field.name, field.dtype.encode())
        arrays[field.name] = (
            np.frombuffer(data, dtype).reshape(field.shape)
            if len(data)
            else np.zeros(field.shape, dtype)
        )
    return arrays


def replay(
    directory: str | os.PathLike[str],
    name: str,
    *,
    speed: float | None = 1.0,
    timeout: float | None = None,
) -> Replayed:
    """Put the trajectories of a capture or snapshot onto a bus, in order and at their pace."""
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"speed: expected more than 0, or None for no pace, got {speed}")
    directory = Path(os.path.abspath(directory))
    parts = read_capture(directory)
    put = 0
    late_s = 0.0
    first_ns: int | None = None
    with Producer(name, label="shmbus replay") as producer:
        began = time.monotonic()
        for found in read_parts(directory, parts):
            first_ns = found.committed_ns if first_ns is None else first_ns
            if speed is not None:
                due = began + (found.committed_ns - first_ns) / 1e9 / speed
                ahead = due - time.monotonic()
                late_s = max(late_s, -ahead)
                if ahead > 0:
                    time.sleep(ahead)
            meta = _encoding.decode_meta(found.meta) if found.meta else None
            if found.checksum & _core.FLAG_FAILED:
                producer.fail(
                    found.instance_id,
                    found.index,
                    str(meta),
                    group_size=None if found.checksum & _core.FLAG_NO_SIZE else found.group_size,
                    round=None if found.round == NO_ROUND else found.round,
                    split=found.split,
                    policy_version=found.policy_version,
                    timeout=timeout,
                )
                put += 1
                continue
            producer.put(
                found.instance_id,
                group_size=found.group_size,
                index=found.index,
                score=found.score,
                policy_version=(found.policy_version, found.policy_version + found.version_span),
                round=None if found.round == NO_ROUND else found.round,
                split=found.split,
                need=found.need or None,
                meta=meta,
                timeout=timeout,
                **_arrays(found),
            )
            put += 1
    return Replayed(put, time.monotonic() - began, late_s)
