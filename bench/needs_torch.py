"""torch, for programs that measure nothing without it, or an exit that says how it comes here."""

from __future__ import annotations

import sys
from pathlib import Path

from bench import command

__all__ = ["torch"]

if command.lacks(["torch"], Path(sys.argv[0]).stem, command.TRAIN):
    sys.exit(1)

import torch
