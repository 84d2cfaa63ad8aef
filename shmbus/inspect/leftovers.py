"""What is left in /dev/shm when everybody who used it has died, and how to remove it safely.

Invariants:

- In use is what a living process holds a file lock on (segments) or listens on (sockets). Neither
  age nor a pid ever counts.
- A segment is removed under all of its locks at once: who opens it in that moment waits, looks
  again, and finds that it is gone.
- What is not this user's, or not recognisably shmbus's, is only named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import stat
import time
from pathlib import Path
from typing import Final, Literal

import msgspec

from shmbus import errors, limits
from shmbus._format import printable
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.status import status_of
from shmbus.segment.names import shm_path
from shmbus_ext import _core

__all__ = ["Leftover", "remove", "remove_unfinished", "survey"]

Verdict = Literal["removable", "in_use", "not_ours", "unknown"]
_SOCKET_PREFIXES: Final = ("shmbus-", "shmbus+")
_SOCKET_SUFFIX: Final = ".sock"
_LOST_UNKNOWN: Final = "what it holds cannot be told"


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """A file in /dev/shm that is called like one of ours.

    Attributes
    ----------
    path, name : str
        The file, and what follows the prefix.
    kind : "segment" | "socket" | "other"
        By the file's type.
    owner : str
        Its user.
    size : int
        Bytes that it takes.
    verdict : "removable" | "in_use" | "not_ours" | "unknown"
        Removable: ours, and nobody alive uses it. Unknown: not recognisably shmbus's.
    reason : str
        Why.
    undelivered, undelivered_groups : int | None
        Trajectories, and complete groups of them, that go with a removable segment; None where
        that cannot be told.
    device, inode : int
        Which file was looked at: another one of the same name is never removed instead.
    """

    path: str
    name: str
    kind: Literal["segment", "socket", "other"]
    owner: str
    size: int
    verdict: Verdict
    reason: str
    undelivered: int | None = None
    undelivered_groups: int | None = None
    device: int
    inode: int


def survey() -> list[Leftover]:
    """Look at every file in /dev/shm that is called like one of ours.

    Returns
    -------
    list[Leftover]
        By name.
    """
    prefix = Path(shm_path(""))
    found = []
    for entry in sorted(os.scandir(prefix.parent), key=lambda entry: entry.name):
        name = _name_of(entry.name, prefix.name)
        if not name:
            continue
        try:
            found.append(_look(entry.path, name, os.lstat(entry.path)))
        except (FileNotFoundError, errors.BusNotFoundError):
            continue  # it went away meanwhile
    return found


def _name_of(file: str, prefix: str) -> str:
    """Name the bus that a file belongs to; "" for a file of somebody else's."""
    if file.startswith(prefix):
        return file[len(prefix) :]
    if file.startswith(_SOCKET_PREFIXES) and file.endswith(_SOCKET_SUFFIX):
        # One whose bus has too long a name for a socket is called by a digest of it.
        return file[len(_SOCKET_PREFIXES[0]) : -len(_SOCKET_SUFFIX)]
    return ""


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _look(path: str, name: str, info: os.stat_result) -> Leftover:
    kind: Literal["segment", "socket", "other"] = "other"
    if stat.S_ISREG(info.st_mode):
        kind = "segment"
    elif stat.S_ISSOCK(info.st_mode):
        kind = "socket"
    found = Leftover(
        path=path,
        name=name,
        kind=kind,
        owner=_owner(info.st_uid),
        size=info.st_blocks * 512,
        verdict="unknown",
        reason="neither a segment nor a socket",
        device=info.st_dev,
        inode=info.st_ino,
    )
    if info.st_uid != os.geteuid():
        reason = f"it belongs to {found.owner}"
        return msgspec.structs.replace(found, verdict="not_ours", reason=reason)
    if kind == "segment":
        return _look_at_segment(found)
    if kind == "socket":
        return _look_at_socket(found)
    return found


def _look_at_socket(found: Leftover) -> Leftover:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            status = probe.connect_ex(found.path)
        except OSError as error:  # a path too long for a socket address
            status = error.errno or errno.EINVAL
    if status == errno.ECONNREFUSED:
        return msgspec.structs.replace(
            found, verdict="removable", reason="nobody listens on it", undelivered=0
        )
    if status in (0, errno.EAGAIN, errno.EINPROGRESS, errno.EPROTOTYPE):
        return msgspec.structs.replace(found, verdict="in_use", reason="a daemon listens on it")
    return msgspec.structs.replace(
        found, reason=f"whether somebody listens cannot be told: {os.strerror(status)}"
    )


