"""Patches of versions: the changes since the previous version, stored beside the whole version.

Most elements of a set of weights stay the same, bit for bit, from step to step. A publisher with
piecewise writes compares a version with the previous one and packs the differences; a reader with
exactly the previous version writes only those elements.

Invariants:

- A patch is a shortcut: the whole version lies in the same slot, under the same lease.
- A reader learns whether the patched bytes matched the base at the patched places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from shmbus.errors import DamagedError
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


class PatchRun(msgspec.Struct, frozen=True):
    """Changes in one piece."""

    rank: int
    place: int
    piece: Piece
    changes: int
    size: int


class VersionPatch:
    """Path from a base version to its successor."""

    def __init__(
        self, lease: _core.PoolLease, base_sequence: int, base_version: int, runs: list[PatchRun]
    ) -> None:
        self._lease = lease
        self.base_sequence: Final = base_sequence
        self.base_version: Final = base_version
        self.runs: Final = runs
        self.size: Final = sum(run.size for run in runs)

    def apply(self, run: PatchRun, target: Any, offset: int = 0) -> bool:
        """Apply the changes of one piece."""
        return _core.pool_patch_apply(self._lease, run.rank, run.place, target, offset)


def find_patch(lease: _core.PoolLease) -> VersionPatch | None:
    """Read the patch of a leased version, checked against its checksums; None without a patch."""
    found = _core.pool_patch_runs(lease)
    if found is None:
        return None
    if not isinstance(found, tuple):
        raise DamagedError(
            f"version {lease.version}: its patch does not match its checksum; nothing was read of "
            "it: load the whole version, and look for a process that writes where it should not"
        )
    base_sequence, base_version, rows = found
    runs = [
        PatchRun(rank, place, Piece(offset, count, row_bytes, stride, width), *rest)
        for rank, place, offset, count, row_bytes, stride, width, *rest in rows
    ]
    return VersionPatch(lease, base_sequence, base_version, runs)


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
