"""Rollout actors of Ray, with trajectories through shared memory instead of Ray's store.

    pip install 'shmbus[train]' ray
    python examples/ray_actors.py              # half a minute on two cores; --quick for less

Ray places and watches the actors; the bus carries prompts and trajectories. A `Producer` pickles by
name, like any argument. The script kills an actor in the middle of the run: Ray restarts the actor,
and the next worker samples the lost prompts. No group is lost.

Actors and trainer share a machine here.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from typing import Any

import numpy as np
import ray
import torch

import shmbus
from trainer_adapter import OnlineDataHandler

ACTORS, GROUP_SIZE, GROUPS_PER_BATCH = 2, 8, 8
SCHEMA: Any = {"tokens": "int32", "logprobs": "float32"}


@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Rollouts:
    """Actor with answers to requests."""

    def __init__(self, producer: shmbus.Producer) -> None:
        self.producer = producer
        self.rng = np.random.default_rng()

    def pid(self) -> int:
        """Return the process id of the actor."""
        return os.getpid()

    def run(self, idle_s: float) -> int:
        """Answer until the requests pause for so long; return the count of answers."""
        answers = 0
        while (request := self.producer.requests.next(timeout=idle_s)) is not None:
            length = int(self.rng.integers(4, 32))
            answers += self.producer.requests.answer(
                request,
                score=length / 32,
                policy_version=self.producer.policy_version,
                tokens=self.rng.integers(1000, size=length),
                logprobs=np.zeros(length, np.float32),
                meta={"actor": os.getpid()},
            )
        return answers


def train(bus: str, actors: list[Any], steps: int) -> int:
    """Take batches; kill an actor in the middle. Return the trained sequences."""
    trained = 0
    with OnlineDataHandler(
        bus, groups_per_batch=GROUPS_PER_BATCH, extra_fields={"actor": "meta"}
    ) as handler:
        handler.offer([{}] * (steps * GROUPS_PER_BATCH), group_size=GROUP_SIZE)
        for step in range(1, steps + 1):
            if step == steps // 2:
                ray.kill(actors[0], no_restart=False)
            batch = handler.next_batch(60.0)
            handler.set_policy_version(step)  # after a training step of yours
            handler.ack(batch)
            trained += batch.num_sequences
            processes = len(set(batch.extra["actor"]))
            print(f"step {step}: {batch.num_sequences} sequences of {processes} actors", flush=True)
        assert handler.stats().balanced
    return trained


def main() -> int:
    """Run actors and trainer; return 0 after exactly one training of each sequence."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 10 if parser.parse_args().quick else 100
    bus = f"ray-{os.getpid()}-{secrets.token_hex(3)}"
    torch.set_num_threads(1)
    # A private cluster; leave `address` out to join yours.
    ray.init(address="local", num_cpus=ACTORS, include_dashboard=False, log_to_driver=False)
    try:
        with shmbus.Bus.create(bus, "16MiB", schema=SCHEMA), shmbus.Producer(bus) as producer:
            actors = [Rollouts.remote(producer) for _ in range(ACTORS)]
            print("actors in processes", *ray.get([actor.pid.remote() for actor in actors]))
            running = [actor.run.remote(idle_s=2.0) for actor in actors]
            trained = train(bus, actors, steps)
            print("answers by actor since its last start:", ray.get(running))
    finally:
        ray.shutdown()
    wanted = steps * GROUPS_PER_BATCH * GROUP_SIZE
    print(f"{trained} sequences trained of {wanted} requested")
    return 0 if trained == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
