"""A gateway's state for its successor, in a companion file of the bus, safe from kill -9.

Invariants:

- A single gateway serves a bus; the lock of the file ends with its process.
- The state lies whole in one of two places, with a checksum; the next write goes to the other.
- A journal entry is a single write below a page: a death never tears it.
- A file of an earlier bus of the same name is ignored.
"""

from __future__ import annotations

import os
import struct
import zlib
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

import shmbus
from shmbus.gateway import settings
from shmbus.http.access import Refusal
from shmbus.segment.locked_file import LockedFile
from shmbus.segment.names import companion_name

_MAGIC: Final = b"SHMGATE5"
_HEAD = struct.Struct("<8sQI")
_PLACE = struct.Struct("<QII")
#: Bytes of a body's key, a BLAKE2b digest: no client finds two bodies of one key.
KEY_BYTES: Final = 16
#: A body's group count, number of groups put, key, and round.
_ENTRY = struct.Struct(f"<HH4x{KEY_BYTES}sq")
_PAGE: Final = 4096
#: Bytes of the state: the largest number of environments, with the longest names.
_STATE_BYTES: Final = 16 << 20
#: Bytes allocated from the start: hundreds of environments with usual names.
_STATE_NOW: Final = 64 << 10
_PLACES: Final = (_PAGE, _PAGE + _STATE_BYTES)
_JOURNAL: Final = _PAGE + 2 * _STATE_BYTES


class JournalEntry(NamedTuple):
    """A body without a delivered answer at its gateway's death."""

    groups: int
    #: Groups in the bus, at least; perhaps the next group too.
    done: int
    key: bytes
    #: Round of its groups on the bus.
    round: int


class Journal:
    """The file, held by this process."""

    def __init__(self, bus: shmbus.Bus) -> None:
        self.path = "/dev/shm" + companion_name("gateway", bus.name)
        self._file = LockedFile()
        is_locked = self._file.take(self.path, f"the gateway of bus {bus.name!r}")
        self._fd = self._file.fd
        entries_bytes = settings.JOURNAL_ENTRIES * _ENTRY.size
        try:
            if not is_locked:
                raise self._is_served(bus.name)
            head = os.pread(self._fd, _HEAD.size, 0)
            ours = len(head) == _HEAD.size and _HEAD.unpack(head)[:2] == (
                _MAGIC,
                bus.created_unix_ns,
            )
            if not ours:
                os.ftruncate(self._fd, 0)
            self._allocate([*((start, _STATE_NOW) for start in _PLACES), (_JOURNAL, entries_bytes)])
            os.pwrite(self._fd, _HEAD.pack(_MAGIC, bus.created_unix_ns, os.getpid()), 0)
            self.state, self._version = self._newest()
            journal = os.pread(self._fd, entries_bytes, _JOURNAL)
            self.entries = [
                (number, JournalEntry(*found))
                for number, found in enumerate(_ENTRY.iter_unpack(journal))
                if found[0]
            ]
        except BaseException:
            self._file.close()
            raise
        used = {number for number, _ in self.entries}
        self._free = [n for n in range(settings.JOURNAL_ENTRIES - 1, -1, -1) if n not in used]

    def _allocate(self, parts: list[tuple[int, int]]) -> None:
        """Allocate parts of the file, given by offset and size."""
        try:
            for start, count in parts:
                os.posix_fallocate(self._fd, start, count)
        except OSError as error:
            needed = sum(count for _, count in parts)
            room = os.statvfs(self.path)
            raise shmbus.CapacityError(
                f"the gateway needs {needed} bytes for {self.path}: {error.strerror}, "
                f"{room.f_bavail * room.f_frsize} are free in /dev/shm; remove old segments "
                "(`shmbus gc`), or enlarge it (docker run --shm-size=..., mount -o "
                "remount,size=...)"
            ) from error

    def _is_served(self, bus: str) -> RuntimeError:
        head = os.pread(self._fd, _HEAD.size, 0)
        pid = _HEAD.unpack(head)[2] if len(head) == _HEAD.size else "unknown"
        return RuntimeError(
            f"bus {bus!r}: expected no gateway, found the one with pid {pid}; use its address, or "
            "end it first"
        )

    def _newest(self) -> tuple[bytes | None, int]:
        found: tuple[bytes | None, int] = (None, 0)
        for start in _PLACES:
            version, length, checksum = _PLACE.unpack(os.pread(self._fd, _PLACE.size, start))
            if not version or length > _STATE_BYTES - _PLACE.size or version <= found[1]:
                continue
            data = os.pread(self._fd, length, start + _PLACE.size)
            if len(data) == length and zlib.crc32(data) == checksum:
                found = (data, version)
        return found

    def store(self, state: msgspec.Struct) -> None:
        """Store the state for a successor."""
        data = msgspec.json.encode(state)
        start = _PLACES[(self._version + 1) % 2]
        head = _PLACE.pack(self._version + 1, len(data), zlib.crc32(data))
        try:
            if len(data) > _STATE_BYTES - _PLACE.size:
                raise OSError("the file is too large")
            os.pwrite(self._fd, head + data, start)
        except OSError as error:
            raise Refusal(
                HTTPStatus.INSUFFICIENT_STORAGE,
                f"registrations: expected {len(data)} bytes of room in {self.path}, got: {error}; "
                "free shared memory, or reset the data",
            ) from error
        self._version += 1

    def open_entry(self, entry: JournalEntry) -> int | None:
        """Enter a body before its put; return None if the journal is full."""
        if not self._free:
            return None
        number = self._free.pop()
        self.write_entry(number, entry)
        return number

    def write_entry(self, number: int, entry: JournalEntry) -> None:
        """Replace an entry."""
        os.pwrite(self._fd, _ENTRY.pack(*entry), _JOURNAL + number * _ENTRY.size)

    def close_entry(self, number: int) -> None:
        """Forget a body: its answer was delivered, or no repeat is expected."""
        os.pwrite(self._fd, bytes(_ENTRY.size), _JOURNAL + number * _ENTRY.size)
        self._free.append(number)

    def close(self, *, remove: bool = False) -> None:
        """Leave the file to a successor, or remove it."""
        if remove:
            os.unlink(self.path)
        self._file.close()
