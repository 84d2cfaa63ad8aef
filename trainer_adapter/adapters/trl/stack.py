"""TRL's tested versions and pip requirement."""

from __future__ import annotations

from typing import Final

from trainer_adapter.adapters.optional_imports import Stack

_TRL: Final = Stack(
    "TRL", {"trl": "1.16.0", "transformers": "5.23.0", "accelerate": "1.15.0"}, "trl==1.16.0"
)
needed, versions = _TRL.needed, _TRL.versions
