"""Heads as a relay has them: what the stash asks of a sample, without its payload.

Invariant: what a source says of a record is compared with the record itself, by its `check`, before
anything of it is put.
"""

from __future__ import annotations

from shmbus import errors
from shmbus_ext import _core
from shmbus_ext._core import OriginHead

__all__ = ["OriginHead", "unpack_heads"]


def unpack_heads(bus: str, packed: bytes, clock_ns: int = 0) -> list[OriginHead]:
    """Return the heads of an announcement of the bus of this identity.

    `clock_ns` is the clock of its machine minus the reader's.

    Raises
    ------
    ProtocolError
        They are none, or of another bus.
    """
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
