"""Whether a producer's process is stopped, as far as this process can see.

Invariants:

- A pid is only a hint: it may be of another namespace, or belong to another process by now. A
  process counts as stopped only where it has this very segment mapped.
- What may not be read counts as not stopped; nobody is disturbed.
"""

from __future__ import annotations

from typing import Final

__all__ = ["is_stopped"]

#: States of /proc/PID/stat of a process that a signal or a debugger has stopped.
_STOPPED: Final = frozenset("Tt")


def is_stopped(pid: int, path: str) -> bool:
    """Whether the process is stopped and has the segment mapped.

    Parameters
    ----------
    pid : int
        As the producer gave it.
    path : str
        The segment's file.

    Returns
    -------
    bool
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name in parentheses may contain anything.
            state = file.read(4096).rpartition(")")[2].split()[0]
        if state not in _STOPPED:
            return False
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return any(line.rstrip("\n").endswith(path) for line in file)
    except (OSError, IndexError):
        return False  # it has gone, or is another user's
