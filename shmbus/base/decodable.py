"""Message classes that threads decode."""

from __future__ import annotations

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def decodable(kind: type[_T]) -> type[_T]:
    """Build msgspec's tables of a class at import: threads that meet in a first decode crash."""
    msgspec.msgpack.Decoder(kind)
    return kind
