"""prime-rl on shared memory: its batch sender and receiver over a channel for each data rank.

::

    from trainer_adapter.adapters import prime_rl
    prime_rl.install("run1")          # in the orchestrator and in each trainer, before they start

prime-rl chooses its transport by name in a factory, without a hook: `install` puts another factory
in its place. Both sets of names are served: ``transports.rollouts`` with MicroBatchSender, and
``transports.batch`` with BatchSender, as it is called since August 2026.

Invariants:

- What is received equals what was sent, value for value and type for type; what is as long as the
  tokens comes as a read-only array in place of a list, routed experts as bytes in place.
- A step is acknowledged when the trainer asks for the next: one that died gets its step again.
- A trainer that asks for what the orchestrator does not send is refused; it never waits for it.
- Importing this loads neither torch nor prime-rl.
"""

from __future__ import annotations

from trainer_adapter.adapters.prime_rl.factories import TESTED, install
from trainer_adapter.adapters.prime_rl.transport import ShmbusBatchReceiver, ShmbusBatchSender

__all__ = ["TESTED", "ShmbusBatchReceiver", "ShmbusBatchSender", "install"]
