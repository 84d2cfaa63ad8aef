"""How weights travel. A carrier is a file here, and a line in `CARRIERS`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shmbus.weights.carriers.base import Carrier

__all__ = ["CARRIERS", "carrier_class"]

#: Each carrier's class by its name, imported when it is first used. Of those that may be chosen
#: without being asked for, the first that serves is "auto".
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
