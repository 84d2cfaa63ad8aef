"""Slot pool: n slots of bytes in shared memory, one publisher (or one a rank), many readers.

A companion segment of a bus for data larger than a record: weights, activations. The protocol
lives in C (``shmbus_ext/pool``, with its own LAYOUT.md); this room adds files, deadlines and texts.

Invariants:

- A leased version is whole and stays unchanged for the whole lease.
- After a death at any instruction the newest whole version stays readable, and the kernel returns
  the dead process's locks.
- A slow reader never counts as dead; the publisher chooses its own reaction.
"""

from __future__ import annotations

from shmbus.pool.pool_file import PoolSpec, copy_bytes, create_pool, unlink_pool
from shmbus.pool.pool_status import PoolStatus, RankStatus, ReaderStatus, SlotStatus, read_pool
from shmbus.pool.reader import PoolReader, VersionLease
from shmbus.pool.slot_publisher import Piece, PoolPublisher, VersionWrite, WhenHeld

__all__ = [
    "Piece",
    "PoolPublisher",
    "PoolReader",
    "PoolSpec",
    "PoolStatus",
    "RankStatus",
    "ReaderStatus",
    "SlotStatus",
    "VersionLease",
    "VersionWrite",
    "WhenHeld",
    "copy_bytes",
    "create_pool",
    "read_pool",
    "unlink_pool",
]
