"""Many readers or one who steps, among processes: two file locks.

Invariants:

- Who steps holds both bytes; a reader holds the second, and passes the first to get it. So whoever
  waits to step keeps new readers out, and is not starved by those that follow each other.
- The locks belong to an open file: threads of a process share its reading, and the end of the
  process ends it. Among the threads of one process, which the file's locks do not tell apart, the
  guard itself keeps readers and the one who steps apart.
- What is held ends with its object: an exception at any instant, in the middle of taking it or of
  giving it back, leaves nothing locked.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from typing import Final

from shmbus import BusClosedError
from shmbus.segment.locked_file import LockedFile

#: Bytes of the file that are locked; what they hold does not matter.
_GATE: Final = 0
_DATA: Final = 1
_WRITER: Final = 2
#: Seconds between two tries.
_RETRY_S: Final = 0.0002


class StepGuard:
    """The locks of one open file."""

    def __init__(self, file: LockedFile) -> None:
        self._file = file
        # Held again by what is collected in the middle of a block under it.
        self._threads = threading.RLock()
        #: Of this process: readers, and the one who steps, by their ids.
        self._readers: set[int] = set()
        self._stepper: int | None = None
        #: Whether that one keeps readers out.
        self._excludes = False

    @property
    def steps(self) -> bool:
        """Whether this process steps."""
        return self._stepper is not None

    def become_writer(self) -> bool:
        """Be the one that steps, until the file is closed; False where another one is."""
        return self._lock(_WRITER, fcntl.F_WRLCK)

    def _lock(self, byte: int, kind: int) -> bool:
        if self._file.fd < 0:
            raise BusClosedError("this copy of shared weights was closed meanwhile; attach again")
        return self._file.lock_byte(byte, kind)


class Reading:
    """A reader of this process."""

    def __init__(self, guard: StepGuard) -> None:
        self._guard = guard

    def begin(self, timeout: float | None) -> bool:
        """Begin to read; False where a step took longer than that."""
        return _until(self._try, timeout)

    def _try(self) -> bool:
        guard = self._guard
        # All of it under the threads' lock: the file has one lock of each byte for all of them.
        with guard._threads:
            if guard._stepper is not None and guard._excludes:
                return False
            began = False
            try:
                # Said first, so that `end` undoes whatever of the rest has happened.
                guard._readers.add(id(self))
                began = guard._lock(_GATE, fcntl.F_RDLCK) and guard._lock(_DATA, fcntl.F_RDLCK)
                guard._lock(_GATE, fcntl.F_UNLCK)
                return began
            finally:
                if not began:
                    self.end()

    def end(self) -> None:
        """End reading; may be called twice."""
        guard = self._guard
        if guard._file.fd < 0:  # closed, or a forked child, where another thread's lock stays
            return
        with guard._threads:
            if id(self) not in guard._readers:
                return
            if len(guard._readers) == 1:
                guard._lock(_DATA, fcntl.F_UNLCK)
            if guard._stepper is None or not guard._excludes:
                guard._lock(_GATE, fcntl.F_UNLCK)
            guard._readers.discard(id(self))

    def __del__(self) -> None:
        # Its constructor may have been interrupted, or its end.
        if hasattr(self, "_guard") and id(self) in self._guard._readers:
            self.end()


class Stepping:
    """The one who steps."""

    def __init__(self, guard: StepGuard, *, excludes: bool) -> None:
        self._guard = guard
        self._excludes = excludes

    def begin(self, timeout: float | None) -> bool:
        """Begin to step; False where a reader stayed longer than that, or another one steps."""
        deadline = None if timeout is None else time.monotonic() + timeout
        began = False
        try:
            if not _until(self._claim, timeout):
                return False
            for attempt in (self._pass, self._enter) if self._excludes else ():
                left = None if deadline is None else deadline - time.monotonic()
                if not _until(attempt, left):
                    return False
            began = True
            return True
        finally:
            if not began:
                self.end()

    def _claim(self) -> bool:
        """Be the one of this process."""
        guard = self._guard
        with guard._threads:
            if guard._stepper is not None:
                return False
            guard._excludes = self._excludes
            guard._stepper = id(self)
            return True

    def _pass(self) -> bool:
        """Keep new readers out."""
        guard = self._guard
        with guard._threads:
            return guard._lock(_GATE, fcntl.F_WRLCK)

    def _enter(self) -> bool:
        """Be alone."""
        guard = self._guard
        with guard._threads:
            # The file's lock would become this process's own readers' end.
            return not guard._readers and guard._lock(_DATA, fcntl.F_WRLCK)

    def end(self) -> None:
        """End stepping; may be called twice."""
        guard = self._guard
        if guard._file.fd < 0:
            return
        with guard._threads:
            if guard._stepper != id(self):
                return
            if self._excludes:
                if not guard._readers:
                    guard._lock(_DATA, fcntl.F_UNLCK)
                guard._lock(_GATE, fcntl.F_UNLCK)
            guard._stepper = None

    def __del__(self) -> None:
        if hasattr(self, "_guard") and id(self) == self._guard._stepper:
            self.end()


def _until(attempt: Callable[[], bool], timeout: float | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    while not attempt():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_RETRY_S)
    return True
