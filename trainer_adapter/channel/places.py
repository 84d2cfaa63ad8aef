"""Where a step's tensors lie in its payload: the table that travels as meta. Pure.

Invariant of a checked table: each tensor lies inside the payload, with the bytes of its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shmbus.channel import ChannelDamagedError
from trainer_adapter.channel.specs import TensorSpec, size_of
from trainer_adapter.device.arena import BufferName
from trainer_adapter.weights.manifest import ALIGNMENT, DTYPE_BYTES, TensorPlace

__all__ = ["Places", "check_places", "decode_places", "plan_places"]


class Places(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A step's table.

    Attributes
    ----------
    tensors : list of TensorPlace
        In the order in which they were sent.
    meta : dict
        Of the user.
    buffer : BufferName | None
        Where the payload lies; None for the step's own slot of the segment.
    """

    tensors: list[TensorPlace]
    meta: dict[str, Any]
    buffer: BufferName | None = None


def plan_places(specs: Mapping[str, TensorSpec]) -> tuple[list[TensorPlace], int]:
    """Lay tensors out behind each other; returns their places and the bytes of all."""
    places = []
    end = 0
    for name, spec in specs.items():
        offset = (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        end = offset + size_of(spec)
        shape = tuple(size or 0 for size in spec.shape)
        places.append(TensorPlace(name, spec.dtype, shape, offset, end - offset))
    return places, end


def decode_places(data: bytes, what: str) -> Places:
    """Decode a table; `check_places` compares it with its payload.

    Parameters
    ----------
    data : bytes
        What came.
    what : str
        For messages.

    Returns
    -------
    Places

    Raises
    ------
    ChannelDamagedError
        It is none.
    """
    try:
        return msgspec.msgpack.decode(data, type=Places)
    except msgspec.MsgspecError as error:
        raise ChannelDamagedError(f"{what}: its table of tensors is none ({error})") from error


def check_places(places: Places, size: int, what: str) -> None:
    """Check a table against its payload.

    Parameters
    ----------
    places : Places
        Decoded.
    size : int
        Bytes of the payload.
    what : str
        For messages.

    Raises
    ------
    ChannelDamagedError
        A tensor lies outside, or is none.
    """
    for place in places.tensors:
        known = place.dtype in DTYPE_BYTES and min(place.shape, default=0) >= 0
        inside = place.offset >= 0 and place.offset % ALIGNMENT == 0
        if (
            not (known and inside)
            or size_of(TensorSpec(place.dtype, place.shape)) != place.size
            or place.offset + place.size > size
        ):
            raise ChannelDamagedError(f"{what}: tensor {place.name!r} does not lie in its payload")
