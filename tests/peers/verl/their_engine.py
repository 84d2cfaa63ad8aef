"""A pytest plug-in: verl's own test of its NCCL checkpoint engine runs with that of shmbus.

Backend name, devices, FSDP's kernel and flash attention are replaced; the model is tiny.
"""

import functools
import os
from typing import Any

import ray
import torch

DEVICES = 4  # two actors, two rollout workers
torch.cuda.device_count = lambda: DEVICES

from tests.checkpoint_engine import test_utils as theirs  # noqa: E402

ENGINE = {
    "backend": "shmbus",
    "custom_backend_module": "trainer_adapter.adapters.verl.checkpoint_engine",
    "engine_kwargs": {"shmbus": {"bus": os.environ["SHMBUS_TEST_BUS"]}},
}


class Actor(theirs.TrainingWorkerTest):  # type: ignore[misc]
    """Their actor; its process group is there before it asks for one of an accelerator."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        import verl.workers.engine.fsdp.transformer_impl as fsdp

        import trainer_adapter.adapters.verl.checkpoint_engine  # noqa: F401

        policy = fsdp.CPUOffloadPolicy
        fsdp.CPUOffloadPolicy = lambda **_: policy(pin_memory=False)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        super().__init__(*arguments, **options)


def engine_of(config: Any, **options: Any) -> Any:
    return config(
        **{**options, "strategy": "fsdp2", "dtype": "float32", "use_torch_compile": False}
    )


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = [item for item in items if item.originalname == "test_nccl_checkpoint_engine"][:1]
    [item] = items
    module = item.module
    made = module.CheckpointEngineConfig
    module.CheckpointEngineConfig = lambda **options: made(**{**options, **ENGINE})
    module.HFModelConfig = functools.partial(
        lambda make, **options: make(
            **{**options, "use_remove_padding": False},
            override_config={"attn_implementation": "sdpa"},
        ),
        module.HFModelConfig,
    )
    theirs.TrainingWorkerTest = Actor
    theirs.FSDPEngineConfig = functools.partial(engine_of, theirs.FSDPEngineConfig)
    ray.init = functools.partial(
        ray.init, num_cpus=32, num_gpus=DEVICES, include_dashboard=False,
        object_store_memory=100_000_000,
    )  # fmt: skip
