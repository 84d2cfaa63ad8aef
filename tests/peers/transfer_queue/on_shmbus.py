"""A pytest plug-in that has TransferQueue's own tests run on the backend of shmbus.

They choose a backend from a table by the variable TQ_TEST_BACKEND, or write it down; this adds one,
and leaves out what is of another backend alone: GDR, and SimpleStorage's files in a checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from omegaconf import OmegaConf

from trainer_adapter.adapters import transfer_queue

#: What a user would give to tq.init.
CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "Shmbus", "Shmbus": {"store": os.environ["SHMBUS_TEST_STORE"]}},
}
FOREIGN = (
    "test_gdr", "test_tensor_fields", "test_storage_saved_is_true",
    "test_load_raises_on_storage_unit_count_mismatch",
)  # fmt: skip
HOOK = f"{transfer_queue.__name__}.register"


def pytest_sessionstart(session: Any) -> None:
    """Their fixture takes the Ray that is there."""
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100_000_000,
        runtime_env={"worker_process_setup_hook": HOOK},
    )


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = [item for item in items if not item.name.startswith(FOREIGN)]
    for module in {item.module for item in items}:
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS["Shmbus"] = CONFIG
        else:
            module._TQ_CONFIG = OmegaConf.create(CONFIG)
