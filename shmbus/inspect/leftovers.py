"""Files of dead processes in /dev/shm, and their safe removal.

Invariants:

- A segment or companion is in use while a living process holds a file lock on it, a socket while
  a process listens on it. Neither age nor a pid ever counts.
- A segment is removed under all its locks at once: a process that opens the segment in that moment
  waits, checks the name again, and finds the segment gone.
- Files of other users, and files that are not recognisably shmbus's, are only named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import stat
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from shmbus import errors
from shmbus.base.format import printable, several
from shmbus.inspect.segment_file import SegmentFile
from shmbus.inspect.status import status_of
from shmbus.segment.lifecycle import unlink
from shmbus.segment.locked_file import try_lock
from shmbus.segment.names import (
    COLUMNS_INFIX,
    PREFIX,
    SHM_DIRECTORY,
    SOCKET_SUFFIX,
    memory_socket,
    parse_companion,
    socket_path,
)
from shmbus_ext import _core

Kind: TypeAlias = Literal["segment", "socket", "companion", "other"]
Verdict: TypeAlias = Literal["removable", "in_use", "not_ours", "unknown"]
_SEGMENT_PREFIX: Final = PREFIX.removeprefix("/")
_SOCKET_PREFIXES: Final = ("shmbus-", "shmbus+")
#: A trainer's note of paused servers; empty without paused servers.
_FLEET_PREFIX: Final = "shmbus-fleet."
#: Shared memory of other programs: Python (vLLM), torch, NCCL.
_FOREIGN: Final = ("psm_", "torch_", "nccl-")
_DEAD: Final = "no living process has it open"
_UNREADABLE: Final = "its mode does not let us read it"
_LOST_UNKNOWN: Final = "its content cannot be read"


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """A file in /dev/shm with a name like ours."""

    path: str
    name: str
    #: By its name and type; "other" if the two disagree. A companion is a segment beside
    #: a bus, such as the weights of the demo.
    kind: Kind
    owner: str
    #: Occupied bytes.
    size: int
    #: Removable: ours, and no living process uses it. Unknown: not recognisably shmbus's.
    verdict: Verdict
    reason: str
    #: Trajectories, and their complete groups, lost with a removable segment; None if
    #: uncountable.
    undelivered: int | None = None
    undelivered_groups: int | None = None
    #: The checked file: a newer file of the same name is never removed instead.
    device: int
    inode: int


def survey() -> list[Leftover]:
    """Check every file in /dev/shm with a name like ours."""
    found = []
    for entry in sorted(os.scandir(SHM_DIRECTORY), key=lambda entry: entry.name):
        kind, name = _classify(entry.name)
        if not name:
            continue
        try:
            found.append(_check(entry.path, kind, name, os.lstat(entry.path)))
        except (FileNotFoundError, errors.BusNotFoundError):
            continue  # removed after the listing
    return found


def of_bus(name: str) -> list[Leftover]:
    """Check every file of a bus, and of the buses of its annotators."""
    found = survey()
    names = {each.name for each in found if each.name.startswith(name + COLUMNS_INFIX)} | {name}
    kinds = (parse_companion(os.path.basename(each.path)) for each in found)
    sockets = {memory_socket(*kind) for kind in kinds if kind and kind[1] in names}
    sockets |= {socket_path(each) for each in names}
    own = [each for each in found if each.name in names or each.path in sockets]
    return sorted(own, key=lambda each: each.kind != "segment")


def foreign() -> list[Leftover]:
    """Report own files in /dev/shm that other programs made and no visible process maps."""
    entries = [entry for entry in os.scandir(SHM_DIRECTORY) if entry.name.startswith(_FOREIGN)]
    mapped = _mapped() if entries else set()
    found = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        with contextlib.suppress(FileNotFoundError):
            each = _check(entry.path, "other", "", os.lstat(entry.path))
            if each.verdict != "not_ours" and each.inode not in mapped:
                reason = f"no process here maps this file of another program: rm {entry.path}"
                found.append(replace(each, reason=reason))
    return found


def _mapped() -> set[int]:
    """Return the inodes of /dev/shm that visible processes map."""
    found: set[int] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            found |= {int(line.split(None, 5)[4]) for line in maps if b" /dev/shm/" in line}
    return found


def may_go(found: Leftover, *, force: bool) -> bool:
    """Tell if `remove` accepts a leftover: a removable file, or by force our file of a bus."""
    if found.verdict == "removable":
        return True
    return force and found.verdict != "not_ours" and found.kind != "other"


def _classify(file: str) -> tuple[Kind, str]:
    """Tell a file's kind and bus by its name; "" for a foreign file."""
    if file.startswith(_SEGMENT_PREFIX):
        return "segment", file[len(_SEGMENT_PREFIX) :]
    if file.startswith(_SOCKET_PREFIXES) and file.endswith(SOCKET_SUFFIX):
        # For a bus with a long name the socket's name contains a digest.
        return "socket", file[len(_SOCKET_PREFIXES[0]) : -len(SOCKET_SUFFIX)]
    companion = parse_companion(file)
    return "companion", companion[1] if companion else ""


