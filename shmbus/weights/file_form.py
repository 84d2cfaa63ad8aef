"""What a file of safetensors can hold, asked before one is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from shmbus._arguments import is_text

__all__ = ["METADATA", "faults_in_file"]

#: Where a header keeps what is no tensor: one of that name makes a file that nobody can read.
METADATA: Final = "__metadata__"


def faults_in_file(tensors: Mapping[str, torch.dtype]) -> list[str]:
    """Find what no file of safetensors can hold."""
    written = {dtype: _is_written(dtype) for dtype in set(tensors.values())}
    faults = []
    for name, dtype in tensors.items():
        if name == METADATA or not is_text(name):
            faults.append(f"{name!r}: no name that a file can have")
        elif not written[dtype]:
            faults.append(f"{name!r}: {dtype} is no dtype of safetensors")
    return faults


def _is_written(dtype: torch.dtype) -> bool:
    from safetensors import SafetensorError
    from safetensors.torch import save

    try:
        save({"": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError, SafetensorError):
        return False
    return True
