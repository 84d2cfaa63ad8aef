"""What records are known by among the buses of all nodes, and their heads, without payload.

Invariants:

- Origins of one bus sort as (producer, sequence).
- What a source says of a record is compared with the record itself, by its head's `check`, before
  anything of it is put.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Annotated, Final, TypeAlias

import msgspec

from shmbus import errors
from shmbus_ext import _core
from shmbus_ext._core import OriginHead

ORIGIN_BYTES: Final = 32
#: A record among all buses: the bus's identity, then producer id and sequence with their high bytes
#: first, so that they sort as numbers. Bytes, since a relay hashes each of them many times, and a
#: hash of bytes is remembered; it is what the core reads, too.
Origin: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=ORIGIN_BYTES, max_length=ORIGIN_BYTES)]
_ID: Final = struct.Struct(">QQ")
_IDENTITY_BYTES: Final = ORIGIN_BYTES - _ID.size


def make_origin(bus: str, producer_id: int, sequence: int) -> Origin:
    """Return what a record of the bus of this identity is known by."""
    return bytes.fromhex(bus) + _ID.pack(producer_id, sequence)


def is_of(origin: Origin, bus: str) -> bool:
    """Whether a record is of the bus of this identity."""
    return origin.startswith(bytes.fromhex(bus))


def bus_of(origin: Origin) -> str:
    """Return the identity of a record's bus."""
    return origin[:_IDENTITY_BYTES].hex()


def by_bus(origins: Collection[Origin]) -> list[tuple[str, Collection[Origin]]]:
    """Return records bus by bus, in their order."""
    if not origins:
        return []
    lowest = min(origins)[:_IDENTITY_BYTES]
    if max(origins).startswith(lowest):
        return [(lowest.hex(), origins)]
    found: dict[bytes, list[Origin]] = {}
    for origin in origins:
        found.setdefault(origin[:_IDENTITY_BYTES], []).append(origin)
    return [(identity.hex(), found[identity]) for identity in sorted(found)]


def name_origin(origin: Origin) -> str:
    """Return a record's name for people: producer and sequence on its bus."""
    return "/".join(map(str, _ID.unpack_from(origin, _IDENTITY_BYTES)))


def unpack_heads(bus: str, packed: bytes, clock_ns: int = 0) -> list[OriginHead]:
    """Return heads that a bus announced; `clock_ns` is its machine's clock minus the reader's."""
    try:
        heads = _core.unpack_heads(packed)
    except ValueError as error:
        raise errors.ProtocolError(f"relay: an announcement of bus {bus}: {error}") from error
    identity = bytes.fromhex(bus)
    for head in heads:
        if not head.origin.startswith(identity):
            raise errors.ProtocolError(
                f"relay: an announcement of bus {bus} names records of another one"
            )
        head.clock_ns = clock_ns
    return heads