def _owner(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _check(path: str, kind: Kind, name: str, info: os.stat_result) -> Leftover:
    if not (stat.S_ISSOCK if kind == "socket" else stat.S_ISREG)(info.st_mode):
        kind = "other"
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
        return replace(found, verdict="not_ours", reason=reason)
    checks = {"segment": _check_segment, "socket": _check_socket, "companion": _check_companion}
    return checks[kind](found) if kind in checks else found


def _check_socket(found: Leftover) -> Leftover:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            status = probe.connect_ex(found.path)
        except OSError as error:  # a path too long for a socket address
            status = error.errno or errno.EINVAL
    if status == errno.ECONNREFUSED:
        return replace(found, verdict="removable", reason="nobody listens on it", undelivered=0)
    if status in (0, errno.EAGAIN, errno.EINPROGRESS, errno.EPROTOTYPE):
        return replace(found, verdict="in_use", reason="a daemon listens on it")
    return replace(
        found, reason=f"cannot tell whether a daemon listens on it: {os.strerror(status)}"
    )


def _check_companion(found: Leftover) -> Leftover:
    try:
        fd = _open_again(found)
    except PermissionError:
        return replace(found, reason=_UNREADABLE)
    try:
        # Against new users, until close.
        if not try_lock(fd):
            return replace(found, verdict="in_use", reason="a living process has it open")
        if os.path.basename(found.path).startswith(_FLEET_PREFIX) and os.fstat(fd).st_size:
            # After a removal no process would know of them.
            reason = f"inference servers were left paused: shmbus weights {found.name} --resume"
            return replace(found, reason=reason)
    finally:
        os.close(fd)
    return replace(found, verdict="removable", reason=_DEAD, undelivered=0)


def _open_again(found: Leftover, flags: int = os.O_RDONLY) -> int:
    return os.open(found.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _check_segment(found: Leftover) -> Leftover:
    try:
        file = SegmentFile(found.name)
    except PermissionError:
        return replace(found, reason=_UNREADABLE)
    with file:
        if file.in_use():
            return replace(found, verdict="in_use", reason=_users(file))
        if file.problem is None:
            status = status_of(file)
            return replace(
                found,
                verdict="removable",
                reason=_DEAD,
                undelivered=status.ledger.undelivered,
                undelivered_groups=status.groups_complete,
            )
        magic = int(file.header["magic"])
        if magic == 0:
            reason = f"{_DEAD}; its creator never finished it"
            return replace(
                found, verdict="removable", reason=reason, undelivered=0, undelivered_groups=0
            )
        if magic != _core.MAGIC:
            return replace(found, reason="it is no segment of shmbus")
        why = str(file.problem).split("; ", 1)[0].removeprefix(f"bus {found.name!r}: ")
        return replace(found, verdict="removable", reason=f"{_DEAD}; {_LOST_UNKNOWN}: {why}")


def _users(file: SegmentFile) -> str:
    if file.problem is not None:
        return "a living process holds a lock on it"
    status = status_of(file, walk=False)
    alive = sum(producer.state == "alive" for producer in status.producers)
    parts = []
    if status.collector.alive:
        parts.append(f"read by {status.collector.label} (pid {status.collector.pid})")
    if alive:
        parts.append(f"{several(alive, 'living producer')}")
    return ", ".join(parts) or "a living process has it open"


def remove(found: Leftover, *, force: bool = False) -> None:
    """Remove a leftover, unless a process began to use it after the check."""
    if not may_go(found, force=force):
        raise ValueError(f"{printable(found.path)}: expected a removable file; {found.reason}")
    if force:
        if found.kind == "segment":
            unlink(found.name)
        elif found.kind != "socket" or found.verdict == "removable":
            _unlink(found)
        return
    if found.kind == "socket":
        again = _check_socket(found)
        if again.verdict != "removable":
            raise errors.BusBusyError(f"{printable(found.path)}: {again.reason} now; left alone")
        _unlink(found)
        return
    fd = _open_again(found, os.O_RDWR)
    lock = try_lock if found.kind == "companion" else _core.lock_all
    try:
        if not _same(found, os.fstat(fd)) or not lock(fd):
            raise errors.BusBusyError(
                f"{printable(found.path)}: a process has begun to use it; left alone"
            )
        _unlink(found)
    finally:
        os.close(fd)


def _same(found: Leftover, info: os.stat_result) -> bool:
    return (info.st_dev, info.st_ino) == (found.device, found.inode)


def _unlink(found: Leftover) -> None:
    if not _same(found, os.lstat(found.path)):
        raise errors.BusBusyError(
            f"{printable(found.path)}: the name leads to another file now; left alone"
        )
    os.unlink(found.path)
