"""Addresses and states of a bus's recorders: a small companion file for each.

Invariants:

- A recorder holds the lock of its file for life; readers ignore an unlocked file.
- Readers ignore a note with a wrong checksum.
"""

from __future__ import annotations

import contextlib
import os
import string
import struct
import zlib
from typing import Final

import msgspec

from shmbus.segment.locked_file import LockedFile, try_lock
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus.segment.own_file import open_own

#: Recorders of a bus at a time: a letter each, since a companion's kind takes no digits.
_LETTERS: Final = string.ascii_lowercase
#: Length and checksum of a note.
_HEAD: Final = struct.Struct("<II")
#: Bytes of a note: 48 sessions with the longest ids, and 64 engines.
_MOST_BYTES: Final = 64 << 10
#: Read attempts of a note under change.
_TRIES: Final = 5


class SessionNote(msgspec.Struct, frozen=True, kw_only=True):
    """An open session: sample, age in seconds, contents, and place."""

    instance_id: str
    index: int
    age_s: float
    turns: int
    tokens: int
    calls: int
    engine: str


class EngineNote(msgspec.Struct, frozen=True, kw_only=True):
    """An engine behind a recorder; without a version, the reason of an unknown version."""

    url: str
    state: str
    calls: int
    version: int | None = None
    version_by: str = ""
    why: str = ""


class RecorderNote(msgspec.Struct, frozen=True, kw_only=True):
    """A recorder's note about itself; clients that open sessions send the token."""

    url: str
    pid: int
    token: str | None = None
    sessions: int = 0
    calls: int = 0
    drift: int = 0
    running: list[SessionNote] = []
    engines: list[EngineNote] = []


def _path(bus: str, letter: str) -> str:
    return SHM_DIRECTORY + companion_name(f"recorder{letter}", bus)


class RecorderFile:
    """The file of this process, a recorder of a bus."""

    def __init__(self, bus: str) -> None:
        self._file = LockedFile()
        for letter in _LETTERS:
            self._path = _path(bus, letter)
            if self._file.take(self._path, f"recorder of bus {bus!r}"):
                return
            self._file.close()
        raise RuntimeError(
            f"bus {bus!r}: expected less than {len(_LETTERS)} recorders beside each other, found "
            "as many; end one"
        )

    def write(self, note: RecorderNote) -> None:
        """Write the current state."""
        body = msgspec.json.encode(note)
        if len(body) > _MOST_BYTES:
            body = msgspec.json.encode(msgspec.structs.replace(note, running=[]))
        os.pwrite(self._file.fd, _HEAD.pack(len(body), zlib.crc32(body)) + body, 0)

    def close(self) -> None:
        """Leave: the recorder gets no more sessions."""
        if self._file.fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        self._file.close()


def read_recorders(bus: str) -> list[RecorderNote]:
    """Return the notes of a bus's living recorders."""
    found = []
    for letter in _LETTERS:
        try:
            fd = open_own(_path(bus, letter), os.O_RDONLY, f"recorder of bus {bus!r}")
        except (FileNotFoundError, PermissionError):
            continue
        try:
            note = None if try_lock(fd, shared=True) else _read(fd)
        finally:
            os.close(fd)
        if note is not None:
            found.append(note)
    return found


def _read(fd: int) -> RecorderNote | None:
    for _ in range(_TRIES):
        raw = os.pread(fd, _HEAD.size + _MOST_BYTES, 0)
        if len(raw) < _HEAD.size:
            return None
        length, checksum = _HEAD.unpack_from(raw)
        body = raw[_HEAD.size : _HEAD.size + length]
        if zlib.crc32(body) == checksum:
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(body, type=RecorderNote)
    return None
