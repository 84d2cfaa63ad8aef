"""A slot pool: n slots of bytes in shared memory, one publisher or one a rank, many readers.

It is a companion segment of a bus, for what is larger than a record: weights, activations. The
protocol is C (``shmbus_ext/pool``, with its own LAYOUT.md); here are files, deadlines and words.

Invariants:

- What a reader leases is whole, and stays so for as long as it is leased.
- Whoever dies, at any instruction: the newest whole version stays readable, and the kernel gives
  back what the dead one held.
- A slow reader is never taken for a dead one; what the publisher does then is its own choice.
"""

from __future__ import annotations

from shmbus.pool.lifecycle import PoolSpec, copy_bytes, create_pool, unlink_pool
from shmbus.pool.patches import PatchRun, Piece, VersionPatch, has_patch, put_piece, same_bytes
from shmbus.pool.publisher import PoolPublisher, VersionWrite, WhenHeld
from shmbus.pool.reader import PoolReader, VersionLease
from shmbus.pool.status import PoolStatus, RankStatus, ReaderStatus, SlotStatus, read_pool

__all__ = [
    "PatchRun",
    "Piece",
    "PoolPublisher",
    "PoolReader",
    "PoolSpec",
    "PoolStatus",
    "RankStatus",
    "ReaderStatus",
    "SlotStatus",
    "VersionLease",
    "VersionPatch",
    "VersionWrite",
    "WhenHeld",
    "copy_bytes",
    "create_pool",
    "has_patch",
    "put_piece",
    "read_pool",
    "same_bytes",
    "unlink_pool",
]
