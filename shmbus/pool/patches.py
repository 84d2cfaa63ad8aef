"""Patches of versions: the changes since the previous version, stored beside the whole version.

A publisher with piecewise writes compares a version with the previous version, and packs the
differences. A second pool with exactly the previous version, such as another node's mirror, writes
only those elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shmbus_ext import _core

if TYPE_CHECKING:
    from shmbus.pool.slot_publisher import VersionWrite


class Piece(msgspec.Struct, frozen=True):
    """Place of elements in a version's bytes."""

    offset: int
    rows: int
    row_bytes: int
    stride: int
    width: int


def put_piece(write: VersionWrite, piece: Piece, source: Any) -> int | None:
    """Write a piece of a version, and pack what differs from the version before."""
    return _core.pool_patch_put(
        write.buffer,
        piece.offset,
        piece.rows,
        piece.row_bytes,
        piece.stride,
        piece.width,
        source,
    )
