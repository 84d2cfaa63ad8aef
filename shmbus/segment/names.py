"""Names of buses, and the files in /dev/shm that they stand for.

::

    shmbus.NAME          the segment of a bus
    shmbus-NAME.sock     the socket of its daemon (`socket_path`)
    shmbus-KIND.NAME     a companion: a segment that goes with the bus and is none, such as weights
    shmbus+DIGEST.sock   where the owner of a companion's memory hands it out (not in there)

Invariant: no bus, socket or companion can have the file name of another.

A process that uses a companion holds a shared ``flock`` on it, so that `shmbus gc` can tell an
abandoned one.
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
#: Between a bus and its columns, in the name of the bus where annotators get its groups.
COLUMNS_INFIX = ".columns."

#: Bytes of a bus name: with the longest prefix it is a file name, and those end at 255 bytes.
MAX_NAME_BYTES = 200
#: Bytes of a path in sockaddr_un, without the NUL.
_MAX_PATH_BYTES = 107
#: Of a file's name, as Linux has it.
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
    return name


def shm_path(name: str) -> str:
    """Return the file that a bus name stands for."""
    return f"{SHM_DIRECTORY}{PREFIX}{name}"


def socket_path(name: str) -> str:
    """Return the socket of a bus: in /dev/shm, where containers that share a bus find it."""
    path = f"{SHM_DIRECTORY}/shmbus-{check_name(name)}{SOCKET_SUFFIX}"
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:40]
        path = f"{SHM_DIRECTORY}/shmbus+{digest}{SOCKET_SUFFIX}"
    return path


def bus_names() -> list[str]:
    """Return the names of all regular files that are called like the segment of a bus, sorted."""
    prefix = PREFIX.removeprefix("/")
    names = []
    for entry in os.scandir(SHM_DIRECTORY):
        with contextlib.suppress(FileNotFoundError):  # it was removed after the listing
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
            f"companion {kind!r} of bus {bus!r}: expected a kind of lower-case letters, and a bus "
            f"name that does not end in {SOCKET_SUFFIX!r}; choose another name"
        )
    return name


def memory_socket(kind: str, bus: str) -> str:
    """Return where the owner of the memory of a companion listens, which is not in /dev/shm."""
    digest = hashlib.sha256(os.fsencode("memory of " + companion_name(kind, bus))).hexdigest()
    return f"{SHM_DIRECTORY}/shmbus+{digest[:40]}{SOCKET_SUFFIX}"


def remove_dead_socket(kind: str, bus: str) -> None:
    """Remove the `memory_socket` that an owner's death has left; a living owner keeps its own."""
    _remove_if_dead(memory_socket(kind, bus), socket.SOCK_SEQPACKET)


def remove_daemon_socket(name: str) -> None:
    """Remove the `socket_path` that a daemon's death has left; a living daemon keeps its own."""
    _remove_if_dead(socket_path(name), socket.SOCK_STREAM)


def _remove_if_dead(path: str, kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            # Any other file refuses too, and is somebody's.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)
        except OSError:
            pass  # none, of another kind, or not ours


def parse_companion(file: str) -> tuple[str, str] | None:
    """Return kind and bus of a file that is called like a companion; None for another file."""
    found = _COMPANION.fullmatch(file)
    if found is None or file.endswith(SOCKET_SUFFIX):
        return None
    return found[1], found[2]


def identity(name: str) -> os.stat_result | None:
    """Return the stat of the file of a bus; None where there is none."""
    try:
        return os.stat(shm_path(name))
    except FileNotFoundError:
        return None


def is_named(name: str, known: os.stat_result) -> bool:
    """Whether the name still leads to that file."""
    found = identity(name)
    return found is not None and os.path.samestat(found, known)


def leads_to(path: str, known: os.stat_result) -> bool:
    """Whether a path still leads to that file, and not over a link."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), known)
    except FileNotFoundError:
        return False
