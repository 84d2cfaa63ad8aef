"""The path of a daemon's socket, and the process at the other end of a Unix socket.

Invariant: a peer is trusted only after the kernel has named our own user as its user. A foreign
file in the socket's place is named, and neither waited for nor removed.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import struct

from shmbus import errors
from shmbus.segment.names import socket_path
from shmbus.segment.own_file import kind_of

_CREDENTIALS = struct.Struct("=iII")


def obstacle(name: str) -> str | None:
    """Describe a foreign file in the place of a bus's socket; None without an obstacle."""
    path = socket_path(name)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid():
        return None
    return f"{path} is {kind_of(found.st_mode)} of {_user(found.st_uid)}, and no daemon of this bus"


def require_place(name: str) -> None:
    """Check the place for a daemon's socket."""
    path = socket_path(name)
    what = obstacle(name)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if what is None or (stat.S_ISSOCK(found.st_mode) and os.geteuid() == 0):
        return
    remove = "rm -r" if stat.S_ISDIR(found.st_mode) else "rm"
    who = "" if found.st_uid == os.geteuid() else f", as {_user(found.st_uid)} or root"
    raise errors.DaemonUnavailableError(
        f"bus {name!r}: its daemon cannot listen: {what}; expected nothing there, or the socket of "
        f"a daemon that died; remove it ({remove} {path}{who}), or choose another name for the bus"
    )


def _user(uid: int) -> str:
    if uid == os.geteuid():
        return f"this user (uid {uid})"
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def check_peer(name: str, connection: socket.socket) -> int:
    """Return the peer's pid; PermissionError if another user runs the peer."""
    pid, uid = peer(connection)
    if uid != os.geteuid():
        raise PermissionError(
            f"bus {name!r}: the process at {socket_path(name)} (pid {pid}) runs as uid {uid}, this "
            f"one as uid {os.geteuid()}; a bus is for one user"
        )
    return pid
