"""How weights travel. A carrier is a file here, and a line in `CARRIERS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shmbus.weights.carriers.base import Carrier

__all__ = ["CARRIERS", "carrier_class"]

#: Carrier classes by name, imported on first use. "auto" takes the first usable carrier that
#: permits an automatic choice.
CARRIERS: Final = {
    "shm": "shmbus.weights.carriers.pooled:ShmCarrier",
    "checkpoint": "shmbus.weights.carriers.checkpoint:CheckpointCarrier",
    "cuda_vmm": "shmbus.weights.carriers.pooled:CudaVmmCarrier",
    "cuda_ipc": "shmbus.weights.carriers.pooled:CudaIpcCarrier",
    "memfd": "shmbus.weights.carriers.pooled:MemfdCarrier",
}


def carrier_class(name: str) -> type[Carrier]:
    """Return the class of a carrier of `CARRIERS`."""
    module, _, attribute = CARRIERS[name].partition(":")
    found: type[Carrier] = getattr(importlib.import_module(module), attribute)
    return found
