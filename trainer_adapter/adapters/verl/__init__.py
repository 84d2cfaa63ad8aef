"""verl v1 on a bus, by two strings of its configuration: its prompts go out, groups come back.

::

    actor_rollout_ref.rollout.agent.agent_loop_manager_class:
        trainer_adapter.adapters.verl.manager.ShmbusAgentLoopManager
    trainer.v1.sampler.custom_sampler: {path: pkg://trainer_adapter.adapters.verl.sampler,
                                        name: ShmbusSamplerAsync}       # ShmbusSampler in sync mode
    trainer.v1.sampler.sampler_kwargs: {bus: run1}

Workers of any kind answer by `shmbus.Producer.requests.next` and `requests.answer`; they need
neither Ray nor verl. Importing this package loads neither; its two modules need verl, and say so.
"""

from __future__ import annotations

__all__: list[str] = []
