"""Files in shared memory: making, opening and removing a bus, a pool or a channel.

Invariants:

- An error while making a file first removes the file, and no other file of its name. A finished
  file is returned, or removed.
- Readers open only files of this user (`own_file`), still named after locking.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

import posix_ipc

from shmbus import errors
from shmbus.segment.names import SHM_DIRECTORY, companion_name, leads_to, remove_dead_socket
from shmbus.segment.own_file import open_own
from shmbus_ext import _core

#: Seconds between two attempts to open a missing or unfinished file.
_POLL_S: Final = 0.005


#: A handle of the extension on such a file.
_H = TypeVar("_H", bound="_core.Segment | _core.SlotPool | _core.Channel")


def create_file(path: str, title: str, create: Callable[[int], _H]) -> _H:
    """Create a file and, by a descriptor owned by the handle, its content; or neither."""
    made: list[tuple[_H, os.stat_result]] = []
    try:
        # Allocation takes time in proportion to the memory, and a Ctrl-C waits for its end.
        _core.uninterrupted(_create_into, made, path, title, create)
        return made[0][0]
    except BaseException:
        for handle, known in made:
            handle.close()
            remove_file(path, known)
        raise


def _create_into(
    made: list[tuple[_H, os.stat_result]], path: str, title: str, create: Callable[[int], _H]
) -> None:
    try:
        name = path.removeprefix(SHM_DIRECTORY)  # as POSIX names it
        fd = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
    except posix_ipc.ExistentialError as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
    except posix_ipc.PermissionsError as error:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path) from error
    except OSError as error:  # without the file's name, and for a limit of files without a number
        number, said = error.errno or errno.EMFILE, error.strerror or str(error)
        raise OSError(number, said, path) from error
    known = os.fstat(fd)
    try:
        handle = create(fd)
    except BaseException as error:
        os.close(fd)
        # Another process may hold the lock to remove the file.
        if not (isinstance(error, OSError) and error.errno == errno.EBUSY):
            remove_file(path, known)
        raise
    if not leads_to(path, known):
        handle.close()
        raise errors.BusNotFoundError(
            f"{title}: another process removed {path} while it was being created; create it again"
        )
    made.append((handle, known))


def remove_file(path: str, known: os.stat_result) -> None:
    """Remove this file, but no newer file of its name."""
    if leads_to(path, known):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def open_once(path: str, title: str, read_only: bool, attach: Callable[[int], _H]) -> _H | None:
    """Open a file and, by its descriptor, its content; None for a file without a name by then."""
    fd = open_own(path, os.O_RDONLY if read_only else os.O_RDWR, title)
    try:
        known = os.fstat(fd)
        handle = attach(fd)
    except BaseException:
        os.close(fd)
        raise
    if leads_to(path, known):
        return handle
    # Removed between opening and locking: nameless files count for nothing.
    handle.close()
    return None


class _NotAttachedError(Exception):
    """Reason against a file as its name's kind."""

    def __init__(self, status: int, found: int) -> None:
        super().__init__(status, found)
        self.status, self.found = status, found


class Companion(Generic[_H]):
    """A file beside a bus: a pool or a channel, by its kind and the bus."""

    def __init__(
        self, type_: type[_H], layout_version: int, kind: str, bus: str, *, title: str,
        unlink: str, maker: str,
    ) -> None:  # fmt: skip
        self.path: Final = SHM_DIRECTORY + companion_name(kind, bus)
        self.title: Final = title
        self._type: Any = type_
        self._layout_version = layout_version
        self._kind, self._bus = kind, bus
        self._unlink, self._maker = unlink, maker

    def create(self, name: str, needed: int, *sizes: int) -> _H:
        """Make the file, with a name for the extension; BusExistsError for an existing file."""

        def create(fd: int) -> _H:
            handle = self._type.create(fd, name, *sizes)
            if isinstance(handle, self._type):
                return cast("_H", handle)
            raise self.no_space(needed)

        if os.path.lexists(self.path):
            # Before checking for space: the very file may occupy the space.
            raise self._exists()
        self.require_room(needed)
        try:
            return create_file(self.path, self.title, create)
        except FileExistsError as error:
            raise self._exists() from error

    def open(
        self, name: str, *, read_only: bool = False, deadline: float = 0.0, awaited: bool = False
    ) -> _H:
        """Open the file; wait until the deadline for its creator's end, or (`awaited`) start."""

        def attach(fd: int) -> _H:
            handle = self._type.open(fd, name, read_only)
            if isinstance(handle, self._type):
                return cast("_H", handle)
            raise _NotAttachedError(*handle)

        while True:
            late = time.monotonic() >= deadline
            status, number = _core.SHARED_UNFINISHED, 0
            try:
                os.lstat(self.path)  # a missing file, polled by idle workers, costs no thread
                found = _core.uninterrupted(open_once, self.path, self.title, read_only, attach)
                if found is not None:
                    return cast("_H", found)
            except FileNotFoundError as error:
                if late or not awaited:
                    raise self._missing() from error
            except _NotAttachedError as error:
                status, number = error.status, error.found
            if late or status != _core.SHARED_UNFINISHED:
                raise self._layout_error(status, number)
            time.sleep(_POLL_S)

    def unlink(self) -> None:
        """Remove its name, and the socket of a dead memory owner."""
        try:
            os.unlink(self.path)
        except FileNotFoundError as error:
            raise errors.BusNotFoundError(
                f"there is no {self.title} to remove ({self.path} does not exist)"
            ) from error
        remove_dead_socket(self._kind, self._bus)

    def require_room(self, needed: int) -> None:
        """Refuse a size beyond any limit, before the kernel kills a process of a full cgroup."""
        from shmbus.segment import room  # imported late: a producer makes no file

        if needed > room.tightest().left:
            raise self.no_space(needed)

    def no_space(self, needed: int) -> errors.CapacityError:
        """Name the limits too low for so many bytes."""
        from shmbus.segment import room

        return errors.CapacityError(f"{self.title}: {room.shortage(needed)}")

    def _exists(self) -> errors.BusExistsError:
        return errors.BusExistsError(
            f"{self.title} exists already ({self.path}); open it, or remove it with {self._unlink} "
            "if no process uses it"
        )

    def _missing(self) -> errors.BusNotFoundError:
        return errors.BusNotFoundError(
            f"there is no {self.title} ({self.path} does not exist): its {self._maker} has not "
            "made it yet, it was removed, or this container has another /dev/shm; start the "
            f"{self._maker}, or check the name with `shmbus gc`, which lists all files"
        )

    def _layout_error(self, status: int, found: int) -> errors.LayoutMismatchError:
        noun = self.title.partition(" ")[0]
        path = self.path
        why = {
            _core.SHARED_UNFINISHED: "was never finished; its creator died, or still works",
            _core.SHARED_BAD_MAGIC: f"is no {noun}, or its header was overwritten",
            _core.SHARED_BAD_VERSION: f"has layout version {found}, this process needs "
            f"{self._layout_version}; restart the processes that run another shmbus",
            _core.SHARED_BAD_GEOMETRY: "has a header that is damaged: wrong checksum or sizes",
            _core.SHARED_TRUNCATED: f"has {found} bytes, fewer than its header says",
        }[status]
        return errors.LayoutMismatchError(
            f"{self.title}: {path} {why}; remove it with {self._unlink} once nothing uses it, and "
            f"start the {self._maker} again"
        )
