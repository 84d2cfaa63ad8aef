"""verl's command line with rollouts of outside processes: ``verl_training.main()``.

Platform and gloo stand in for hardware; two workers write the weights of each step into files.
"""

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

RECIPE = Path(__file__).resolve().parents[3] / "docs/adapters/upstream/verl-recipe/shmbus/config"

RolloutReplicaRegistry.register("bus", lambda: RolloutReplica)


class Actor(ActorRolloutRefWorker):  # type: ignore[misc]
    """verl's worker, with a process group before its request for an accelerator's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        torch.set_num_threads(1)
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )


class Files:
    """Takes weights as a server of verl's does, and keeps each version in a file."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        found = {name: tensor.clone() async for name, tensor in weights}
        torch.save(found, self._root / f"weights-{global_steps}-{os.getpid()}.pt")


class Replica:
    """Two of verl's workers without a server, and what its manager asks of a replica."""

    def __init__(self, config: Any) -> None:
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        made = RayClassWithInitArgs(
            cls=ray.remote(CheckpointEngineWorker),
            rollout_config=rollout,
            model_config=None,
            server_adapter=Files(Path(config.trainer.default_local_dir)),
        )
        pool = RayResourcePool([2], False, "replica", max_colocate_count=1)  # a processor each
        group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
        self.workers = group.workers

    async def abort_all_requests(self, **_: Any) -> None: ...
    async def release_kv_cache(self) -> None: ...
    async def resume_kv_cache(self) -> None: ...
    async def resume_generation(self) -> None: ...


@register_trainer("bus")
class Trainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer, with weights sent as in its mode "separate_async"."""

    _enable_hybrid_replicas = False

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping[Role.Actor] = ray.remote(Actor)

    def _setup(self) -> None:
        super()._setup()
        Path(self.config.trainer.default_local_dir).mkdir(exist_ok=True)
        rollout = self.config.actor_rollout_ref.rollout
        self._to_replica = CheckpointEngineManager(
            config=omega_conf_to_dataclass(rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=[Replica(self.config)],
        )

    def on_step_end(self) -> None:
        self._to_replica.update_weights(self.global_steps)

    def on_sample_end(self) -> None: ...


class Runner(TaskRunnerV1.__ray_actor_class__):  # type: ignore[misc]
    """Registers the trainer in its process, through unpickling by name."""


def main() -> None:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(RECIPE), version_base=None):
        config = compose("shmbus_trainer", overrides=sys.argv[1:])
    run_ppo(config, task_runner_class=ray.remote(Runner))
