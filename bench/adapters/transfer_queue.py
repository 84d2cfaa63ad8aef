"""Putting and getting one row through TransferQueue: its default store, and that of shmbus.

    python -m bench.adapters.transfer_queue [ROUNDS]

Wall time of `kv_put` and `kv_batch_get` of a tensor of 1 MB and one of 100 MB, TransferQueue's
controller included. A get is over when the last byte was read, since a mapping is not. The stores
take turns, and each figure is the least of its rounds.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf

from bench.adapters import numbers
from trainer_adapter.adapters.transfer_queue import BACKEND

SIZES = {"1 MB": 10**6, "100 MB": 10**8}
#: Times that each store is made, so that a disturbance is not in one of them alone.
TURNS = 3
PARTITION = "bench"
HOOK = "trainer_adapter.adapters.transfer_queue.register"
STORES: dict[str, dict[str, Any]] = {
    "SimpleStorage": {"num_data_storage_units": 1},
    BACKEND: {"store": f"bench-{os.getpid()}"},
}


def measure(backend: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the least seconds of a put and a get, by size."""
    settings = {"storage_backend": backend, backend: STORES[backend]}
    tq.init(OmegaConf.create({"backend": settings}))
    found = {}
    for label, size in SIZES.items():
        row = torch.arange(size, dtype=torch.uint8)
        puts, gets = [], []
        for number in range(rounds + 1):
            key = f"{label}-{number}"
            began_s = time.perf_counter()
            tq.kv_put(key=key, partition_id=PARTITION, fields={"row": row})
            put_s = time.perf_counter()
            got = tq.kv_batch_get(keys=[key], partition_id=PARTITION)["row"]
            total = int(got[0].sum(dtype=torch.int64))
            gets.append(time.perf_counter() - put_s)
            puts.append(put_s - began_s)
            assert total == int(row.sum(dtype=torch.int64))
            tq.kv_clear(keys=[key], partition_id=PARTITION)
        # The first makes connections.
        found[label] = {"put_s": min(puts[1:]), "get_s": min(gets[1:])}
    tq.close()
    return found


def main() -> None:
    (rounds,) = numbers(5)
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False,
        object_store_memory=10**8, runtime_env={"worker_process_setup_hook": HOOK},
    )  # fmt: skip
    turns = [{name: measure(name, rounds) for name in STORES} for _ in range(TURNS)]
    ray.shutdown()
    least = {
        name: {
            size: {
                what: min(turn[name][size][what] for turn in turns) for what in ("put_s", "get_s")
            }
            for size in SIZES
        }
        for name in STORES
    }
    print(json.dumps({"tq": tq.__version__, "least": least, "turns": turns}))


if __name__ == "__main__":
    main()
