"""Many readers or one who steps, among processes: two file locks.

Invariants:

- Who steps holds both bytes; a reader holds the second, and passes the first to get it. So whoever
  waits to step keeps new readers out, and is not starved by those that follow each other.
- The locks belong to an open file: threads of a process share its reading, and the end of the
  process ends it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["StepGuard"]

#: Bytes of the file that are locked; what they hold does not matter.
_GATE: Final = 0
_DATA: Final = 1
_WRITER: Final = 2
#: C's struct flock on 64-bit Linux: type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")
#: Seconds between two tries.
_RETRY_S: Final = 0.0002


class StepGuard:
    """The locks of one open file.

    Parameters
    ----------
    file : int
        A descriptor, open for reading and writing, that no other guard uses.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._threads = threading.Lock()
        self._readers = 0

    def become_writer(self) -> bool:
        """Be the one that steps, until the file is closed; False where another one is."""
        return self._lock(_WRITER, fcntl.F_WRLCK)

    def close(self) -> None:
        """Let go of all; needed where a mapping keeps the file open."""
        for byte in (_DATA, _GATE, _WRITER):
            self._lock(byte, fcntl.F_UNLCK)

    def enter(self, timeout: float | None) -> bool:
        """Begin to read; False where a step took longer than that."""
        return _until(self._try_enter, timeout)

    def leave(self) -> None:
        """End reading."""
        with self._threads:
            self._readers -= 1
            if self._readers == 0:
                self._lock(_DATA, fcntl.F_UNLCK)

    def close_to_readers(self, timeout: float | None) -> bool:
        """Begin to step; False where a reader stayed longer than that."""
        began = time.monotonic()
        if not _until(lambda: self._lock(_GATE, fcntl.F_WRLCK), timeout):
            return False
        left = None if timeout is None else timeout - (time.monotonic() - began)
        if _until(lambda: self._lock(_DATA, fcntl.F_WRLCK), left):
            return True
        self._lock(_GATE, fcntl.F_UNLCK)
        return False

    def open_to_readers(self) -> None:
        """End stepping."""
        self._lock(_DATA, fcntl.F_UNLCK)
        self._lock(_GATE, fcntl.F_UNLCK)

    def _try_enter(self) -> bool:
        # All of it under the threads' lock: the file has one lock of each byte for all of them.
        with self._threads:
            if not self._lock(_GATE, fcntl.F_RDLCK):
                return False
            try:
                if self._readers == 0 and not self._lock(_DATA, fcntl.F_RDLCK):
                    return False
                self._readers += 1
                return True
            finally:
                self._lock(_GATE, fcntl.F_UNLCK)

    def _lock(self, byte: int, kind: int) -> bool:
        try:
            asked = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, asked)
        except (BlockingIOError, PermissionError):
            return False
        return True


def _until(attempt: Callable[[], bool], timeout: float | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    while not attempt():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_RETRY_S)
    return True
