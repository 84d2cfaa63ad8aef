"""File of a slot pool: sizes, creation, opening and removal."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec

from shmbus.base.arguments import check_bytes, check_int
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus.segment.shared_file import Companion
from shmbus_ext import _core


def copy_bytes(target: Any, source: Any) -> None:
    """Copy one buffer into another, with non-temporal stores for large buffers."""
    if memoryview(target).nbytes != memoryview(source).nbytes:
        raise ValueError(
            f"copy_bytes: expected two buffers of one length, got {memoryview(target).nbytes} and "
            f"{memoryview(source).nbytes} bytes"
        )
    if memoryview(target).readonly:
        raise TypeError("copy_bytes: expected a writable target, got a read-only buffer")
    _core.pool_copy(target, source)


#: Bytes covered by one digest; a damaged version is located to within this many bytes.
DEFAULT_BLOCK_BYTES = 16 << 20

#: Seconds to wait for a pool during its allocation: zeroing tens of GiB takes as long.
OPEN_WAIT_S = 30.0


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and limits of a new pool."""

    slot_bytes: int | str
    slots: int = 2
    max_slots: int | None = None
    meta_bytes: int | str = 65536
    block_bytes: int | str = DEFAULT_BLOCK_BYTES
    patch_bytes: int | str = 0


def sizes_of(spec: PoolSpec) -> dict[str, int]:
    """Check a pool's sizes; return the sizes in the order of the core's arguments."""
    if not isinstance(spec, PoolSpec):
        raise TypeError(f"spec: expected a PoolSpec, got {type(spec).__name__}")
    slots = check_int("slots", spec.slots, 1, _core.POOL_MAX_SLOTS)
    most = slots if spec.max_slots is None else spec.max_slots
    sizes = {"slots": slots, "max_slots": check_int("max_slots", most, 1, _core.POOL_MAX_SLOTS)}
    for name in ("slot_bytes", "meta_bytes", "block_bytes", "patch_bytes"):
        sizes[name] = check_bytes(name, getattr(spec, name))
    return sizes


def companion_of(bus: str, kind: str) -> Companion[_core.SlotPool]:
    """Return the creator and opener of a pool's file."""
    return Companion(
        _core.SlotPool,
        _core.POOL_LAYOUT_VERSION,
        kind,
        bus,
        title=f"pool {kind!r} of bus {bus!r}",
        unlink=f"shmbus.pool.unlink_pool({bus!r}, {kind!r})",
        maker="publisher",
    )


def pool_path(bus: str, kind: str) -> str:
    """Return the file of a pool."""
    return f"{SHM_DIRECTORY}{companion_name(kind, bus)}"


def create_pool(bus: str, kind: str, spec: PoolSpec) -> None:
    """Create a pool and allocate the memory of its first slots."""
    create_handle(bus, kind, spec).close()


def create_handle(bus: str, kind: str, spec: PoolSpec) -> _core.SlotPool:
    """Create a pool and return a handle without a role."""
    companion = companion_of(bus, kind)
    sizes = sizes_of(spec)
    first_bytes = (sizes["slot_bytes"] + sizes["patch_bytes"]) * sizes["slots"]
    return companion.create(f"{bus}:{kind}", first_bytes, *sizes.values())


def open_pool(
    bus: str, kind: str, *, read_only: bool = False, wait_s: float | None = None
) -> _core.SlotPool:
    """Open a pool; wait for a creator in the middle of the allocation."""
    deadline = time.monotonic() + (OPEN_WAIT_S if wait_s is None else wait_s)
    companion = companion_of(bus, kind)
    return companion.open(f"{bus}:{kind}", read_only=read_only, deadline=deadline)


def unlink_pool(bus: str, kind: str) -> None:
    """Remove a pool's name; the kernel frees its memory after the last process closes it."""
    companion_of(bus, kind).unlink()


def identity_of(path: str) -> os.stat_result | None:
    """Return the file behind a pool's name; None after its removal."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
