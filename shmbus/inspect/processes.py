"""Liveness and stops of a bus's processes, within the view of this process.

Invariants:

- A process lives while holding the lock of its slot.
- A pid is only a hint: the number may come from a different namespace, or belong to a new process
  by now. Only a process with a mapping of this very segment counts as stopped.
- Unreadable processes count as running; no process is disturbed.
"""

from __future__ import annotations

import os
from typing import Final

from shmbus import errors
from shmbus.inspect.segment_file import SegmentFile
from shmbus.segment.fleet_note import note_path, read_fleet_note
from shmbus.segment.locked_file import LockedFile

#: States in /proc/PID/stat of a process stopped by a signal or a debugger.
_STOPPED: Final = frozenset("Tt")


class ProducerChecks:
    """Knowledge of producers' processes, poll by poll."""

    # A check takes two system calls or more, and the first slows down with every lock on the file.
    # So a caller that polls thousands of producers every second checks a few per poll, and reuses
    # the last result of the rest.

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
        """Check a producer with an attached slot."""
        self._seen += 1
        known = self._known.get(slot)
        if known is not None and known[0] == number and (self._seen + self._turn) % self._every:
            return known[1], known[2]
        alive = file.slot_alive(slot)
        stopped = alive and is_stopped(pid, file.path)
        self._known[slot] = number, alive, stopped
        return alive, stopped


def is_stopped(pid: int, path: str) -> bool:
    """Tell if the process is stopped and maps the segment."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may contain anything.
            state = file.read(4096).rpartition(b")")[2].split()[0].decode("ascii", "replace")
        if state not in _STOPPED:
            return False
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
            return any(line.rstrip("\n").endswith(path) for line in lines)
    except (OSError, IndexError):
        return False  # ended, or another user's


def stopped_pids(path: str) -> list[int]:
    """Find the stopped processes that map the segment."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return sorted(pid for pid in pids if is_stopped(pid, path))


def servers_left(name: str) -> bool:
    """Tell if a trainer ended while inference servers of a bus were paused for its weights."""
    # The trainer keeps a note of them from before the first pause, and holds the note's lock for
    # life. Sleeping servers wait for the next trainer's `wake`: the device may be in use.
    with LockedFile() as file:
        try:
            file.open(note_path(name), os.O_RDONLY, "the note of paused servers")
            note = read_fleet_note(name)
        except (OSError, errors.LayoutMismatchError):  # missing, or not this user's
            return False
        return note is not None and not note.asleep and file.lock(shared=True)
