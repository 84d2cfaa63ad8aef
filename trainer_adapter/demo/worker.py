"""A rollout worker of the demo, as a process of its own: numpy and the bus, no torch.

It samples the completions of several prompts at once and puts them interleaved, some of them a
round later, as rollouts of different lengths would finish: so the groups of all workers mix in the
ring, and a worker that is killed leaves groups behind that never become complete. It keeps pace
with the trainer: for each policy version it puts its share of a batch, and is ahead by a bounded
number of batches, which keeps the samples fresh.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final

import msgspec
import numpy as np

import shmbus
from trainer_adapter.demo.sampler import PolicyConfig, Sampler
from trainer_adapter.demo.task import SortTask, reward, show
from trainer_adapter.demo.weights import WeightsChannel

#: Seconds between checks for a new policy version while this worker is ahead of the trainer.
AHEAD_POLL_S: Final = 0.002
#: Seconds after which it continues anyway: groups may be lost with another worker.
AHEAD_LIMIT_S: Final = 1.0
#: Share of the samples at hand that finish a round later.
KEPT_BACK_SHARE: Final = 0.3
#: Seconds that a put waits for space.
PUT_TIMEOUT_S: Final = 30.0


class WorkerConfig(msgspec.Struct, frozen=True):
    """Parameters of a worker, as JSON on its command line.

    Attributes
    ----------
    bus : str
    number, life : int
        Which worker it is, and how often it was restarted: its randomness follows from both.
    seed, group_size : int
    prompts_at_once : int
        Prompts sampled together, as one batch of the sampler.
    groups_per_version : float
        This worker's share of a batch.
    ahead : float
        How many batches it may be ahead of the trainer.
    parent : int
        Process id of the trainer: the worker ends when that is gone.
    """

    bus: str
    number: int
    life: int
    seed: int
    group_size: int
    prompts_at_once: int
    groups_per_version: float
    ahead: float
    parent: int


class Worker:
    """Samples and puts until the trainer is gone."""

    def __init__(self, config: WorkerConfig, task: SortTask, policy: PolicyConfig) -> None:
        self.config = config
        self.task = task
        self.sampler = Sampler(policy)
        self.rng = np.random.default_rng((config.seed, config.number, config.life))
        self.weights = WeightsChannel(config.bus, policy.num_parameters)
        self.producer = shmbus.Producer(config.bus, label=f"rollout worker {config.number}")
        self.first_version = self.producer.policy_version
        self.version = -1
        self.prompts = 0
        self.waived = 0.0
        self.unsent: list[dict[str, Any]] = []

    def run(self) -> None:
        """Work until the trainer is gone or the bus is closed."""
        while os.getppid() == self.config.parent:
            self.refresh()
            if self.prompts >= self.allowance():
                self.wait_for_version()
            else:
                self.put_groups()

    def allowance(self) -> float:
        """Return how many groups may have been put by now."""
        versions = self.version - self.first_version + 1 + self.config.ahead
        return versions * self.config.groups_per_version + self.waived

    def refresh(self) -> None:
        """Load the newest weights, if they are newer than these."""
        version = self.producer.policy_version
        if version == self.version:
            return
        weights = self.weights.read(version)
        if weights is not None:
            self.sampler.load(weights)
            self.version = version

    def wait_for_version(self) -> None:
        """Put the samples that were kept back, and wait some time for newer weights."""
        self.send(len(self.unsent))
        deadline = time.monotonic() + AHEAD_LIMIT_S
        while self.producer.policy_version == self.version and time.monotonic() < deadline:
            time.sleep(AHEAD_POLL_S)
        if self.producer.policy_version == self.version:
            self.waived += self.config.prompts_at_once

    def put_groups(self) -> None:
        """Sample a few groups, and put most of their samples and of those kept back before."""
        config = self.config
        prompts = [self.task.sample_prompt(self.rng) for _ in range(config.prompts_at_once)]
        groups = self.sampler.sample(
            prompts, config.group_size, self.task.max_completion_len, self.rng
        )
        for prompt, samples in zip(prompts, groups, strict=True):
            self.prompts += 1
            name = f"{show(prompt)}#{config.number}.{config.life}.{self.prompts}"
            for index, sample in enumerate(samples):
                self.unsent.append(
                    {
                        "instance_id": name,
                        "group_size": config.group_size,
                        "index": index,
                        "score": reward(prompt, sample.completion),
                        "policy_version": self.version,
                        **sample.fields(),
                    }
                )
        self.send(round(len(self.unsent) * (1 - KEPT_BACK_SHARE)))

    def send(self, count: int) -> None:
        """Put so many of the samples at hand, in random order."""
        order = self.rng.permutation(len(self.unsent))
        chosen = [self.unsent[i] for i in order[:count]]
        self.unsent = [self.unsent[i] for i in order[count:]]
        self.producer.put_many(chosen, timeout=PUT_TIMEOUT_S)


def main() -> None:
    """Start a worker from the JSON in the first argument."""
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    Worker(config, SortTask(), PolicyConfig()).run()


if __name__ == "__main__":
    main()
