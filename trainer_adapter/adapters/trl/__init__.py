"""TRL on a bus: groups of any rollout processes for its trainers, through constructor arguments.

::

    worker = ShmbusRolloutWorker("run1", acknowledge="save")
    AsyncGRPOTrainer(..., rollout_worker=worker, callbacks=[worker.callback])

    rollouts = ShmbusRollouts("run1")
    GRPOTrainer(..., rollout_func=rollouts, reward_funcs=rollouts.reward)

Invariants:

- Importing this package loads neither torch nor TRL; their names are looked up on first use.
- A sample unfit for TRL's objective ends in an error, never in another objective.
"""

from __future__ import annotations

from trainer_adapter.adapters.trl.held import last_whole_checkpoint
from trainer_adapter.adapters.trl.rollouts import ShmbusRollouts
from trainer_adapter.adapters.trl.samples import scored
from trainer_adapter.adapters.trl.weights import ShmbusWeights
from trainer_adapter.adapters.trl.worker import ShmbusRolloutWorker

__all__ = [
    "ShmbusRolloutWorker",
    "ShmbusRollouts",
    "ShmbusWeights",
    "last_whole_checkpoint",
    "scored",
]
