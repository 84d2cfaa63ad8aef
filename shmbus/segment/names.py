"""Names of buses, and their files in /dev/shm.

::

    shmbus.NAME          the segment of a bus
    shmbus-NAME.sock     the socket of its daemon (`socket_path`)
    shmbus-KIND.NAME     a companion: a segment beside the bus, such as weights
    shmbus+DIGEST.sock   socket of the owner of a companion's memory (outside of /dev/shm)

Invariant: no two buses, sockets or companions share a file name.

A process that uses a companion holds a shared ``flock`` on it, the sign by which `shmbus gc`
recognises an abandoned companion.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import stat

PREFIX = "/shmbus."
SHM_DIRECTORY = "/dev/shm"
SOCKET_SUFFIX = ".sock"
#: Between a bus and its columns, in the name of the annotators' bus for its groups.
COLUMNS_INFIX = ".columns."

#: Bytes of a bus name: with the longest prefix the name fits a file name of 255 bytes.
MAX_NAME_BYTES = 200
#: Bytes of a path in sockaddr_un, without the NUL.
_MAX_PATH_BYTES = 107
#: Bytes of a file's name in Linux.
MAX_FILE_NAME_BYTES = 255

_COMPANION = re.compile(r"shmbus-([a-z]+)\.(.+)", re.DOTALL)


def check_name(name: object) -> str:
    """Return the name if it can name a bus; if not, raise TypeError or ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"bus name: expected a str, got {type(name).__name__}")
    encoded = name.encode("utf-8", "replace")
    if not encoded or len(encoded) > MAX_NAME_BYTES or not {"/", "\0"}.isdisjoint(name):
        raise ValueError(
            f"bus name: expected 1 to {MAX_NAME_BYTES} bytes without '/' and NUL, got "
            f"{name!r}; it becomes the file {SHM_DIRECTORY}{PREFIX}NAME"
        )
    if encoded != name.encode("utf-8", "surrogatepass"):
        raise ValueError(f"bus name: expected text that UTF-8 can encode, got {name!r}")
    if name.endswith(SOCKET_SUFFIX):
        raise ValueError(
            f"bus name: expected a name that does not end in {SOCKET_SUFFIX!r}, the end of sockets "
            f"beside buses, got {name!r}"
        )
    return name


def shm_path(name: str) -> str:
    """Return the file of a bus name."""
    return f"{SHM_DIRECTORY}{PREFIX}{name}"


def socket_path(name: str) -> str:
    """Return the socket of a bus: in /dev/shm, visible to containers that share a bus."""
    path = f"{SHM_DIRECTORY}/shmbus-{check_name(name)}{SOCKET_SUFFIX}"
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:40]
        path = f"{SHM_DIRECTORY}/shmbus+{digest}{SOCKET_SUFFIX}"
    return path


def bus_names() -> list[str]:
    """Return the bus names of all regular files named like a segment, sorted."""
    prefix = PREFIX.removeprefix("/")
    names = []
    for entry in os.scandir(SHM_DIRECTORY):
        with contextlib.suppress(FileNotFoundError):  # removed after the listing
            if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                names.append(entry.name[len(prefix) :])
    return sorted(name for name in names if name)


def companion_name(kind: str, bus: str) -> str:
    """Name a companion of a bus as ``shm_open`` takes it."""
    name = f"/shmbus-{kind}.{check_name(bus)}"
    if len(name.encode("utf-8", "surrogatepass")) > MAX_FILE_NAME_BYTES + 1:
        raise ValueError(
            f"companion of bus {bus!r}: expected a kind of few letters, got one of {len(kind)}: "
            f"with it the file's name would have more than {MAX_FILE_NAME_BYTES} bytes"
        )
    if parse_companion(name[1:]) != (kind, bus):
        raise ValueError(
            f"companion {kind!r} of bus {bus!r}: expected a kind of lower-case letters"
        )
    return name


def memory_socket(kind: str, bus: str) -> str:
    """Return the socket path of a companion's memory owner, outside of /dev/shm."""
    digest = hashlib.sha256(os.fsencode("memory of " + companion_name(kind, bus))).hexdigest()
    return f"{SHM_DIRECTORY}/shmbus+{digest[:40]}{SOCKET_SUFFIX}"


def remove_dead_socket(kind: str, bus: str) -> None:
    """Remove the `memory_socket` of a dead owner; a living owner keeps its own."""
    _remove_if_dead(memory_socket(kind, bus), socket.SOCK_SEQPACKET)


def remove_daemon_socket(name: str) -> None:
    """Remove the `socket_path` of a dead daemon; a living daemon keeps its own."""
    _remove_if_dead(socket_path(name), socket.SOCK_STREAM)


def _remove_if_dead(path: str, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            # Other kinds of files refuse too, and belong to other programs.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)
        except OSError:
            pass  # missing, of another kind, or foreign


def parse_companion(file: str) -> tuple[str, str] | None:
    """Return kind and bus of a file named like a companion; None for another file."""
    found = _COMPANION.fullmatch(file)
    if found is None or file.endswith(SOCKET_SUFFIX):
        return None
    return found[1], found[2]


def identity(name: str) -> os.stat_result | None:
    """Return the stat of the file of a bus; None without a file."""
    try:
        return os.stat(shm_path(name))
    except FileNotFoundError:
        return None


def is_named(name: str, known: os.stat_result) -> bool:
    """Tell if the name still leads to that file."""
    found = identity(name)
    return found is not None and os.path.samestat(found, known)


def leads_to(path: str, known: os.stat_result) -> bool:
    """Tell if a path still leads to that file, and not over a link."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), known)
    except FileNotFoundError:
        return False
