"""Lasting origins: what a sample is known by for good, through restores and relays.

An origin is 32 bytes: the identity of the bus that the sample was put onto, its producer there and
its sequence, both with their high bytes first. A sample that a relay has put has two: at its source
and on its own bus. Two samples never share one.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ORIGIN_BYTES", "split_origins"]

#: Bytes of an origin.
ORIGIN_BYTES: Final = 32


def split_origins(packed: bytes) -> set[bytes]:
    """Return the origins that lie one behind the other."""
    return {packed[at : at + ORIGIN_BYTES] for at in range(0, len(packed), ORIGIN_BYTES)}
