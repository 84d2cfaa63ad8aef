"""Small files whose locks tell a death: they end with the process, whoever it has forked.

A lock belongs to an open file, which a forked child has too: a worker that outlives its trainer
would go on as the trainer, and one that ends would give up what its parent holds.

Invariant: a forked child has none of these files open when its first line runs.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import weakref
from typing import Final

from shmbus.segment.names import leads_to
from shmbus.segment.own_file import open_own
from shmbus_ext import _core

_all: Final[weakref.WeakSet[LockedFile]] = weakref.WeakSet()
#: C's struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")
#: Seconds between two tries for a lock that somebody holds for an instant.
_RETRY_S: Final = 0.01


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file as a whole; False where a living process has it locked."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class LockedFile(_core.ClosedByBlock):
    """A descriptor for locks; nothing else of it is shared with a forked child either."""

    #: -1 before `open`, after `close`, and in a forked child.
    fd = -1
    #: Whether this process is a child of the one that opened it.
    forked = False

    def open(self, path: str, flags: int, what: str = "") -> None:
        """Open it, over no link; where it is `what`, it has to be this user's (`own_file`)."""
        _all.add(self)
        if what:
            self.fd = open_own(path, flags, what)
        else:
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def take(self, path: str, what: str, patience_s: float = 0.0) -> bool:
        """Open or make it, and lock it; False, and it stays open, where a living process has it."""
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
            self.close()  # it was removed between opening and locking

    def lock(self, *, shared: bool = False) -> bool:
        """Lock it as a whole; False where a living process has it locked."""
        return try_lock(self.fd, shared=shared)

    def lock_byte(self, byte: int, kind: int) -> bool:
        """Lock or unlock a byte by a kind such as ``fcntl.F_RDLCK``; False where it is not free."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        """Give up its locks; may be called twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _forget() -> None:
    for file in list(_all):
        file.close()
        file.forked = True


os.register_at_fork(after_in_child=_forget)
