"""Which pools there are beside which buses, and each of them in a line: for the command line.

Nothing is opened for use, and what cannot be read is left out: `shmbus gc` lists every file.
"""

from __future__ import annotations

import os
from typing import Final

from shmbus import errors
from shmbus._format import several, show_size
from shmbus.pool.status import PoolStatus, read_pool
from shmbus.segment.names import SHM_DIRECTORY, parse_companion

#: What a pool's file begins with; other companions begin with something else.
_MAGIC: Final = b"SHBPOOL1"


def find_pools(bus: str | None = None) -> list[tuple[str, str]]:
    """Find pools by their names and first bytes."""
    found = []
    for entry in os.scandir(SHM_DIRECTORY):
        named = parse_companion(entry.name)
        if named is None or (bus is not None and named[1] != bus):
            continue
        if _first_bytes(entry.path) == _MAGIC:
            found.append((named[1], named[0]))
    return sorted(found)


def _first_bytes(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # removed meanwhile, another user's, or no file
        return b""
    try:
        return os.read(fd, len(_MAGIC))
    except OSError:
        return b""
    finally:
        os.close(fd)


def read_pools(bus: str | None = None) -> list[PoolStatus]:
    """Read the status of each pool that can be read."""
    found = []
    for name, kind in find_pools(bus):
        try:
            found.append(read_pool(name, kind))
        except (errors.ShmbusError, PermissionError):  # gone, another user's, or damaged
            continue
    return found


def describe_pool(status: PoolStatus) -> str:
    """Say in a line what a pool holds, who publishes it, and who runs an older version."""
    newest = "no version yet" if status.version is None else f"version {status.version}"
    publisher = next((rank for rank in status.ranks if rank.rank == 0), None)
    who = "no publisher"
    if publisher is not None:
        who = f"publisher pid {publisher.pid}"
        who += "" if publisher.state == "alive" else " (died)"
    readers = [reader for reader in status.readers if reader.state == "alive"]
    read = several(len(readers), "reader") if readers else "no readers"
    parts = [f"{status.kind}: {newest}, {show_size(status.size)}", who, read]
    behind = sum(reader.applied_version != status.version for reader in readers)
    if readers and status.version is not None:
        parts[-1] += f", {behind} without that version" if behind else ", all run it"
    parts += [
        f"{reader.label} refused version {reader.refused_version}"
        for reader in readers
        if reader.refused_version is not None
    ]
    return "; ".join(parts)
