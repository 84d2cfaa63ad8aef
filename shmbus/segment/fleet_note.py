"""A fleet's note about inference servers, for processes without engines.

The whole note is `shmbus.engines.pause_note.PauseNotice`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from shmbus.data.encoding import decodable
from shmbus.errors import LayoutMismatchError
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus.segment.own_file import read_own

#: Companion file of the note.
NOTE_KIND: Final = "fleet"
#: Reason of the bus's pause while servers sleep.
ASLEEP_REASON: Final = "the inference servers sleep while the trainer has the GPU"
_LENGTH_BYTES: Final = 4
#: Level of a sleep that discards weights.
DISCARDED: Final = 2


class Sleep(msgspec.Struct, frozen=True):
    """Memory of a sleeping server."""

    #: 2 without weights, 1 with weights on the host or again on the device.
    level: int
    #: True once the weights' memory is awake, and the cache's memory is not.
    has_weights: bool = False
    #: True from before a request that moves memory until its answer.
    moves: bool = False


@decodable
class FleetNote(msgspec.Struct, frozen=True):
    """Part of a note read by salts, labels and status."""

    #: True while weights of servers may change.
    updating: bool = True
    #: Sleeping servers by address, and the begin of their sleep.
    asleep: dict[str, Sleep] = {}
    asleep_unix_ns: int = 0


def note_path(bus: str) -> str:
    """Return the path of a bus's note."""
    return SHM_DIRECTORY + companion_name(NOTE_KIND, bus)


def framed(encoded: bytes) -> bytes:
    """Return a note's bytes with their length: one write replaces a longer note."""
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def unframed(raw: bytes) -> bytes:
    """Return the bytes of the last whole write."""
    end = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
    return raw[_LENGTH_BYTES:end]


def read_fleet_note(bus: str) -> FleetNote | None:
    """Read a bus's note; None without a note of this user."""
    try:
        raw = read_own(note_path(bus), f"the note of bus {bus!r} about its inference servers")
    except (FileNotFoundError, PermissionError, LayoutMismatchError):
        return None
    if not raw:
        return None
    try:
        return msgspec.msgpack.decode(unframed(raw), type=FleetNote)
    except msgspec.DecodeError:
        return FleetNote()  # a write is under way
