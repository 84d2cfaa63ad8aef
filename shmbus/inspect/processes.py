"""Whether processes of a bus are alive, or stopped, as far as this process can see.

Invariants:

- A process is alive while it holds its slot's lock.
- A pid is only a hint: it may be of another namespace, or belong to another process by now. A
  process counts as stopped only where it has this very segment mapped.
- What may not be read counts as not stopped; nobody is disturbed.
"""

from __future__ import annotations

import os
from typing import Final

from shmbus import errors
from shmbus.inspect.segment_file import SegmentFile
from shmbus.segment.cache_salt import NOTE_KIND
from shmbus.segment.locked_file import LockedFile
from shmbus.segment.names import SHM_DIRECTORY, companion_name

#: States of /proc/PID/stat of a process that a signal or a debugger has stopped.
_STOPPED: Final = frozenset("Tt")


class ProducerChecks:
    """What is known of producers' processes, poll by poll."""

    # A check is two system calls or more, and the first gets slower with every lock on the file. So
    # who polls each second for thousands of producers checks some of them each time, and takes the
    # others to be as they were.

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._known: dict[int, tuple[int, bool, bool]] = {}
        self._turn = 0
        self._every = 1
        self._seen = 0

    def begin(self, producers: int) -> None:
        """Begin a poll of so many producers."""
        self._turn += 1
        self._seen = 0
        self._every = 1 if self._most is None else max(1, -(-producers // self._most))

    def check(self, file: SegmentFile, slot: int, number: int, pid: int) -> tuple[bool, bool]:
        """Check a producer whose slot says that it is attached."""
        self._seen += 1
        known = self._known.get(slot)
        if known is not None and known[0] == number and (self._seen + self._turn) % self._every:
            return known[1], known[2]
        alive = file.slot_alive(slot)
        stopped = alive and is_stopped(pid, file.path)
        self._known[slot] = number, alive, stopped
        return alive, stopped


def is_stopped(pid: int, path: str) -> bool:
    """Whether the process is stopped and has the segment mapped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may contain anything.
            state = file.read(4096).rpartition(b")")[2].split()[0].decode("ascii", "replace")
        if state not in _STOPPED:
            return False
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
            return any(line.rstrip("\n").endswith(path) for line in lines)
    except (OSError, IndexError):
        return False  # it has gone, or is another user's


def stopped_pids(path: str) -> list[int]:
    """Find the stopped processes that have the segment mapped."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return sorted(pid for pid in pids if is_stopped(pid, path))


def servers_left(name: str) -> bool:
    """Whether a trainer ended while inference servers of a bus were paused for its weights."""
    # It keeps a note of them from before it pauses the first, and the note's lock while it lives.
    with LockedFile() as file:
        try:
            path = SHM_DIRECTORY + companion_name(NOTE_KIND, name)
            file.open(path, os.O_RDONLY, "the note of paused servers")
        except (OSError, errors.LayoutMismatchError):  # not there, or not this user's
            return False
        return os.fstat(file.fd).st_size > 0 and file.lock(shared=True)
