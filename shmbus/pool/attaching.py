"""Attachment of a publisher's rank to its pool: rank 0 creates the pool, higher ranks wait.

Invariant: a pool with a living participant is never replaced.
"""

from __future__ import annotations

import contextlib
import os
import time

from shmbus import errors
from shmbus.base.arguments import check_bytes
from shmbus.base.format import show_wait
from shmbus.errors import BusBusyError, WaitTimeoutError
from shmbus.pool.pool_file import (
    PoolSpec,
    create_handle,
    open_pool,
    pool_path,
    unlink_pool,
)
from shmbus.pool.pool_status import status_of_pool
from shmbus.segment.peer_wait import SLICE_S
from shmbus_ext import _core


def attach(
    bus: str, kind: str, rank: int, spec: PoolSpec | None, timeout: float
) -> tuple[_core.SlotPool, bool]:
    """Open or create a pool; return the pool, and True for a new file."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            pool = open_pool(bus, kind)
        except errors.BusNotFoundError:
            if rank == 0 and spec is None:
                raise
            if rank == 0 and spec is not None:
                with contextlib.suppress(errors.BusExistsError):  # a concurrent creator was faster
                    return create_handle(bus, kind, spec), True
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"pool {kind!r} of bus {bus!r}: rank 0 did not create it in "
                    f"{show_wait(timeout)} ({pool_path(bus, kind)} does not exist)"
                ) from None
            time.sleep(SLICE_S)
            continue
        if rank or spec is None or _is_enough(pool, spec):
            return pool, False
        _remove_small(bus, kind, pool, spec)


def _is_enough(pool: _core.SlotPool, spec: PoolSpec) -> bool:
    most = spec.slots if spec.max_slots is None else spec.max_slots
    return (
        pool.slot_bytes >= check_bytes("slot_bytes", spec.slot_bytes)
        and pool.meta_bytes >= check_bytes("meta_bytes", spec.meta_bytes)
        and pool.patch_bytes >= check_bytes("patch_bytes", spec.patch_bytes)
        and pool.max_slots >= most
    )


def _remove_small(bus: str, kind: str, pool: _core.SlotPool, spec: PoolSpec) -> None:
    """Remove a pool of insufficient size, unless a living process takes part."""
    status = status_of_pool(bus, kind, pool)
    users = [f"rank {rank.rank} (pid {rank.pid})" for rank in status.ranks if rank.state == "alive"]
    users += [f"{it.label} (pid {it.pid})" for it in status.readers if it.state == "alive"]
    slot_bytes, max_slots = pool.slot_bytes, pool.max_slots
    pool.close()
    if users:
        raise BusBusyError(
            f"pool {kind!r} of bus {bus!r} is too small: {max_slots} slots of {slot_bytes} bytes, "
            f"expected {spec.slots} of {spec.slot_bytes}; {', '.join(users[:4])} use it. Close "
            "those, or publish under another name"
        )
    with contextlib.suppress(errors.BusNotFoundError):  # a concurrent process removed it first
        unlink_pool(bus, kind)


def identity_of(path: str) -> os.stat_result | None:
    """Return the file behind a pool's name; None after its removal."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
