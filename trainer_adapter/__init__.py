"""Imports of a trainer: batches off the bus, advantages, attention over packed rows, and shims.

Invariants:

- A name is imported on its first use: a rollout worker can use parts of this package without
  loading torch.
- `_HOMES` lists every public name once; `__all__` follows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "as" exports the name to type checkers
    from shmbus.batch.gather import FieldNames as FieldNames
    from trainer_adapter.advantages import group_advantages as group_advantages
    from trainer_adapter.attention.varlen import varlen_attention as varlen_attention
    from trainer_adapter.batches.batch import Batch as Batch
    from trainer_adapter.batches.extra_fields import ExtraField as ExtraField
    from trainer_adapter.batches.pack import pack as pack
    from trainer_adapter.compat import pad_input as pad_input
    from trainer_adapter.compat import unpad_input as unpad_input
    from trainer_adapter.handler.handler import OnlineDataHandler as OnlineDataHandler
    from trainer_adapter.mismatch import LogprobMismatch as LogprobMismatch
    from trainer_adapter.mismatch import logprob_mismatch as logprob_mismatch
    from trainer_adapter.scored_group import ScoredGroup as ScoredGroup

_HOMES = {
    "Batch": "batches.batch",
    "ExtraField": "batches.extra_fields",
    "FieldNames": "batches.pack",
    "LogprobMismatch": "mismatch",
    "OnlineDataHandler": "handler.handler",
    "ScoredGroup": "scored_group",
    "group_advantages": "advantages",
    "logprob_mismatch": "mismatch",
    "pack": "batches.pack",
    "pad_input": "compat",
    "unpad_input": "compat",
    "varlen_attention": "attention",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{__name__}.{name} needs torch, which is not installed here; install it with "
            "`pip install torch`, or as https://pytorch.org says for this machine's GPU",
            name="torch",
        ) from error
    # Python asks here only for names missing in the module: once per name.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
