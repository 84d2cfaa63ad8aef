"""A channel as a file: creating, opening and removing it.

Invariants:

- A channel that could not be completed is removed before the error is raised.
- What is read was opened as a file of this user (`shmbus.segment.own_file`).
"""

from __future__ import annotations

import contextlib
import os
import time

from shmbus import errors
from shmbus.errors import DamagedError
from shmbus.segment.made_or_removed import made_or_removed
from shmbus.segment.names import SHM_DIRECTORY, companion_name, leads_to, remove_dead_socket
from shmbus.segment.own_file import open_own
from shmbus_ext import _core

__all__ = ["channel_path", "create_handle", "living_statement", "open_handle", "unlink_channel"]

#: What the files of channels are called: ``shmbus-channel.NAME``.
KIND = "channel"

#: Of its layout; C would cut what has more bits.
_MOST_SLOTS = 8
_MOST_BYTES = 1 << 44

#: Seconds between two looks for a channel that is not there yet.
_POLL_S = 0.01


def channel_path(name: str) -> str:
    """Return the file of a channel."""
    return f"{SHM_DIRECTORY}{companion_name(KIND, name)}"


def create_handle(name: str, slots: int, max_bytes: int) -> _core.Channel:
    """Create a channel; FileExistsError where there is one."""
    path = channel_path(name)
    if not 1 <= slots <= _MOST_SLOTS or not 1 <= max_bytes <= _MOST_BYTES:
        raise ValueError(
            f"channel {name!r}: expected 1 to {_MOST_SLOTS} slots of 1 to {_MOST_BYTES} bytes, got "
            f"{slots} of {max_bytes}"
        )

    def remove(channel: _core.Channel) -> None:
        channel.close()
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            os.unlink(path)

    return made_or_removed(_create_into, remove, name, path, slots, max_bytes)


def _create_into(
    made: list[_core.Channel], name: str, path: str, slots: int, max_bytes: int
) -> None:
    """Create the file and the channel in it, for `create_handle`; where that fails, neither."""
    fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, f"channel {name!r}")
    try:
        channel = _core.Channel.create(fd, name, slots, max_bytes)
        if not isinstance(channel, _core.Channel):
            raise no_space(name, "its tables")
    except BaseException:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            os.unlink(path)
        raise
    made.append(channel)


def no_space(name: str, what: str) -> errors.CapacityError:
    """Say that /dev/shm is full."""
    room = os.statvfs(SHM_DIRECTORY)
    free = room.f_bavail * room.f_frsize
    return errors.CapacityError(
        f"channel {name!r}: {SHM_DIRECTORY} has no room for {what} ({free} "
        "bytes are free); nothing was sent, and the channel stays usable: remove old segments "
        "(`shmbus gc`), or enlarge it (docker run --shm-size=..., mount -o remount,size=...)"
    )


def open_handle(
    name: str, *, read_only: bool = False, deadline: float | None = None
) -> _core.Channel:
    """Open a channel; waits until the deadline (``time.monotonic``) for one to appear."""
    path = channel_path(name)
    while True:
        late = deadline is None or time.monotonic() >= deadline
        try:
            found = _core.uninterrupted(_open_once, name, path, read_only)
        except FileNotFoundError as error:
            if late:
                raise errors.BusNotFoundError(
                    f"there is no channel {name!r} ({path} does not exist): its sender has not "
                    "created it yet, it was removed, or this container has another /dev/shm; start "
                    "the sender, or check the name"
                ) from error
        else:
            if isinstance(found, _core.Channel):
                return found
            status, number = found
            if status != _core.CHANNEL_UNFINISHED or late:
                raise _layout_error(name, path, status, number)
        time.sleep(_POLL_S)


def _open_once(name: str, path: str, read_only: bool) -> _core.Channel | tuple[int, int]:
    fd = open_own(path, os.O_RDONLY if read_only else os.O_RDWR, f"channel {name!r}")
    try:
        identity = os.fstat(fd)
        opened = _core.Channel.open(fd, name, read_only)
    except BaseException:
        os.close(fd)
        raise
    if not isinstance(opened, _core.Channel):
        os.close(fd)
        return opened
    if not leads_to(path, identity):
        # Removed between opening and locking: without a name it is no channel any more.
        opened.close()
        return _core.CHANNEL_UNFINISHED, 0
    return opened


def living_statement(name: str) -> bytes | None:
    """Return what the living sender of a channel has stated, without being a side of it.

    Parameters
    ----------
    name : str
        Of the channel.

    Returns
    -------
    bytes or None
        Empty where it has stated nothing; None where there is no channel, or no living sender.

    Raises
    ------
    DamagedError
        The statement does not match its checksum.
    LayoutMismatchError, PermissionError
        What is there is no channel of this version, or of another user.
    """
    try:
        handle = open_handle(name, read_only=True)
    except errors.BusNotFoundError:
        return None
    try:
        life = handle.look(_core.CHANNEL_SENDER)[0]
        found = handle.statement(_core.CHANNEL_SENDER)
    finally:
        handle.close()
    if life != _core.CHANNEL_ALIVE:
        return None
    if isinstance(found, tuple):
        return found[1]
    if found == _core.CHANNEL_NOTHING:
        return b""
    raise DamagedError(
        f"channel {name!r}: the sender's statement does not match its checksum; remove the channel "
        f"with shmbus.channel.unlink_channel({name!r}), and resume both sides from a checkpoint"
    )


def _layout_error(name: str, path: str, status: int, found: int) -> errors.LayoutMismatchError:
    text = {
        _core.CHANNEL_UNFINISHED: f"{path} was never finished; its creator died, or still works",
        _core.CHANNEL_BAD_MAGIC: f"{path} is no channel, or its header was overwritten",
        _core.CHANNEL_BAD_VERSION: f"{path} has layout version {found}, this process needs "
        f"{_core.CHANNEL_LAYOUT_VERSION}; restart the processes that run another shmbus",
        _core.CHANNEL_BAD_GEOMETRY: f"the header of {path} is damaged (its checksum or sizes are "
        "wrong)",
        _core.CHANNEL_TRUNCATED: f"{path} has {found} bytes, fewer than its header says",
    }[status]
    return errors.LayoutMismatchError(
        f"channel {name!r}: {text}; remove it with shmbus.channel.unlink_channel({name!r}) once "
        "nothing uses it, and create it again"
    )


def unlink_channel(name: str) -> None:
    """Remove a channel's name; its memory is freed when both sides have closed it.

    Parameters
    ----------
    name : str
        Of the channel.

    Raises
    ------
    BusNotFoundError
        There is none.
    PermissionError
        It belongs to another user.
    """
    path = channel_path(name)
    try:
        os.unlink(path)
    except FileNotFoundError as error:
        raise errors.BusNotFoundError(
            f"there is no channel {name!r} to remove ({path} does not exist)"
        ) from error
    remove_dead_socket("channel", name)
