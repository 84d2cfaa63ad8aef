"""``shmbus demo``: a sorting task, a small policy, rollout workers, and a trainer that runs GRPO.

Invariant: importing this package, `task`, `sampler` or `worker` loads no torch.
"""
