"""Table of a step's tensors in its payload, sent as meta. Pure.

A message's meta is a head, equal for uniform steps, followed by the user's optional
meta: | bytes of the head, 4, little-endian | table | meta of the user |.

Invariant of a checked table: each tensor lies inside the payload, with the bytes of its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from shmbus.errors import DamagedError
from shmbus.tensors.agreement import TensorSpec, size_of
from shmbus.tensors.device.arena import BufferName
from shmbus.tensors.views import ALIGNMENT, DTYPE_BYTES, TensorPlace

#: Length prefix of a table, in bytes.
_LENGTH_BYTES: Final = 4


class Places(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A step's table."""

    tensors: list[TensorPlace]
    buffer: BufferName | None = None


#: Made once, at import: two threads that decode a type for the first time at once end in a crash.
_PLACES: Final = msgspec.msgpack.Decoder(Places)


class StepForm:
    """Common form of steps with equal names, dtypes and shapes."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.specs: Final = specs
        self.places: Final[list[TensorPlace]] = []
        end = 0
        for name, spec in specs.items():
            offset = (end + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
            end = offset + size_of(spec)
            shape = tuple(size or 0 for size in spec.shape)
            self.places.append(TensorPlace(name, spec.dtype, shape, offset, end - offset))
        self.size: Final = end


#: Characters of a meta shown in a message.
_SHOWN_META: Final = 200


def encode_head(form: StepForm, buffer: BufferName | None = None) -> bytes:
    """Return the head of the meta for a form's steps."""
    table = msgspec.msgpack.encode(Places(form.places, buffer))
    return (_LENGTH_BYTES + len(table)).to_bytes(_LENGTH_BYTES, "little") + table


def encode_meta(meta: Mapping[str, Any] | None) -> bytes:
    """Encode the meta behind the head."""
    if meta is None:
        return b""
    # An unreadable meta would reach the receiver again and again.
    _require_texts(meta)
    try:
        return msgspec.msgpack.encode(dict(meta)) if meta else b""
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"meta: expected values of MessagePack: {error}; nothing was sent: send numbers, "
            "texts and lists, and arrays as tensors"
        ) from error


def _require_texts(meta: object) -> None:
    if not isinstance(meta, Mapping) or any(not isinstance(name, str) for name in meta):
        shown = repr(meta)[:_SHOWN_META]
        raise TypeError(
            f"meta: expected a mapping with texts as keys, got {shown}; nothing was sent"
        )


def head_of(data: bytes) -> bytes:
    """Return the head of a message's meta, not checked."""
    return data[: int.from_bytes(data[:_LENGTH_BYTES], "little")]


def decode_places(head: bytes, what: str) -> Places:
    """Decode a head; `check_places` compares the places with the payload."""
    try:
        return _PLACES.decode(head[_LENGTH_BYTES:])
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{what}: invalid table of tensors ({error})") from error


def decode_meta(data: bytes, what: str) -> dict[str, Any]:
    """Decode the meta behind the head."""
    if not data:
        return {}
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{what}: invalid meta ({error})") from error


def check_places(places: Places, size: int, what: str) -> None:
    """Check a table against its payload."""
    for place in places.tensors:
        known = place.dtype in DTYPE_BYTES and min(place.shape, default=0) >= 0
        inside = place.offset >= 0 and place.offset % ALIGNMENT == 0
        if (
            not (known and inside)
            or size_of(TensorSpec(place.dtype, place.shape)) != place.size
            or place.offset + place.size > size
        ):
            raise DamagedError(f"{what}: tensor {place.name!r} does not lie in its payload")
