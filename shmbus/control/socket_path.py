"""The path of a daemon's socket, and the process at the other end of a Unix socket.

Invariant: a peer is trusted only after the kernel has named our own user as its user.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct

from shmbus.segment.names import SHM_DIRECTORY, SOCKET_SUFFIX, check_name

__all__ = ["check_peer", "peer", "socket_path"]

#: Bytes of a path in sockaddr_un, without the NUL.
_MAX_PATH_BYTES = 107
_CREDENTIALS = struct.Struct("=iII")


def socket_path(name: str) -> str:
    """Return the socket of a bus: in /dev/shm, where containers that share a bus find it."""
    path = f"{SHM_DIRECTORY}/shmbus-{check_name(name)}{SOCKET_SUFFIX}"
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:40]
        path = f"{SHM_DIRECTORY}/shmbus+{digest}{SOCKET_SUFFIX}"
    return path


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def check_peer(name: str, connection: socket.socket) -> int:
    """Return the peer's pid; PermissionError where it runs as another user."""
    pid, uid = peer(connection)
    if uid != os.geteuid():
        raise PermissionError(
            f"bus {name!r}: the process at {socket_path(name)} (pid {pid}) runs as uid {uid}, this "
            f"one as uid {os.geteuid()}; a bus is for one user"
        )
    return pid
