"""What this machine cannot measure, and why; and what other work takes of it meanwhile.

``python -m bench.fitness`` says it without measuring anything. A row that needs what is not here is
skipped with the reason: a ratio of two processes that share one core, of a throttled one or of an
emulated one would be a number that means nothing.

Invariant: imports nothing beside the standard library, so that it runs where nothing else does.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MEMORY", "TINY", "TWO", "Here", "Need", "Watch", "here", "main", "notes", "why_not"]

#: Where a bus lies.
SHM: Final = "/dev/shm"
CGROUPS: Final = Path("/sys/fs/cgroup")
MOUNTS: Final = Path("/proc/self/mounts")
#: The first Linux that makes huge pages of what was written, whatever else is set but "deny".
COLLAPSES: Final = (6, 1)
SHMEM_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
#: Names of programs that run other programs' instructions themselves, at a speed of their own.
EMULATORS: Final = ("valgrind", "qemu")
#: Model names of processors that are emulated by the host.
EMULATED_CPU: Final = "TCG"
#: A limit of memory from which on there is none: cgroups v1 say so by a number near 2^63.
NO_LIMIT: Final = 1 << 60
#: Beside what a row counts: interpreters with their libraries, and torch's in one of them.
MEMORY: Final = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Here:
    """What there is for measurements.

    Attributes
    ----------
    processors : float
        That this process and its children may use at once.
    processors_why : str
        What limits them.
    shm_bytes : int
        Free in /dev/shm.
    memory_bytes : float
        That may still be used.
    emulator : str
        What runs this interpreter's instructions, where that is not a processor.
    huge_pages : str
        The kernel's setting for huge pages in shared memory: "advise", "never", "unknown".
    no_huge_pages : str
        Why a bus gets none; nothing where it does.
    """

    processors: float
    processors_why: str
    shm_bytes: int
    memory_bytes: float
    emulator: str = ""
    huge_pages: str = "unknown"
    no_huge_pages: str = ""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a row needs.

    Attributes
    ----------
    processors : float
        At once: 2 where producer and consumer run beside each other.
    shm_bytes : int
        Free in /dev/shm.
    memory_bytes : int
        Of ordinary memory, beside `shm_bytes`.
    timed : bool
        Whether it counts seconds.
    less : str
        The option that asks for less of /dev/shm; "" where none does.
    """

    processors: float = 1.0
    shm_bytes: int = 0
    memory_bytes: int = MEMORY
    timed: bool = True
    less: str = ""


#: Said below figures that only show that a program runs.
TINY: Final = "NOTE: --tiny shows that each figure can be measured; it means nothing."
#: A producer and a consumer.
TWO: Final = 2.0


def why_not(need: Need, found: Here) -> str:
    """Say why something cannot be measured here; nothing if it can."""
    if need.timed and found.emulator:
        return f"this runs under {found.emulator}: seconds are its own, not the machine's"
    if need.timed and found.processors < need.processors:
        return (
            f"needs {need.processors:g} processors, there is {found.processors:.2g} "
            f"({found.processors_why})"
        )
    less = f", or ask for less by {need.less}" if need.less else ""
    if found.shm_bytes < need.shm_bytes:
        return (
            f"needs {need.shm_bytes >> 20} MiB in {SHM}, {found.shm_bytes / 2**20:.1f} are free; "
            f"enlarge it{less}"
        )
    # What lies in /dev/shm is memory too, and counts for the control group of who wrote it first.
    memory = need.memory_bytes + need.shm_bytes
    if found.memory_bytes < memory:
        shared = f", {need.shm_bytes >> 20} of it in {SHM}" if need.shm_bytes else ""
        return (
            f"needs {memory >> 20} MiB of memory{shared}, {found.memory_bytes / 2**20:.0f} may be "
            f"used; end other programs, or allow more in the control group{less}"
        )
    return ""


def here(cgroups: Path = CGROUPS) -> Here:
    """Look at this machine as this process may use it."""
    cores = float(len(os.sched_getaffinity(0)))
    processors, why = cores, f"this process may run on {cores:.0f}"
    quota = min(_of_groups(cgroups, "cpu", _quota), default=math.inf)
    if quota < processors:
        processors, why = quota, "the quota of its control group"
    shm = os.statvfs(SHM)
    setting = _huge_pages()
    return Here(
        processors=processors,
        processors_why=why,
        shm_bytes=shm.f_bavail * shm.f_frsize,
        memory_bytes=min(_available(), *_of_groups(cgroups, "memory", _memory_left)),
        emulator=_emulator(),
        huge_pages=setting,
        no_huge_pages=_no_huge_pages(setting, os.uname().release, MOUNTS),
    )


