"""Note of a bus's paused servers and the pausing process: a file with a lock.

Invariants: the note names a server from before its pause until its resume, or its end; the pausing
process holds the lock for as long. A free lock marks a note left by a process that died, or failed
to resume every server; `EngineFleet.recover` ends the named pauses.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection

import msgspec

from shmbus import LayoutMismatchError
from shmbus.base.closing import ClosedByWith
from shmbus.data.encoding import decodable
from shmbus.segment.fleet_note import Sleep, framed, note_path, unframed
from shmbus.segment.locked_file import LockedFile

MAX_BYTES = 1 << 20
#: Longest hold of the lock by a daemon's check for a left note, in seconds.
ASKED_S = 0.1


@decodable
class PauseNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fleet/2"):
    """Content of the note: pausing process, paused servers, version, and parts of `FleetNote`."""

    pid: int
    servers: list[tuple[str, str]]
    version: int
    previous: int | None
    shared: bool = False
    directory: str = ""
    updating: bool = True
    #: Buses of relay-fed servers, which read a node's own bus, by address.
    buses: dict[str, str] = {}
    asleep: dict[str, Sleep] = {}
    asleep_unix_ns: int = 0


class PauseNote(ClosedByWith):
    """Note of one bus, for a ``with`` block; BlockingIOError if another process holds it."""

    def __init__(self, bus: str) -> None:
        self._path = note_path(bus)
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
        if self.left is not None:
            left = self.left
            notice = msgspec.structs.replace(
                notice, asleep=left.asleep, asleep_unix_ns=left.asleep_unix_ns
            )
        self._write(notice)

    @property
    def asleep(self) -> dict[str, Sleep]:
        """Sleeping servers by address."""
        return {} if self.left is None else self.left.asleep

    def set_sleep(self, address: str, sleep: Sleep | None) -> None:
        """Record the memory of a sleeping server; None for an awake server."""
        assert self.left is not None
        asleep = {at: each for at, each in self.left.asleep.items() if at != address}
        if sleep is not None:
            asleep[address] = sleep
        since = self.left.asleep_unix_ns if self.left.asleep else time.time_ns()
        self._write(
            msgspec.structs.replace(self.left, asleep=asleep, asleep_unix_ns=since, updating=True)
        )

    def _write(self, notice: PauseNotice) -> None:
        # One write: a death leaves the whole old or the whole new note.
        os.pwrite(self._file.fd, framed(msgspec.msgpack.encode(notice)), 0)
        self.left = notice

    def named(self) -> list[tuple[str, str]]:
        """Return kind and address of each named server."""
        return [] if self.left is None else list(self.left.servers)

    def clear(self, addresses: Collection[str]) -> None:
        """Remove servers from the note after their resume or end."""
        others = [each for each in self.named() if each[1] not in addresses]
        if self.left is not None and others:
            asleep = {at: each for at, each in self.asleep.items() if at not in addresses}
            updating = bool(asleep)  # a wake brings new weights at any moment
            self._write(
                msgspec.structs.replace(self.left, servers=others, updating=updating, asleep=asleep)
            )
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
            file.open(note_path(bus), os.O_RDWR, _title(bus))
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
        return msgspec.msgpack.decode(unframed(raw), type=PauseNotice)
    except msgspec.DecodeError as error:
        raise LayoutMismatchError(
            f"the note of paused servers has an unknown format: {error}; resume the servers by "
            "hand, and remove the note"
        ) from error
