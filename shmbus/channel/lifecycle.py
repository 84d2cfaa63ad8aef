"""A channel as a file: how it is created, opened and removed."""

from __future__ import annotations

from shmbus import errors
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus.segment.shared_file import Companion
from shmbus_ext import _core

#: What the files of channels are called: ``shmbus-channel.NAME``.
KIND = "channel"


def channel_path(name: str) -> str:
    """Return the file of a channel."""
    return f"{SHM_DIRECTORY}{companion_name(KIND, name)}"


def companion_of(name: str) -> Companion[_core.Channel]:
    """Return what makes and opens the file of a channel."""
    return Companion(
        _core.Channel,
        _core.CHANNEL_LAYOUT_VERSION,
        KIND,
        name,
        title=f"channel {name!r}",
        unlink=f"shmbus.channel.unlink_channel({name!r})",
        maker="sender",
    )


def living_statement(name: str) -> bytes | None:
    """Return what the living sender of a channel has stated, without being a side of it."""
    try:
        handle = companion_of(name).open(name, read_only=True)
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
    if found == _core.SHARED_NOTHING:
        return b""
    raise errors.DamagedError(
        f"channel {name!r}: the sender's statement does not match its checksum; remove the channel "
        f"with shmbus.channel.unlink_channel({name!r}), and resume both sides from a checkpoint"
    )


def unlink_channel(name: str) -> None:
    """Remove a channel's name; its memory is freed when both sides have closed it."""
    companion_of(name).unlink()
