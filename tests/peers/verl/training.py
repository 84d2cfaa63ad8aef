"""verl's trainer as its command line runs it, with rollouts of outside processes alone.

    python -c "import training; training.main()" KEY=VALUE ...

Imported, so that Ray's workers find its classes by their names. The arguments are those of
``python -m verl.trainer.main_ppo``. The trainer mode "bus" is verl's own trainer without inference
servers, since the workers of a bus have theirs. What stands in for hardware: the platform of
`on_a_cpu`, and gloo as the only backend of the process group, where verl asks for gloo and the
accelerator's. Model, FSDP engine, losses, advantages, optimizer, checkpoints, TransferQueue and
loop are verl's.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
import torch
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainer, register_trainer
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

# The kind of inference server that verl is asked for; none of it is ever started.
RolloutReplicaRegistry.register("bus", lambda: RolloutReplica)


class Actor(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker; its process group is there before it asks for one of an accelerator."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        torch.set_num_threads(1)
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )


@register_trainer("bus")
class Trainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer, and nobody to send weights to."""

    _enable_hybrid_replicas = False

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping[Role.Actor] = ray.remote(Actor)

    def on_step_end(self) -> None: ...
    def on_sample_end(self) -> None: ...


class Runner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc]
    """Unpickling it by name registers the trainer where it runs."""


def main() -> None:
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=sys.argv[1:])
    run_ppo(config, task_runner_class=ray.remote(Runner))
