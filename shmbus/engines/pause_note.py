"""Note of a bus's paused servers and the pausing process: a file with a lock.

Invariants: the note names a server from before its pause until its resume, or its end; the pausing
process holds the lock for as long. A free lock marks a note left by a process that died, or failed
to resume every server; `EngineFleet.recover` ends the named pauses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection

import msgspec

from shmbus import LayoutMismatchError
from shmbus.base.closing import ClosedByWith
from shmbus.data.encoding import decodable
from shmbus.segment.cache_salt import NOTE_KIND
from shmbus.segment.locked_file import LockedFile
from shmbus.segment.names import SHM_DIRECTORY, companion_name

MAX_BYTES = 1 << 20
#: Longest hold of the lock by a daemon's check for a left note, in seconds.
ASKED_S = 0.1


@decodable
class PauseNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fleet/1"):
    """Content of the note: pausing process, paused servers, version."""

    pid: int
    servers: list[tuple[str, str]]
    version: int
    previous: int | None
    shared: bool = False
    directory: str = ""
    updating: bool = True
    #: Buses of relay-fed servers, which read a node's own bus, by address.
    buses: dict[str, str] = {}


class PauseNote(ClosedByWith):
    """Note of one bus, for a ``with`` block; BlockingIOError if another process holds it."""

    def __init__(self, bus: str) -> None:
        self._path = SHM_DIRECTORY + companion_name(NOTE_KIND, bus)
        self._file = LockedFile()
        try:
            taken = self._file.take(self._path, _title(bus), ASKED_S)
            self.left: PauseNotice | None = _read(self._file.fd)
            if not taken:
                who = "another process" if self.left is None else f"pid {self.left.pid}"
                raise BlockingIOError(
                    f"bus {bus!r}: {who} is updating its inference servers now; wait for its "
                    "update, or end that process: paused servers are then recovered"
                )
        except BaseException:
            self._file.close()
            raise

    def write(self, notice: PauseNotice) -> None:
        """Write the note, whole or not at all, before any pause; keep earlier names."""
        named = {address for _, address in notice.servers}
        others = [each for each in self.named() if each[1] not in named]
        buses = {**({} if self.left is None else self.left.buses), **notice.buses}
        servers = [*notice.servers, *others]
        notice = msgspec.structs.replace(notice, servers=servers, buses=buses)
        self._write(notice)

    def _write(self, notice: PauseNotice) -> None:
        encoded = msgspec.msgpack.encode(notice)
        # One write into an empty file: a death leaves an empty or a whole note.
        os.ftruncate(self._file.fd, 0)
        os.pwrite(self._file.fd, encoded, 0)
        self.left = notice

    def named(self) -> list[tuple[str, str]]:
        """Return kind and address of each named server."""
        return [] if self.left is None else list(self.left.servers)

    def clear(self, addresses: Collection[str]) -> None:
        """Remove servers from the note after their resume or end."""
        others = [each for each in self.named() if each[1] not in addresses]
        if self.left is not None and others:
            self._write(msgspec.structs.replace(self.left, servers=others, updating=False))
            return
        os.ftruncate(self._file.fd, 0)
        self.left = None

    def close(self) -> None:
        """Release the lock, and remove an empty note; idempotent."""
        if self._file.fd >= 0 and self.left is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
        self._file.close()


def paused_by(bus: str) -> tuple[PauseNotice, bool] | None:
    """Return a bus's note, and True for a living process; None without a pause."""
    with LockedFile() as file:
        try:
            file.open(SHM_DIRECTORY + companion_name(NOTE_KIND, bus), os.O_RDWR, _title(bus))
        except FileNotFoundError:
            return None
        notice = _read(file.fd)
        return None if notice is None else (notice, not file.lock())


def _title(bus: str) -> str:
    return f"the note of bus {bus!r} about its inference servers"


def _read(file: int) -> PauseNotice | None:
    raw = os.pread(file, MAX_BYTES, 0)
    if not raw:
        return None
    try:
        return msgspec.msgpack.decode(raw, type=PauseNotice)
    except msgspec.DecodeError as error:
        raise LayoutMismatchError(
            f"the note of paused servers has an unknown format: {error}; resume the servers by "
            "hand, and remove the note"
        ) from error
