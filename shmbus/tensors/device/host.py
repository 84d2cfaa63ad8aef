"""Host memory that several processes share by file descriptor, as device memory is: a memfd.

It needs no room in /dev/shm, which a container has little of, and no device.

Invariants: what was opened to be read is mapped read-only; a mapping lives as long as a tensor that
looks into it, and the memory until the last process has unmapped it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final

import torch
from torch import Tensor

from shmbus.tensors.device.handles import NO_UUID, DeviceHandle

_FAILED: Final = ctypes.c_void_p(-1).value
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class _Mapping:
    """Addresses of this process that lead to the memory; unmapped with the last reference."""

    #: Before there is one, as where the constructor was interrupted.
    address: int | None = None

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool) -> None:
        how = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.nbytes = nbytes
        self.address = _libc.mmap(None, nbytes, how, mmap.MAP_SHARED, descriptor, 0)
        if self.address == _FAILED:
            self.address = None
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {nbytes} bytes: {os.strerror(number)}")

    def __del__(self) -> None:
        if self.address:
            _libc.munmap(self.address, self.nbytes)


class HostMemory:
    """Bytes of the host that other processes can map; made by `allocate` or `open`."""

    #: Before there are any, as where the constructor was interrupted.
    _mapping: _Mapping | None = None
    _descriptor = -1

    def __init__(self, mapping: _Mapping, handle: DeviceHandle, descriptor: int) -> None:
        self._mapping = mapping
        self._descriptor = descriptor
        self.handle = handle
        self.nbytes = handle.nbytes
        self.device = torch.device("cpu")

    @classmethod
    def allocate(cls, nbytes: int) -> HostMemory:
        """Allocate memory that can be exported: zeroed, and all of it there."""
        if nbytes <= 0:
            raise ValueError(f"host memory: expected more than 0 bytes, got {nbytes}")
        descriptor = os.memfd_create("shmbus", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            mapping = _Mapping(descriptor, nbytes, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(mapping, DeviceHandle("memfd", NO_UUID, nbytes, nbytes), descriptor)

    @classmethod
    def open(
        cls, handle: DeviceHandle, descriptor: int | None, *, writable: bool = False
    ) -> HostMemory:
        """Map what another process has allocated."""
        if descriptor is None:
            raise ValueError("host memory: expected a file descriptor")
        found = os.fstat(descriptor).st_size
        if found < handle.mapped_nbytes:
            raise ValueError(
                f"host memory: expected a file of {handle.mapped_nbytes} bytes, got one of {found}"
            )
        return cls(_Mapping(descriptor, handle.mapped_nbytes, writable=writable), handle, -1)

    def descriptor(self) -> int:
        """Return a new file descriptor of it, for another process; the caller closes it."""
        if self._descriptor < 0:
            raise ValueError("this host memory is closed, or another process's")
        return os.dup(self._descriptor)

    def tensor(self) -> Tensor:
        """Return all its bytes: uint8 [nbytes], on the CPU. No copy."""
        return self.lend()[0]

    def lend(self) -> tuple[Tensor, weakref.ref[Any]]:
        """Return `tensor()`, and what tells whether a tensor of that memory is still there."""
        if self._mapping is None:
            raise ValueError("this host memory is closed")
        # An array of ctypes can carry its mapping along, and torch keeps what it made a tensor of.
        span: Any = (ctypes.c_uint8 * self.nbytes).from_address(self._mapping.address or 0)
        span.mapping = self._mapping
        return torch.frombuffer(span, dtype=torch.uint8), weakref.ref(span)

    def close(self) -> None:
        """Let go of it; may be called twice. Tensors that look into it stay valid."""
        self._mapping = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self._mapping is None else ""
        return f"<HostMemory {self.nbytes} B{state}>"
