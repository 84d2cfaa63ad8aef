"""Patches of versions: what changed since the version before, beside the whole of it.

Most elements of a set of weights stay the same, bit for bit, from step to step. A publisher that
writes a version piece by piece compares it with the version before, and packs what differs; a
reader that has exactly that version writes only those elements.

Invariants:

- A patch is a shortcut: the whole version lies in the same slot, under the same lease.
- A reader learns whether the bytes that it patched were those of the base, where it patched them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from shmbus.errors import DamagedError
from shmbus_ext import _core

if TYPE_CHECKING:
    from shmbus.pool.publisher import VersionWrite


class Piece(msgspec.Struct, frozen=True):
    """Where elements lie in a version's bytes."""

    offset: int
    rows: int
    row_bytes: int
    stride: int
    width: int


class PatchRun(msgspec.Struct, frozen=True):
    """What changed in one piece."""

    rank: int
    place: int
    piece: Piece
    changes: int
    size: int
    base_digest: int


class VersionPatch:
    """What leads from one version to another."""

    def __init__(
        self, lease: _core.PoolLease, base_sequence: int, base_version: int, runs: list[PatchRun]
    ) -> None:
        self._lease = lease
        self.base_sequence: Final = base_sequence
        self.base_version: Final = base_version
        self.runs: Final = runs
        self.changes: Final = sum(run.changes for run in runs)
        self.size: Final = sum(run.size for run in runs)

    def apply(self, run: PatchRun, target: Any, offset: int = 0) -> bool:
        """Apply what changed in one piece."""
        return _core.pool_patch_apply(self._lease, run.rank, run.place, target, offset)

    def listed(self, run: PatchRun) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """List what a run writes: numbers of elements, rising, and the bytes of their values."""
        room, width = 2 * run.changes, run.piece.width
        elements, values = np.empty(room, np.uint32), np.empty(room * width, np.uint8)
        count = _core.pool_patch_list(self._lease, run.rank, run.place, elements, values)
        if count is None:
            raise DamagedError("a patch was damaged after it was checked: load the whole version")
        return elements[:count], values[: count * width]


def find_patch(lease: _core.PoolLease) -> VersionPatch | None:
    """Read the patch of a leased version, checked against its checksums, where it has one."""
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


def has_patch(write: VersionWrite) -> bool:
    """Whether a version gets a patch, as far as it is written, or has one after its end."""
    return _core.pool_patch_is_made(write.buffer)


def same_bytes(one: Any, other: Any) -> bool:
    """Compare two contiguous buffers, bit for bit."""
    return _core.pool_same(one, other)


def export_patch(lease: _core.PoolLease) -> tuple[int, bytes] | None:
    """Return its base's sequence and a patch as bytes; None where there is no sound one."""
    return _core.pool_patch_bytes(lease)


def take_patch(write: VersionWrite, exported: Any) -> bool:
    """Write a version by a patch of another pool; False where it replaces what is not there."""
    return _core.pool_patch_take(write.buffer, exported)


def patched_crc(exported: Any, payload: Any) -> int | None:
    """Return the checksum of all elements that an exported patch is about; None if it is none."""
    return _core.pool_patch_crc(exported, payload)
