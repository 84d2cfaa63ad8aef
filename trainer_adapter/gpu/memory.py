"""Host memory that CUDA reads directly: pinned blocks for batches and tables, and the ring.

Invariants:

- Registered memory is unregistered once, by the process that registered it.
- An error that is handled here is cleared, so torch does not raise it at its next launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_adapter.batches.memory import BatchMemory

__all__ = ["PinnedMemory", "Registration", "Staging", "StagingBlock"]

#: cudaHostRegisterPortable | cudaHostRegisterMapped: for all contexts, with an address there.
REGISTER_FLAGS: Final = 0x01 | 0x02
#: Bytes that a block of `Staging` is rounded up to: the table of half a million tokens.
STAGING_BYTES: Final = 1 << 16


class PinnedMemory(BatchMemory):
    """Batch memory that is pinned, so that the device reads it without the driver's staging."""

    def fresh(self, size: int) -> NDArray[np.uint8]:
        """Return a new pinned block.

        Parameters
        ----------
        size : int
            Bytes.

        Returns
        -------
        uint8 [size]

        Raises
        ------
        RuntimeError
            The system has no pinned memory left.
        """
        block: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return block


class StagingBlock:
    """A block of `Staging`, pinned for a CUDA device.

    Attributes
    ----------
    host : Tensor, uint8
    array : uint8 array
        The same memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.array: NDArray[np.uint8] = self.host.numpy()


class Staging:
    """Pool of pinned staging blocks for one device; a block is reused after `give_back`.

    A block that is never given back is freed by torch, once the copies from and to it are done.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[StagingBlock] = []

    def take(self, size: int) -> StagingBlock:
        """Return a block from the pool, or a new one.

        Parameters
        ----------
        size : int
            Bytes, at least.

        Returns
        -------
        StagingBlock
            Its content is arbitrary.
        """
        while self._idle:
            block = self._idle.pop()
            # A block that is too small now will be too small again.
            if block.array.nbytes >= size:
                return block
        return StagingBlock(-(-size // STAGING_BYTES) * STAGING_BYTES, self._device)

    def give_back(self, block: StagingBlock) -> None:
        """Return a block to the pool.

        Parameters
        ----------
        block : StagingBlock
            No copy from or to it is in flight.
        """
        self._idle.append(block)


class Registration:
    """Memory of this process that CUDA reads directly, until `close`.

    Parameters
    ----------
    address, nbytes : int
        On page boundaries, as a mapping is.

    Attributes
    ----------
    device_shift : int
        The device's address of it, minus this process's.

    Raises
    ------
    RuntimeError
        CUDA refused; the message is its own.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = 0
        self._pid = os.getpid()
        status = int(_cudart().cudaHostRegister(address, nbytes, REGISTER_FLAGS))
        if status:
            _forget_last_error()
            raise RuntimeError(f"cudaHostRegister of {nbytes} bytes: CUDA error {status}")
        self._address = address
        self.device_shift = _device_address(address) - address

    def close(self) -> None:
        """Unregister the memory; not in a forked child, whose parent has the registration."""
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
    # With unified addressing, which every 64-bit Linux has, the two are the same.
    return address


def _forget_last_error() -> None:
    """Clear CUDA's last error, which was handled: torch would raise it at its next launch."""
    for library in _cuda_runtimes():
        library.cudaGetLastError()


def _cuda_runtimes() -> Iterator[ctypes.CDLL]:
    """Find the CUDA runtime that torch has loaded, by the name it was linked with."""
    major = (torch.version.cuda or "").partition(".")[0]
    for name in (f"libcudart.so.{major}", None):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, "cudaHostGetDevicePointer"):
                yield library
