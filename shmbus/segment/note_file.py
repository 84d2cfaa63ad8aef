"""Notes of processes beside a bus: small companion files, valid while their writers live.

Invariants:

- A writer holds the lock of its file for life; readers ignore an unlocked file.
- Readers ignore a note with a wrong checksum.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from shmbus.errors import ShmbusError
from shmbus.segment.locked_file import LockedFile, try_lock
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus.segment.own_file import open_own

_T = TypeVar("_T")

#: Kind of a trainer's note about the logprobs of engine and trainer.
MISMATCH_KIND: Final = "trainer"
#: Bytes of a note.
MOST_BYTES: Final = 64 << 10
#: Length and checksum of a note.
_HEAD: Final = struct.Struct("<II")
#: Read attempts of a note under change.
_TRIES: Final = 5


class NoteFile:
    """A note of this process, in the first file of these kinds without a living writer."""

    def __init__(self, bus: str, kinds: Iterable[str], what: str) -> None:
        self._file = LockedFile()
        for kind in kinds:
            self._path = _path(bus, kind)
            if self._file.take(self._path, f"{what} of bus {bus!r}"):
                return
            self._file.close()

    @property
    def held(self) -> bool:
        """False if every file has a living writer; also after `close`, and in a forked child."""
        return self._file.fd >= 0

    def write_body(self, body: bytes) -> None:
        """Replace the note by a text of at most `MOST_BYTES`."""
        os.pwrite(self._file.fd, _HEAD.pack(len(body), zlib.crc32(body)) + body, 0)

    def close(self) -> None:
        """Remove the note; idempotent."""
        if self.held:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        self._file.close()


def read_notes(bus: str, kinds: Iterable[str], what: str, of: type[_T]) -> list[_T]:
    """Return the notes of living writers, decoded from JSON."""
    found = []
    for kind in kinds:
        try:
            fd = open_own(_path(bus, kind), os.O_RDONLY, f"{what} of bus {bus!r}")
        except (OSError, ShmbusError):  # no file, or not this user's note
            continue
        try:
            note = None if try_lock(fd, shared=True) else _read(fd, of)
        finally:
            os.close(fd)
        if note is not None:
            found.append(note)
    return found


def _path(bus: str, kind: str) -> str:
    return SHM_DIRECTORY + companion_name(kind, bus)


def _read(fd: int, of: type[_T]) -> _T | None:
    for _ in range(_TRIES):
        raw = os.pread(fd, _HEAD.size + MOST_BYTES, 0)
        if len(raw) < _HEAD.size:
            return None
        length, checksum = _HEAD.unpack_from(raw)
        body = raw[_HEAD.size : _HEAD.size + length]
        if zlib.crc32(body) == checksum:
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(body, type=of)
    return None
