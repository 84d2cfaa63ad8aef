"""What processes cost, as the kernel counts it: processor time, page faults, memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Spent", "descendants", "own", "proportional_bytes", "spent"]

_TICKS: Final[int] = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat behind the name in parentheses, which may hold blanks.
_PARENT: Final = 1
_MINOR_FAULTS: Final = 7
_USER: Final = 11
_SYSTEM: Final = 12


@dataclass(frozen=True)
class Spent:
    """What one process or several have spent.

    Attributes
    ----------
    cpu_s : float
        Processor seconds, those in the kernel included.
    faults : int
        Minor page faults.
    kernel_s : float
        Processor seconds in the kernel: system calls, faults, switching.
    switches : int
        How often one was taken off its processor, by itself or by the scheduler.
    """

    cpu_s: float
    faults: int
    kernel_s: float = 0.0
    switches: int = 0

    def __sub__(self, before: Spent) -> Spent:
        return Spent(
            self.cpu_s - before.cpu_s,
            self.faults - before.faults,
            self.kernel_s - before.kernel_s,
            self.switches - before.switches,
        )


def own() -> Spent:
    """Return what this process has spent so far, all its threads together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    switches = used.ru_nvcsw + used.ru_nivcsw
    return Spent(time.process_time(), used.ru_minflt, used.ru_stime, switches)


def descendants(root: int) -> list[int]:
    """Return the pids of all living descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (values := _stat(int(path.name))):
            children.setdefault(int(values[_PARENT]), []).append(int(path.name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def spent(pids: Iterable[int]) -> Spent:
    """Return what these processes have spent so far; those that have ended count nothing."""
    ticks = faults = 0
    for pid in pids:
        if values := _stat(pid):
            ticks += int(values[_USER]) + int(values[_SYSTEM])
            faults += int(values[_MINOR_FAULTS])
    return Spent(ticks / _TICKS, faults)


def proportional_bytes(pids: Collection[int]) -> int:
    """Memory of these processes, where a page that several share counts once among them."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (OSError, ProcessLookupError):
            continue
        for line in text.splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()
