"""Room for new shared memory: the tmpfs, quotas, the file size limit, each memory cgroup above.

Invariants:

- An unreadable limit counts as none: a false refusal costs a run, and the kernel checks again.
- Page cache counts as free, since the kernel drops cache first: after a checkpoint's load the cache
  fills the cgroup.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from shmbus.base.format import printable, several, show_size
from shmbus.segment.locked_file import try_lock
from shmbus.segment.names import PREFIX, SHM_DIRECTORY, parse_companion
from shmbus_ext import _core

#: Limit from which cgroup v1 means "none": LLONG_MAX, rounded down to pages.
_UNLIMITED: Final = 1 << 62
#: By filesystem type: files of limit and use, and the lines of memory.stat with droppable cache.
_CGROUPS: Final = {
    "cgroup": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    "cgroup2": (
        "memory.max",
        "memory.current",
        ("inactive_file", "active_file", "slab_reclaimable"),
    ),
}
_ENLARGE: Final = "docker run --shm-size=..., mount -o remount,size=... /dev/shm"
#: Linux's quotactl_fd, its command Q_GETQUOTA, and struct if_dqblk up to the used space.
_QUOTACTL_FD: Final = 443
_Q_GETQUOTA: Final = 0x800007
_DQBLK: Final = struct.Struct("QQQ48x")
_QUOTA_BLOCK: Final = 1024


class Limit(NamedTuple):
    """A bound on new shared memory, in bytes."""

    name: str
    left: int
    total: int
    #: Command or setting that raises the bound.
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} has {show_size(self.left)} free of {show_size(self.total)}"


def limits(root: Path = Path("/")) -> list[Limit]:
    """Read each bound on a new file in /dev/shm; `root` holds the proc and sys to read."""
    room = os.statvfs(SHM_DIRECTORY)
    total = room.f_blocks * room.f_frsize
    found = [Limit(SHM_DIRECTORY, room.f_bavail * room.f_frsize, total, _ENLARGE)]
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY:
        found.append(Limit("a file of this process", most, most, "ulimit -f unlimited"))
    return [*found, *_quotas(), *cgroup_limits(root)]


def tightest() -> Limit:
    """Return the bound with the fewest bytes left."""
    return min(limits(), key=lambda limit: limit.left)


def cgroup_limits(root: Path = Path("/")) -> list[Limit]:
    """Read the memory limits of this process's cgroups and of all their ancestors, v1 and v2."""
    found = []
    for kind, folder, top in _memory_cgroups(root):
        most, used, droppable = _CGROUPS[kind]
        while True:
            limit, current = _number(folder / most), _number(folder / used)
            if limit is not None and current is not None and limit < _UNLIMITED:
                left = max(0, limit - current + _droppable(folder / "memory.stat", droppable))
                path = "/" + str(folder.relative_to(root))
                remedy = f"docker run -m ..., or the limit in {path}/{most}"
                name = f"the memory cgroup {path}"
                found.append(Limit(printable(name), min(left, limit), limit, printable(remedy)))
            if folder == top:
                break
            folder = folder.parent
    return found


def _memory_cgroups(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield type, own folder and topmost visible folder of each hierarchy of this process."""
    own = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, source = line.partition(" - ")
        words, options = fields.split(), source.split()
        if len(words) < 5 or len(options) < 3 or options[0] not in own:
            continue
        kind = options[0]
        if kind == "cgroup" and "memory" not in options[2].split(","):
            continue
        top = root / _unescaped(words[4]).lstrip("/")
        inside = os.path.relpath(own[kind] or "/", _unescaped(words[3]))
        # A mount beside the own cgroup shows at least an ancestor's limit.
        yield kind, top if inside.startswith("..") else top / inside, top


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def _lines(path: Path) -> list[str]:
    try:  # uninterrupted: an exception of a signal handler would leave the file open
        return str(_core.uninterrupted(path.read_text, None, "replace")).splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _droppable(path: Path, names: tuple[str, ...]) -> int:
    found = dict(line.partition(" ")[::2] for line in _lines(path))
    values = [found.get(name, "") for name in names]
    return sum(int(value) for value in values if value.isascii() and value.isdigit())


def _quotas() -> Iterator[Limit]:
    """Yield the user's and the group's quota of the tmpfs; nothing for root."""
    if os.geteuid() == 0:
        return
    for number, who, name in ((0, os.geteuid(), "user"), (1, os.getegid(), "group")):
        hard, _, used = _DQBLK.unpack(_quota(number, who))
        if hard:
            total = hard * _QUOTA_BLOCK
            title = f"the quota of {name} {who} in {SHM_DIRECTORY}"
            yield Limit(title, max(0, total - used), total, f"setquota, or {_ENLARGE}")


def _quota(kind: int, number: int) -> bytes:
    """Read struct if_dqblk of a user or group; zeros without quotas."""
    buffer = ctypes.create_string_buffer(_DQBLK.size)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(SHM_DIRECTORY, os.O_RDONLY | os.O_CLOEXEC)
    try:
        failed = libc.syscall(_QUOTACTL_FD, fd, _Q_GETQUOTA << 8 | kind, number, buffer)
    finally:
        os.close(fd)
    return bytes(_DQBLK.size) if failed else buffer.raw


# -- words ----------------------------------------------------------------------------------------


def shortage(size: int) -> str:
    """Report the bounds too low for `size` bytes, and the bytes `shmbus gc` would free."""
    below = sorted((it for it in limits() if it.left < size), key=lambda it: it.left)
    below = below or [tightest()]
    remedies = "; ".join(dict.fromkeys(limit.remedy for limit in below))
    return (
        f"{show_size(size)} do not fit: {', and '.join(map(str, below))}. {_freed_by_gc()}"
        f"Choose smaller sizes, or raise the limit ({remedies})"
    )


def _freed_by_gc() -> str:
    files = abandoned()
    if not files:
        return ""
    size = show_size(sum(files.values()))
    return f"`shmbus gc --yes` would free {size} of {several(len(files), 'abandoned file')}. "


def abandoned() -> dict[str, int]:
    """Return the own files of dead processes in /dev/shm, with the bytes of each."""
    found = {}
    for entry in os.scandir(SHM_DIRECTORY):
        segment = entry.name.startswith(PREFIX.removeprefix("/"))
        if not segment and parse_companion(entry.name) is None:
            continue
        try:
            fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            info = os.fstat(fd)
            ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
            if ours and not (_core.lock_held(fd, 0, 0) if segment else not try_lock(fd)):
                found[entry.path] = info.st_blocks * 512
        finally:
            os.close(fd)
    return found
