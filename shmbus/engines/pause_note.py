"""Which servers of a bus are paused for new weights, and by whom: a file with a lock.

Invariants: the note names a server from before it is paused until it was resumed, or has ended;
whoever pauses holds its lock for as long. A note whose lock is free was left by a process that
died, or could not resume all, and `EngineFleet.recover` ends what it says.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection
from types import TracebackType

import msgspec

from shmbus import LayoutMismatchError
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus.segment.own_file import open_own

__all__ = ["PauseNote", "PauseNotice", "paused_by"]

KIND = "fleet"
MAX_BYTES = 1 << 20
#: Seconds for which a daemon that asks whether the note was left may hold its lock.
ASKED_S = 0.1


class PauseNotice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fleet/1"):
    """What the note says."""

    pid: int
    servers: list[tuple[str, str]]
    version: int
    previous: int | None
    shared: bool = False
    directory: str = ""


class PauseNote:
    """The note of one bus, held by this process, for a ``with`` block."""

    def __init__(self, bus: str) -> None:
        self._path = SHM_DIRECTORY + companion_name(KIND, bus)
        self._file = _locked(self._path, bus)
        self._pid = os.getpid()
        try:
            self.left: PauseNotice | None = _read(self._file)
        except BaseException:
            os.close(self._file)  # and with it the lock
            raise

    def write(self, notice: PauseNotice) -> None:
        """Say it, whole or not at all, before anything is paused; who was named before stays so."""
        named = {address for _, address in notice.servers}
        others = [each for each in self.named() if each[1] not in named]
        notice = msgspec.structs.replace(notice, servers=[*notice.servers, *others])
        self._write(notice)

    def _write(self, notice: PauseNotice) -> None:
        encoded = msgspec.msgpack.encode(notice)
        # One write into an empty file: a process that dies here leaves nothing, or all.
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, encoded, 0)
        self.left = notice

    def named(self) -> list[tuple[str, str]]:
        """Return kind and address of each server that it names."""
        return [] if self.left is None else list(self.left.servers)

    def clear(self, addresses: Collection[str]) -> None:
        """Take it back for servers that are paused no more."""
        others = [each for each in self.named() if each[1] not in addresses]
        if self.left is not None and others:
            self._write(msgspec.structs.replace(self.left, servers=others))
            return
        os.ftruncate(self._file, 0)
        self.left = None

    def close(self) -> None:
        """Let go of the lock; an empty note is removed. May be called twice."""
        file, self._file = self._file, -1
        if file < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            if self.left is None and os.getpid() == self._pid:
                os.unlink(self._path)
        os.close(file)

    def __enter__(self) -> PauseNote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def paused_by(bus: str) -> tuple[PauseNotice, bool] | None:
    """Return what a bus's note says, and whether its process lives; None without a pause."""
    try:
        file = open_own(SHM_DIRECTORY + companion_name(KIND, bus), os.O_RDWR, _title(bus))
    except FileNotFoundError:
        return None
    try:
        notice = _read(file)
        if notice is None:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return notice, True
        return notice, False
    finally:
        os.close(file)


def _title(bus: str) -> str:
    return f"the note of bus {bus!r} about its inference servers"


def _locked(path: str, bus: str) -> int:
    while True:
        file = open_own(path, os.O_RDWR | os.O_CREAT, _title(bus))
        try:
            found = os.fstat(file)
            try:
                _lock(file)
            except BlockingIOError as error:
                notice = _read(file)
                who = "another process" if notice is None else f"pid {notice.pid}"
                raise BlockingIOError(
                    f"bus {bus!r}: {who} is updating its inference servers now; wait for its "
                    "update, or end that process: what it leaves paused is recovered then"
                ) from error
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), found):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # it was removed between opening and locking


def _lock(file: int) -> None:
    """Take the lock; who only asks whether it is free holds it for an instant."""
    deadline = time.monotonic() + ASKED_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(ASKED_S / 10)
        else:
            return


def _read(file: int) -> PauseNotice | None:
    raw = os.pread(file, MAX_BYTES, 0)
    if not raw:
        return None
    try:
        return msgspec.msgpack.decode(raw, type=PauseNotice)
    except msgspec.DecodeError as error:
        raise LayoutMismatchError(
            f"the note of paused servers is none of this version: {error}; resume the servers by "
            "hand, and remove it"
        ) from error
