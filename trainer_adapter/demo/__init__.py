"""The learning part of ``shmbus demo``: a task, a policy, its sampler, and a GRPO step.

Invariant: importing this package, `task`, `sampler` or `evaluate` loads no torch; `policy` and
`learner` do.
"""
