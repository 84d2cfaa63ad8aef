"""Atropos without HTTP: environments put their groups into the bus, trainers take batches from it.

Everything that an environment sends goes through one method of BaseEnv; `ShmbusEnv` has it. The
groups and batches are those of the HTTP gateway, so environments and trainers of both kinds share
one bus.

Invariant: importing this needs no atroposlib: the mix-in knows one name of BaseEnv, and no other.
"""

from __future__ import annotations

from trainer_adapter.adapters.atropos.environment import ShmbusEnv
from trainer_adapter.adapters.atropos.trainer import AtroposTrainer

__all__ = ["AtroposTrainer", "ShmbusEnv"]
