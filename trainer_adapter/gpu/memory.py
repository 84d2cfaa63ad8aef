"""Host memory that CUDA reads directly: pinned blocks for batches and tables, and the ring."""

from __future__ import annotations

import os
import sys
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from shmbus.batch.uninterrupted import finalizer
from shmbus.tensors.device.registration import Registration
from trainer_adapter.batches.memory import BatchMemory

#: Blocks of `Staging` are rounded up to this many bytes: the table of half a million tokens.
STAGING_BYTES: Final = 1 << 16


class PinnedMemory(BatchMemory):
    """Pinned batch memory, read by the device without the driver's staging."""

    def fresh(self, size: int) -> NDArray[np.uint8]:
        """Return a new pinned block."""
        block: NDArray[np.uint8] = torch.empty(
            size, dtype=torch.uint8, device="cpu", pin_memory=True
        ).numpy()
        return block


class StagingBlock:
    """A block of `Staging`, pinned for a CUDA device."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=on_cuda)
        self.array: NDArray[np.uint8] = self.host.numpy()
        self.longs: NDArray[np.int64] = self.array[: size // 8 * 8].view(np.int64)
        # Waiting threads sleep instead of spinning.
        self.done = torch.cuda.Event(blocking=True) if on_cuda else None  # type: ignore[no-untyped-call]


class Staging:
    """Pool of pinned staging blocks for one device; a block is reused after `give_back`."""

    # torch frees a block never given back, after the copies from and to it.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: list[StagingBlock] = []

    def take(self, size: int) -> StagingBlock:
        """Return a block from the pool, or a new one."""
        while self._idle:
            block = self._idle.pop()
            # A block too small now will be too small again.
            if block.array.nbytes >= size:
                return block
        return StagingBlock(-(-size // STAGING_BYTES) * STAGING_BYTES, self._device)

    def give_back(self, block: StagingBlock) -> None:
        """Return a block to the pool."""
        self._idle.append(block)


class RegisteredRing:
    """A ring registered with CUDA, until `close` or the last reference to this."""

    _registration: Registration | None = None

    def __init__(self, address: int, nbytes: int, owner: object, stream: torch.cuda.Stream) -> None:
        self.owner = owner
        self._stream = stream
        self._pid = os.getpid()
        self._registration = Registration(address, nbytes)
        self.device_shift = self._registration.device_shift

    def close(self) -> None:
        """Unregister the ring after its last read; idempotent."""
        registration = self._registration
        if registration is not None and os.getpid() == self._pid:
            self._stream.synchronize()
            registration.close()
        self._registration = self.owner = None

    @finalizer
    def __del__(self) -> None:
        # The end of the process unregisters it.
        if not sys.is_finalizing():
            self.close()
