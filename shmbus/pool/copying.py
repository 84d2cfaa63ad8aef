"""Copying large pieces into and out of a pool, past the caches."""

from __future__ import annotations

from typing import Any

from shmbus_ext import _core

__all__ = ["copy_bytes"]


def copy_bytes(target: Any, source: Any) -> None:
    """Copy one buffer into another, by non-temporal stores where they are worth it."""
    if memoryview(target).nbytes != memoryview(source).nbytes:
        raise ValueError(
            f"copy_bytes: expected two buffers of one length, got {memoryview(target).nbytes} and "
            f"{memoryview(source).nbytes} bytes"
        )
    if memoryview(target).readonly:
        raise TypeError("copy_bytes: expected a writable target, got a read-only buffer")
    _core.pool_copy(target, source)
