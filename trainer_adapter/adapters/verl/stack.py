"""verl as this adapter knows it."""

from __future__ import annotations

from typing import Final

from trainer_adapter.adapters.optional_imports import BUS_VARIABLE, Stack

__all__ = ["BUS_VARIABLE", "needed"]

_VERL: Final = Stack("verl", {"verl": "0.9.1"}, "verl[verl-core]==0.9.1")
needed = _VERL.needed
