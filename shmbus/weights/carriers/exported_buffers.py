"""Where the ranks of a publisher write a version: rank 0 owns the buffers, the others map them.

Each rank writes its own pieces into their place, whichever device it is on: over peer access, or
from device to device where there is none. Nothing is gathered.

Invariant: a rank above 0 writes into buffers of the rank 0 that began the version, and of no
predecessor or successor: the version says whose they are.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shmbus import CapacityError
from shmbus.errors import DeviceMismatchError, PeerGoneError, WeightsError
from shmbus.tensors.device.arena import (
    Arena,
    ArenaView,
    BufferLostError,
    BufferName,
    MemoryKind,
    allocator,
)
from shmbus.tensors.device.driver import CudaDriverError

__all__ = ["Buffers", "LeadersBuffers", "OwnBuffers"]


class Buffers(Protocol):
    """What versions lie in, a buffer a slot; none is ever replaced."""

    def buffer(self, owner: int, slot: int, nbytes: int) -> tuple[BufferName, torch.Tensor]:
        """Return a slot's buffer, of the owner that the version names."""

    def close(self) -> None:
        """Let go of all of them."""


class OwnBuffers:
    """The buffers of rank 0.

    Parameters
    ----------
    path : str
        Where to listen for those who map them.
    kind : "vmm" | "ipc" | "memfd"
        What they are made of.
    device : torch.device
        Where they lie.

    Attributes
    ----------
    owner : int
        What a version says of whose they are.
    """

    def __init__(self, path: str, kind: MemoryKind, device: torch.device) -> None:
        self._device = device
        self._arena = Arena(path, allocator(kind, device.index or 0))
        self.owner = self._arena.owner

    def buffer(self, owner: int, slot: int, nbytes: int) -> tuple[BufferName, torch.Tensor]:
        """Return a slot's buffer; the first time, allocate it.

        Raises
        ------
        CapacityError
            There is no such memory.
        """
        assert owner == self.owner
        try:
            return self._arena.buffer(slot, nbytes)
        except (CudaDriverError, OSError) as error:
            raise CapacityError(
                f"no memory on {self._device} for a version of {nbytes} bytes ({error}); the "
                "weights that were published stay in force. Choose fewer slots, free some, or the "
                "carrier 'shm'"
            ) from error

    def close(self) -> None:
        """Stop listening, and let go; readers keep what they have mapped."""
        self._arena.close()


class LeadersBuffers:
    """The buffers of rank 0, as another rank writes into them.

    Parameters
    ----------
    path : str
        Where rank 0 listens.
    device : torch.device
        From which this rank writes.
    timeout : float
        Seconds to wait for an answer.
    """

    def __init__(self, path: str, device: torch.device, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._index = (device.index or 0) if device.type == "cuda" else None
        self._owner = 0
        self._found: dict[int, tuple[BufferName, torch.Tensor]] = {}
        self._view = self._new_view()

    def _new_view(self) -> ArenaView:
        return ArenaView(
            self._path, device=self._index, or_owner=True, timeout=self._timeout, writable=True
        )

    def buffer(self, owner: int, slot: int, nbytes: int) -> tuple[BufferName, torch.Tensor]:
        """Return a slot's buffer; the first time, map it.

        Raises
        ------
        PeerGoneError
            The rank 0 that began the version has ended.
        DeviceMismatchError
            This process does not see the device that has it.
        WeightsError
            It cannot be mapped here.
        """
        if owner != self._owner:
            self.close()
            self._owner, self._view = owner, self._new_view()
        if slot not in self._found:
            name = BufferName(slot, owner)
            memory = self._mapped(name)
            if memory.numel() < nbytes:
                raise WeightsError(
                    f"expected a buffer of {nbytes} bytes in rank 0, got one of {memory.numel()}; "
                    "let every rank publish the same"
                )
            self._found[slot] = name, memory
        return self._found[slot]

    def _mapped(self, name: BufferName) -> torch.Tensor:
        stays = "the version before it stays the newest"
        try:
            return self._view.memory(name).tensor()
        except (PeerGoneError, BufferLostError) as error:
            raise PeerGoneError(
                f"rank 0, which has the memory of this version, has ended ({error}); {stays}", 0
            ) from error
        except DeviceMismatchError as error:
            raise DeviceMismatchError(
                f"this rank cannot write to rank 0's device: {error}"
            ) from error
        except (CudaDriverError, OSError, ValueError) as error:
            raise WeightsError(
                f"rank 0's memory cannot be mapped here: {error}; {stays}. Use the carrier 'shm'"
            ) from error

    def close(self) -> None:
        """Let go of all of them."""
        self._found = {}
        self._view.close()