def notes(found: Here) -> list[str]:
    """Say what changes figures here without making them meaningless."""
    if found.no_huge_pages:
        return [
            f"NOTE: no huge pages for shared memory ({found.no_huge_pages}): rings lie in small "
            "pages, which cost each byte more.\n"
        ]
    return []


def _of_groups(root: Path, controller: str, ask: Callable[[Path], float | None]) -> Iterator[float]:
    """Ask each control group that this process is in, and those above it; versions 1 and 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    yield math.inf
    for line in lines:
        number, names, path = line.split(":", 2)
        if controller in names.split(","):
            top = root / names if (root / names).is_dir() else root / controller
        elif number == "0":
            top = root / "unified" if (root / "unified").is_dir() else root
        else:
            continue
        below = Path(path.lstrip("/"))
        for group in (below, *below.parents):
            found = ask(top / group)
            if found is not None:
                yield found


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _quota(group: Path) -> float | None:
    if (words := _words(group / "cpu.max")) and words[0] != "max":
        return int(words[0]) / int(words[1])
    quota, period = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
    if quota and period and int(quota[0]) > 0:
        return int(quota[0]) / int(period[0])
    return None


def _memory_left(group: Path) -> float | None:
    for most, used, idle in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _words(group / most), _words(group / used)
        if limit and usage and limit[0] != "max" and int(limit[0]) < NO_LIMIT:
            stat = _words(group / "memory.stat")
            # Pages of files that nobody needs give way.
            spare = int(stat[stat.index(idle) + 1]) if idle in stat else 0
            return float(int(limit[0]) - int(usage[0]) + spare)
    return None


def _available() -> float:
    words = _words(Path("/proc/meminfo"))
    return float(int(words[words.index("MemAvailable:") + 1]) << 10)


def _emulator() -> str:
    # An emulator of programs answers for /proc/self/exe, and forgets this one.
    program = Path(_running()).parts[-2:]
    for name in EMULATORS:
        if any(name in part for part in program):
            return name
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and EMULATED_CPU in value:
            return f"an emulated processor ({value.strip()})"
    return ""


def _running() -> str:
    try:
        return os.readlink("/proc/thread-self/exe")
    except OSError:
        return ""


def _huge_pages(path: Path = SHMEM_HUGE_PAGES) -> str:
    chosen = [word[1:-1] for word in _words(path) if word.startswith("[")]
    return chosen[0] if chosen else "unknown"


def _no_huge_pages(setting: str, release: str, mounts: Path) -> str:
    """Say why a bus, which asks for huge pages once it is made, gets none; nothing if it does."""
    if setting in ("deny", "unknown"):
        return f"shmem_enabled is {setting}"
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is not None and tuple(map(int, version.groups())) >= COLLAPSES:
        return ""
    for words in map(str.split, mounts.read_text().splitlines()):
        if words[1:2] == [SHM] and re.search(r"\bhuge=(always|within_size)\b", words[3]):
            return ""
    return f"Linux {release} gives them only where {SHM} is mounted with huge=within_size"


class Watch:
    """Counts the processors that other work takes while it is open.

    What this process and its children took is known once they have ended; the rest of the time
    that the processors were not idle, or that a host took from them, is others'.
    """

    def __init__(self) -> None:
        self._began = self._state()
        self.others = 0.0

    def __enter__(self) -> Watch:
        self._began = self._state()
        return self

    def __exit__(self, *_: object) -> None:
        before, after = self._began, self._state()
        seconds, busy, own = (b - a for a, b in zip(before, after, strict=True))
        self.others = max(0.0, busy - own) / seconds if seconds > 0 else 0.0

    @staticmethod
    def _state() -> tuple[float, float, float]:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *counts = line.split()
            if name in mine:
                # User, nice, system; not idle, not waiting for disks; interrupts, and stolen.
                ticks += sum(map(int, counts[:3])) + sum(map(int, counts[5:8]))
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own


def main() -> int:
    """Say what there is, and what cannot be measured with it."""
    found = here()
    print(
        f"{found.processors:.2g} processors ({found.processors_why}), "
        f"{found.shm_bytes / 2**20:.0f} MiB free in {SHM}, {found.memory_bytes / 2**20:.0f} MiB of "
        f"memory, huge pages for shared memory: {'no' if found.no_huge_pages else 'yes'} "
        f"(shmem_enabled is {found.huge_pages})"
    )
    print("".join(notes(found)), end="")
    for what, need in (
        ("calls of one process", Need()),
        ("a producer beside a consumer", Need(processors=TWO)),
    ):
        if why := why_not(need, found):
            print(f"cannot measure {what}: {why}")
    return 0


if __name__ == "__main__":
    # Not by bench.command: this runs with the standard library alone, as in an emulator.
    try:
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Nobody reads; the flush at exit must have a place to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"fitness: {error}")
    sys.exit(status)
