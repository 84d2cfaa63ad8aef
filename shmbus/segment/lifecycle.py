"""Creating, opening and unlinking segments in /dev/shm.

Invariants:

- A segment that could not be completed is removed before create_segment raises.
- Opening waits for no file that others left under a name, and checks its owner before its content.
"""

from __future__ import annotations

import contextlib
import operator
import os
import stat
import time

import posix_ipc

from shmbus import errors
from shmbus._arguments import LARGEST_SIZE, parse_size
from shmbus.segment.explain import UnfinishedError, layout_error, not_found_error, space_error
from shmbus.segment.names import PREFIX, SHM_DIRECTORY, check_name, is_named, shm_path
from shmbus_ext import _core

#: Seconds that attaching waits for a segment whose creator is still allocating it: touching tens of
#: GiB takes seconds.
ATTACH_WAIT_S = 10.0


def create_segment(
    name: str, capacity: int | str, max_producers: int, extent_bytes: int
) -> _core.Segment:
    """Create, allocate and touch the whole segment; it is ready when this returns."""
    check_name(name)
    size = parse_size(capacity, "capacity")
    for label, value in (("max_producers", max_producers), ("extent_bytes", extent_bytes)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{label}: expected an int, got {type(value).__name__}")
    max_producers, extent_bytes = operator.index(max_producers), operator.index(extent_bytes)
    if not 1 <= max_producers <= _core.MAX_PRODUCERS:
        raise ValueError(f"max_producers: expected 1 to {_core.MAX_PRODUCERS}, got {max_producers}")
    if not 0 <= extent_bytes <= LARGEST_SIZE:
        raise ValueError(f"extent_bytes: expected 0 (choose) to {LARGEST_SIZE}, got {extent_bytes}")
    if os.path.lexists(shm_path(name)):
        # Before checking for space, which this very bus may occupy.
        raise _exists(name)
    _check_room(name, size)
    try:
        shm = posix_ipc.SharedMemory(PREFIX + name, posix_ipc.O_CREX, mode=0o600)
    except posix_ipc.ExistentialError as error:
        raise _exists(name) from error
    except posix_ipc.PermissionsError as error:
        raise PermissionError(
            f"bus {name!r}: may not create {shm_path(name)}; it belongs to another user, or "
            f"{SHM_DIRECTORY} is not writable for uid {os.geteuid()}"
        ) from error
    identity = os.fstat(shm.fd)
    try:
        segment = _core.Segment.create(shm.fd, name, size, max_producers, extent_bytes)
    except BaseException:
        os.close(shm.fd)
        with contextlib.suppress(posix_ipc.ExistentialError):  # another process has removed it
            posix_ipc.unlink_shared_memory(PREFIX + name)
        raise
    if not is_named(name, identity):
        segment.close()
        raise errors.BusNotFoundError(
            f"bus {name!r}: another process removed {shm_path(name)} while it was being created; "
            "create it again"
        )
    return segment


def _exists(name: str) -> errors.BusExistsError:
    return errors.BusExistsError(
        f"bus {name!r} exists already ({shm_path(name)}); attach with "
        f"Bus.open({name!r}), or remove it with shmbus.unlink({name!r}) if no process uses it"
    )


def _check_room(name: str, size: int) -> None:
    """Refuse a size that cannot fit before the kernel fills its memory to find out."""
    room = os.statvfs(SHM_DIRECTORY)
    if size > room.f_bavail * room.f_frsize:
        raise space_error(name, size)


def open_segment(name: str, *, read_only: bool = False) -> _core.Segment:
    """Map a segment; waits up to ATTACH_WAIT_S for a creator that is still allocating it."""
    check_name(name)
    deadline = time.monotonic() + ATTACH_WAIT_S
    while True:
        try:
            # Between two of its steps a descriptor would be closed twice, or never.
            return _core.uninterrupted(_open_once, name, read_only)
        except UnfinishedError as error:
            if time.monotonic() > deadline:
                raise layout_error(name, "unfinished", 0, 0) from error
            time.sleep(0.005)


def open_if_there(name: str) -> _core.Segment | None:
    """Map a segment; None where there is none, or none that is finished."""
    try:
        return _open_once(name, read_only=False)
    except (errors.BusNotFoundError, UnfinishedError):
        return None


def _open_once(name: str, read_only: bool) -> _core.Segment:
    fd = _open_file(name, os.O_RDONLY if read_only else os.O_RDWR)
    try:
        identity = os.fstat(fd)
        _check_file(name, identity)
        segment = _core.Segment.open(fd, name, read_only)
    except BaseException:
        os.close(fd)
        raise
    if not is_named(name, identity):
        # Removed between opening and locking: a segment without a name is no bus any more.
        segment.close()
        raise UnfinishedError(
            f"bus {name!r}: {shm_path(name)} was removed while it was being opened"
        )
    return segment


def _open_file(name: str, how: int) -> int:
    """Open the file under a name, without waiting for a FIFO's other end or following a link."""
    path = shm_path(name)
    try:
        return os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise not_found_error(name) from error
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):  # removed since
            _check_file(name, os.lstat(path))
        if isinstance(error, PermissionError):
            raise PermissionError(
                f"bus {name!r}: may not open {path} as uid {os.geteuid()}; a bus is for the user "
                "who created it, with mode 0600"
            ) from error
        raise


def _check_file(name: str, found: os.stat_result) -> None:
    """Refuse a file of another user, who could read and truncate it, and what is no plain file."""
    path = shm_path(name)
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"bus {name!r}: {path} belongs to uid {found.st_uid}, this process runs as uid "
            f"{os.geteuid()}; a bus is for the user who created it: run as that user, or choose "
            "another name"
        )
    if not stat.S_ISREG(found.st_mode):
        raise errors.LayoutMismatchError(
            f"bus {name!r}: {path} is {_kind(found.st_mode)}, not a shmbus segment; look what it "
            "is for, and remove it, or choose another name"
        )


def _kind(mode: int) -> str:
    for is_kind, text in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a symbolic link"),
    ):
        if is_kind(mode):
            return text
    return "a device"


def unlink(name: str) -> None:
    """Remove a bus's name; its memory is freed when the last process has closed it.

    Whoever still holds it gets BusRemovedError from the next put, or from a take that would wait.

    Parameters
    ----------
    name : str
        The bus.

    Raises
    ------
    BusNotFoundError
        There is no such bus.
    PermissionError
        It belongs to another user.
    LayoutMismatchError
        There is a directory of that name.
    """
    check_name(name)
    try:
        segment = _open_once(name, read_only=False)
    except (errors.ShmbusError, OSError):
        segment = (
            None  # it may be damaged, unfinished or another user's: it has a name all the same
        )
    try:
        os.unlink(shm_path(name))
        if segment is not None:
            segment.note_removal()
    except FileNotFoundError as error:
        raise errors.BusNotFoundError(
            f"there is no bus {name!r} to remove ({shm_path(name)} does not exist): it was removed "
            "already, or is called otherwise; `shmbus list` shows what there is"
        ) from error
    except IsADirectoryError as error:
        raise errors.LayoutMismatchError(
            f"bus {name!r}: {shm_path(name)} is a directory, not a shmbus segment; look what it is "
            "for, and remove it by rmdir"
        ) from error
    except PermissionError as error:
        raise PermissionError(f"bus {name!r}: may not remove {shm_path(name)}") from error
    finally:
        if segment is not None:
            segment.close()
