"""Opening segments in /dev/shm, waiting for them, and unlinking them.

Invariant: readers open only files of this user (`own_file`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator

from shmbus import errors
from shmbus.segment import shared_file
from shmbus.segment.explain import UnfinishedError, layout_error, not_found_error
from shmbus.segment.names import (
    SHM_DIRECTORY,
    check_name,
    companion_name,
    remove_daemon_socket,
    shm_path,
)
from shmbus.segment.own_file import open_own
from shmbus_ext import _core

#: Seconds attaching waits for a segment whose creator still allocates memory: touching tens of
#: GiB takes seconds.
ATTACH_WAIT_S = 10.0


#: Seconds between two looks for an expected bus: short at first, since workers and trainer
#: start together, then growing until a thousand waiting workers cost nothing.
_FIRST_LOOK_S = 0.005
_LAST_LOOK_S = 0.1


def until_there(name: str, wait_s: float | None) -> Iterator[float]:
    """Yield seconds for the caller to sleep until a finished bus of that name exists."""
    if wait_s == 0:
        return
    began = time.monotonic()
    rest_s = _FIRST_LOOK_S
    while (there := _is_there(name)) is not True:
        left_s = math.inf if wait_s is None else began + wait_s - time.monotonic()
        if left_s <= 0:
            if there is None:
                raise not_found_error(name, wait_s)
            raise layout_error(name, "unfinished", 0, 0)
        yield min(rest_s, left_s)
        rest_s = min(_LAST_LOOK_S, 1.5 * rest_s)


def wait_for_bus(name: str, wait_s: float | None) -> None:
    """Sleep until a bus of the name exists, as defined by `until_there`."""
    for rest_s in until_there(name, wait_s):
        time.sleep(rest_s)


def _is_there(name: str) -> bool | None:
    """Tell if the segment is finished; None without a file of the name."""
    if not os.path.lexists(shm_path(name)):
        return None
    try:
        fd = open_file(name, os.O_RDONLY)
    except errors.BusNotFoundError:
        return None
    except (errors.ShmbusError, OSError):
        return True  # attaching reports the defect
    try:
        return has_magic(fd)
    except OSError:
        return True
    finally:
        os.close(fd)


def has_magic(fd: int) -> bool:
    """Tell if a segment's creator finished: the first eight bytes come last."""
    return any(os.pread(fd, 8, 0))


def open_segment(name: str, *, read_only: bool = False) -> _core.Segment:
    """Map a segment; wait up to ATTACH_WAIT_S for a creator that still allocates memory."""
    check_name(name)
    deadline = time.monotonic() + ATTACH_WAIT_S
    while True:
        try:
            # An interrupt between two of its steps could close a descriptor twice, or never.
            return _core.uninterrupted(open_once, name, read_only)
        except UnfinishedError as error:
            if time.monotonic() > deadline:
                raise layout_error(name, "unfinished", 0, 0) from error
            time.sleep(0.005)


def open_if_there(name: str) -> _core.Segment | None:
    """Map a segment; None for a missing or unfinished segment."""
    if not os.path.lexists(shm_path(name)):
        return None
    try:
        return open_once(name, read_only=False)
    except (errors.BusNotFoundError, UnfinishedError):
        return None


def open_once(name: str, read_only: bool) -> _core.Segment:
    """Map a finished segment; UnfinishedError for an unfinished segment."""
    path = shm_path(name)
    try:
        segment = shared_file.open_once(
            path, f"bus {name!r}", read_only, lambda fd: _core.Segment.open(fd, name, read_only)
        )
    except FileNotFoundError as error:
        raise not_found_error(name) from error
    if segment is None:
        raise UnfinishedError(f"bus {name!r}: {path} was removed while it was being opened")
    return segment


def open_file(name: str, how: int) -> int:
    """Open the file of a bus, if owned by this user (`own_file`)."""
    try:
        return open_own(shm_path(name), how, f"bus {name!r}")
    except FileNotFoundError as error:
        raise not_found_error(name) from error


def unlink(name: str) -> None:
    """Remove a bus's name; its memory is freed when the last process has closed it.

    Remaining holders get BusRemovedError from the next put, or from a take that would wait.

    Parameters
    ----------
    name : str
        The bus.

    Raises
    ------
    BusNotFoundError
        The bus does not exist.
    PermissionError
        The bus belongs to another user.
    LayoutMismatchError
        The name leads to a directory.
    """
    check_name(name)
    try:
        segment = open_once(name, read_only=False)
    except (errors.ShmbusError, OSError):
        segment = None  # a damaged, unfinished or foreign segment still holds a name
    try:
        os.unlink(shm_path(name))
        if segment is not None:
            segment.note_removal()
        with contextlib.suppress(OSError, ValueError):
            os.unlink(SHM_DIRECTORY + companion_name("partial", name))
        # A reader of the next bus of this name would wait for the daemon that died with this bus.
        remove_daemon_socket(name)
    except FileNotFoundError as error:
        raise errors.BusNotFoundError(
            f"there is no bus {name!r} to remove ({shm_path(name)} does not exist): already "
            "removed, or misspelled; `shmbus list` shows the existing buses"
        ) from error
    except IsADirectoryError as error:
        raise errors.LayoutMismatchError(
            f"bus {name!r}: {shm_path(name)} is a directory, not a shmbus segment; check its "
            "content, and remove it by rmdir"
        ) from error
    except PermissionError as error:
        raise PermissionError(f"bus {name!r}: may not remove {shm_path(name)}") from error
    finally:
        if segment is not None:
            segment.close()
