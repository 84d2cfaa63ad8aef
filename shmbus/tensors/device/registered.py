"""Slots of a pool that CUDA reads or writes directly, without a detour through pages of its own.

Registering a slot takes some 25 ms a GiB, once; a transfer is then six times as fast. Where CUDA
refuses, transfers go the other way, and nothing else changes.

Invariant: a slot is unregistered before it can be unmapped.
"""

from __future__ import annotations

import threading
from typing import Final

import torch

from shmbus.tensors.device.registration import Registration

__all__ = ["RegisteredSlots"]

_PAGE: Final = 4096


class RegisteredSlots:
    """Memory of payloads that was registered, by its address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int], Registration | None] = {}

    def add(self, payload: torch.Tensor, *, read_only: bool = False) -> bool:
        """Register a payload, once.

        Parameters
        ----------
        payload : uint8 [bytes]
            Begins at a page.
        read_only : bool
            Whether its pages are.

        Returns
        -------
        bool
            Whether it is registered.
        """
        size = -(-payload.numel() // _PAGE) * _PAGE
        key = (payload.data_ptr(), size)
        with self._lock:
            if key not in self._slots:
                self._slots[key] = _register(*key, read_only=read_only)
            return self._slots[key] is not None

    def close(self) -> None:
        """Unregister all of it; may be called twice."""
        with self._lock:
            slots, self._slots = self._slots, {}
        for registration in slots.values():
            if registration is not None:
                registration.close()


def _register(address: int, nbytes: int, *, read_only: bool) -> Registration | None:
    # Not every device can be told that it may only read, and not every one has to be.
    for flag in (read_only, False) if read_only else (False,):
        try:
            return Registration(address, nbytes, read_only=flag)
        except RuntimeError:
            continue
    return None
