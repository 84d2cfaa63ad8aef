"""A device's driver, called by the addresses of its functions: a step's copies, a wait, a launch.

`shmbus` knows no driver. Who does, as ``shmbus.tensors.device`` does CUDA's, gives the addresses.

Invariant: what waits in the driver waits without the interpreter lock.
"""

from __future__ import annotations

from shmbus_ext._core import (
    DEVICE_MAX_COPIES,
    DEVICE_NOT_READY,
    device_await,
    device_copy,
    device_launch,
)

__all__ = [
    "DEVICE_MAX_COPIES",
    "DEVICE_NOT_READY",
    "device_await",
    "device_copy",
    "device_launch",
]
