"""Registration of host memory for direct access by CUDA.

Invariants:

- The registering process unregisters its memory exactly once.
- A handled error is cleared; otherwise torch would raise it at its next launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

_PAGE: Final = 4096

#: cudaHostRegisterPortable | cudaHostRegisterMapped: for every context, with a device address.
REGISTER_FLAGS: Final = 0x01 | 0x02
#: cudaHostRegisterReadOnly: for pages without write permission.
REGISTER_READ_ONLY: Final = 0x08


class Registration:
    """Memory of this process with direct CUDA reads, until `close`."""

    def __init__(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self._address = 0
        self._pid = os.getpid()
        flags = REGISTER_FLAGS | (REGISTER_READ_ONLY if read_only else 0)
        status = int(_cudart().cudaHostRegister(address, nbytes, flags))
        if status:
            _forget_last_error()
            raise RuntimeError(f"cudaHostRegister of {nbytes} bytes: CUDA error {status}")
        self._address = address
        self.device_shift = _device_address(address) - address

    def close(self) -> None:
        """Unregister the memory, except in a forked child: the parent owns the registration."""
        address, self._address = self._address, 0
        if address and os.getpid() == self._pid:
            status = int(_cudart().cudaHostUnregister(address))
            if status:
                _forget_last_error()
                raise RuntimeError(f"cudaHostUnregister: CUDA error {status}")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _device_address(address: int) -> int:
    """Ask CUDA for the device's address of registered memory."""
    for library in _cuda_runtimes():
        pointer = ctypes.c_void_p()
        status = library.cudaHostGetDevicePointer(
            ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        if status == 0 and pointer.value:
            return pointer.value
    # Unified addressing, present on every 64-bit Linux, makes both addresses equal.
    return address


def _forget_last_error() -> None:
    """Clear CUDA's last, already handled error: torch would raise it at the next launch."""
    for library in _cuda_runtimes():
        library.cudaGetLastError()


def _cuda_runtimes() -> Iterator[ctypes.CDLL]:
    """Yield torch's loaded CUDA runtime, by its link name."""
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (f"libcudart.so.{major}", None):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "cudaHostGetDevicePointer"):
                yield library


class RegisteredSlots:
    """Registered payload memory by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int], Registration | None] = {}

    def add(self, payload: torch.Tensor, *, read_only: bool = False) -> bool:
        """Register a payload, once."""
        size = -(-payload.numel() // _PAGE) * _PAGE
        key = (payload.data_ptr(), size)
        with self._lock:
            if key not in self._slots:
                self._slots[key] = _register(*key, read_only=read_only)
            return self._slots[key] is not None

    def close(self) -> None:
        """Unregister every payload; idempotent."""
        with self._lock:
            slots, self._slots = self._slots, {}
        for registration in slots.values():
            if registration is not None:
                registration.close()


def _register(address: int, nbytes: int, *, read_only: bool) -> Registration | None:
    # Some devices reject a read-only registration, and some need no such flag.
    for flag in (read_only, False) if read_only else (False,):
        try:
            return Registration(address, nbytes, read_only=flag)
        except RuntimeError:
            continue
    return None
