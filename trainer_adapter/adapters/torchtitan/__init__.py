"""torchtitan on a bus: groups of any processes for its RL batcher, and for its fork's data handler.

::

    batches = ShmbusBatches("run1", Batcher.Config(...).build(...))     # torchtitan.experiments.rl
    batch = batches.next(timeout=60.0); train(batch); batches.ack()

    use_bus(torchtitan.grpo.data_handling, "run1")                      # the fork with Atropos
    handler = torchtitan.grpo.data_handling.OnlineDataHandler()         # its own, without HTTP

Invariants:

- torchtitan packs: what comes out is what its Batcher makes of its own TrainingSampleGroup.
- A group is acknowledged when the caller has trained on the batch that has its last sample.
- Importing this loads neither torch nor torchtitan.
"""

from __future__ import annotations

from trainer_adapter.adapters.torchtitan.batches import ShmbusBatches, sample_group
from trainer_adapter.adapters.torchtitan.fork import TESTED, use_bus

__all__ = ["TESTED", "ShmbusBatches", "sample_group", "use_bus"]
