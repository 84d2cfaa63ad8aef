"""Small files whose locks prove a death: a lock ends with its process, regardless of forks.

A lock belongs to an open file, which a forked child shares. A worker that outlives its trainer
would keep the trainer's lock, and an exiting child would release its parent's lock.

Invariant: a forked child holds none of these files open when its first line runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from typing import Final

from shmbus.base.closing import LiveObjects
from shmbus.segment.names import leads_to
from shmbus.segment.own_file import open_own
from shmbus_ext import _core

_all: Final[LiveObjects[LockedFile]] = LiveObjects()
#: C's struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")
#: Seconds between two tries for a lock another process holds for an instant.
_RETRY_S: Final = 0.01


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file as a whole; False if a living process holds the lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class LockedFile(_core.ClosedByBlock):
    """A descriptor for locks; a forked child shares no other part of it either."""

    #: -1 before `open`, after `close`, and in a forked child.
    fd = -1
    #: True in a child of the process that opened the file.
    forked = False

    def open(self, path: str, flags: int, what: str = "") -> None:
        """Open a file, over no link; with `what`, the file must be this user's (`own_file`)."""
        _all.add(self)
        if what:
            self.fd = open_own(path, flags, what)
        else:
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    @contextlib.contextmanager
    def again(self) -> Iterator[LockedFile]:
        """Open the same file once more, for locks of its own during a ``with`` block."""
        with LockedFile() as found:
            _all.add(found)
            found.fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                yield found
            finally:
                # Before `close`: an interrupt there may lose the descriptor, and no lock. A forked
                # child shares the parent's locks, and has no descriptor by now.
                if found.fd >= 0:
                    found._lock_bytes(fcntl.F_UNLCK, 0, 0)

    def take(self, path: str, what: str, patience_s: float = 0.0) -> bool:
        """Open or make a file, and lock it; return False, still open, if a process holds it."""
        deadline = time.monotonic() + patience_s
        while True:
            self.open(path, os.O_RDWR | os.O_CREAT, what)
            try:
                while not self.lock():
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(_RETRY_S)
                if leads_to(path, os.fstat(self.fd)):
                    return True
            except BaseException:
                self.close()
                raise
            self.close()  # removed between opening and locking

    def lock(self, *, shared: bool = False) -> bool:
        """Lock the file as a whole; False if a living process holds the lock."""
        return try_lock(self.fd, shared=shared)

    def lock_byte(self, byte: int, kind: int) -> bool:
        """Lock or unlock a byte by a kind such as ``fcntl.F_RDLCK``; False for a taken byte."""
        try:
            self._lock_bytes(kind, byte, 1)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _lock_bytes(self, kind: int, first: int, count: int) -> None:
        lock = _FLOCK.pack(kind, os.SEEK_SET, first, count, 0)
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, lock)

    def close(self) -> None:
        """Give up the locks; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @_core.finalizer
    def __del__(self) -> None:
        if self.fd >= 0:
            self.close()


def _forget() -> None:
    for file in _all:
        file.close()
        file.forked = True


os.register_at_fork(after_in_child=_forget)