def _look_at_segment(found: Leftover) -> Leftover:
    try:
        file = SegmentFile(found.name)
    except PermissionError:
        return msgspec.structs.replace(found, reason="its mode does not let us read it")
    with file:
        if file.in_use():
            return msgspec.structs.replace(found, verdict="in_use", reason=_users(file))
        dead = "no living process has it open"
        if file.problem is None:
            status = status_of(file)
            ledger = status.ledger
            return msgspec.structs.replace(
                found,
                verdict="removable",
                reason=dead,
                undelivered=ledger.leased + ledger.stashed + ledger.in_ring,
                undelivered_groups=status.groups_complete,
            )
        magic = int(file.header["magic"])
        if magic == 0:
            reason = f"{dead}; its creator never finished it"
            return msgspec.structs.replace(
                found, verdict="removable", reason=reason, undelivered=0, undelivered_groups=0
            )
        if magic != _core.MAGIC:
            return msgspec.structs.replace(found, reason="it is no segment of shmbus")
        why = str(file.problem).split("; ", 1)[0].removeprefix(f"bus {found.name!r}: ")
        return msgspec.structs.replace(
            found, verdict="removable", reason=f"{dead}; {_LOST_UNKNOWN}: {why}"
        )


def _users(file: SegmentFile) -> str:
    if file.problem is not None:
        return "a living process holds a lock on it"
    status = status_of(file, walk=False)
    alive = sum(producer.state == "alive" for producer in status.producers)
    parts = []
    if status.collector.alive:
        parts.append(f"read by {status.collector.label} (pid {status.collector.pid})")
    if alive:
        parts.append(f"{alive} living producer{'s' if alive > 1 else ''}")
    return ", ".join(parts) or "a living process has it open"


def remove(found: Leftover) -> None:
    """Remove a leftover, if nobody has begun to use it since it was looked at.

    Parameters
    ----------
    found : Leftover
        From `survey`, with the verdict "removable".

    Raises
    ------
    BusBusyError
        Somebody uses it now, or the name means another file now.
    FileNotFoundError
        It is gone already.
    PermissionError
        This user may not.
    ValueError
        The verdict is another one.
    """
    if found.verdict != "removable":
        raise ValueError(f"{printable(found.path)}: expected a removable file; {found.reason}")
    if found.kind == "socket":
        again = _look_at_socket(found)
        if again.verdict != "removable":
            raise errors.BusBusyError(f"{printable(found.path)}: {again.reason} now; left alone")
        _unlink(found)
        return
    fd = os.open(found.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not _same(found, os.fstat(fd)) or not _core.lock_all(fd):
            raise errors.BusBusyError(
                f"{printable(found.path)}: somebody has begun to use it; left alone"
            )
        _unlink(found)
    finally:
        os.close(fd)


def remove_unfinished(name: str) -> bool:
    """Remove what a creator that died has left of a bus.

    A creator that is merely slow holds a lock on the file, but for its first instant, which two
    looks are enough to pass; one that was stopped there finds the file gone, and says so.

    Parameters
    ----------
    name : str
        The bus.

    Returns
    -------
    bool
        Whether there was such a file.
    """
    found = _unfinished(name)
    if found is None:
        return False
    time.sleep(limits.UNFINISHED_WAIT_S)
    again = _unfinished(name)
    if again is None or (again.device, again.inode) != (found.device, found.inode):
        return False
    with contextlib.suppress(errors.BusBusyError, FileNotFoundError):
        remove(again)
        return True
    return False


def _unfinished(name: str) -> Leftover | None:
    """Look whether it has no magic yet, and nobody who would store it."""
    path = shm_path(name)
    with contextlib.suppress(errors.BusNotFoundError, OSError), SegmentFile(name) as file:
        if int(file.header["magic"]) == 0 and not file.in_use():
            return _look(path, name, os.lstat(path))
    return None


def _same(found: Leftover, info: os.stat_result) -> bool:
    return (info.st_dev, info.st_ino) == (found.device, found.inode)


def _unlink(found: Leftover) -> None:
    if not _same(found, os.lstat(found.path)):
        raise errors.BusBusyError(
            f"{printable(found.path)}: the name means another file now; left alone"
        )
    os.unlink(found.path)
