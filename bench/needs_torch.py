"""torch, for programs that measure nothing without it, or an exit that says what keeps it away."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import command
from bench.failures import sentence

__all__ = ["torch"]

if command.lacks(["torch"], Path(sys.argv[0]).stem, command.TRAIN):
    sys.exit(1)

try:
    import torch
except (ImportError, OSError, MemoryError) as error:
    sys.exit(f"{Path(sys.argv[0]).stem}: torch cannot be imported here: {sentence(error) or error}")
