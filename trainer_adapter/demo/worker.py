"""A rollout worker of the demo, as a process of its own: numpy and the bus, no torch.

It takes prompts that the trainer requests, many samples at once, and puts the answers interleaved,
some of them a round later, as rollouts of different lengths would finish. So the groups of all
workers mix in the ring. What a worker that is killed had in hand is taken by others. The trainer
requests a bounded number of groups, which keeps the samples fresh.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import msgspec
import numpy as np

import shmbus
from trainer_adapter.demo.sampler import PolicyConfig, Sampler
from trainer_adapter.demo.task import SortTask, reward
from trainer_adapter.demo.weights import WeightsChannel

#: Seconds that a worker waits for a prompt before it looks whether the trainer is there still.
REQUEST_WAIT_S: Final = 0.5
#: Share of the samples at hand that finish a round later.
KEPT_BACK_SHARE: Final = 0.3
#: Seconds that a put waits for space.
PUT_TIMEOUT_S: Final = 30.0


class WorkerConfig(msgspec.Struct, frozen=True):
    """Parameters of a worker, as JSON on its command line."""

    bus: str
    #: Which worker it is, and how often it was restarted: its randomness follows from both.
    number: int
    life: int
    seed: int
    #: Samples that one batch of the sampler makes.
    samples_at_once: int
    #: Process id of the trainer: the worker ends when that is gone.
    parent: int
    #: Take the newest weights there are, and not those that the bus announces: where weights and
    #: announcement come from another machine, each by its own way.
    newest: bool = False


class Worker:
    """Samples and puts until the trainer is gone."""

    def __init__(self, config: WorkerConfig, task: SortTask, policy: PolicyConfig) -> None:
        self.config = config
        self.task = task
        self.sampler = Sampler(policy)
        self.rng = np.random.default_rng((config.seed, config.number, config.life))
        self.weights = WeightsChannel(config.bus, policy.num_parameters)
        self.producer = shmbus.Producer(config.bus, label=f"rollout worker {config.number}")
        self.version = -1
        self.unsent: list[tuple[shmbus.Request, dict[str, Any]]] = []

    def run(self) -> None:
        """Work until the trainer is gone or the bus is closed."""
        while os.getppid() == self.config.parent:
            self.refresh()
            requests = self.take()
            if requests:
                self.sample(requests)

    def refresh(self) -> None:
        """Load the newest weights, if they are newer than these."""
        if self.config.newest:
            found = self.weights.newest(self.version)
            if found is not None:
                self.version, weights = found
                self.sampler.load(weights)
            return
        version = self.producer.policy_version
        if version == self.version:
            return
        announced = self.weights.read(version)
        if announced is not None:
            self.sampler.load(announced)
            self.version = version

    def take(self) -> list[shmbus.Request]:
        """Take samples to make, as many as one batch of the sampler; wait where there is none."""
        found: list[shmbus.Request] = []
        while len(found) < self.config.samples_at_once:
            request = self.producer.requests.next(timeout=0)
            if request is None:
                break
            found.append(request)
        if not found:
            # Nothing to do: what was kept back finishes now.
            self.send(len(self.unsent))
            request = self.producer.requests.next(timeout=REQUEST_WAIT_S)
            found += [] if request is None else [request]
        return found

    def sample(self, requests: list[shmbus.Request]) -> None:
        """Sample once for each request, and put most of the samples at hand."""
        prompts = [request["prompt"] for request in requests]
        groups = self.sampler.sample(prompts, 1, self.task.max_completion_len, self.rng)
        for request, prompt, (sample,) in zip(requests, prompts, groups, strict=True):
            answer = {
                "score": reward(prompt, sample.completion),
                "policy_version": self.version,
                **sample.fields(),
            }
            self.unsent.append((request, answer))
        self.send(round(len(self.unsent) * (1 - KEPT_BACK_SHARE)))

    def send(self, count: int) -> None:
        """Put so many of the samples at hand, in random order."""
        order = self.rng.permutation(len(self.unsent))
        chosen = [self.unsent[i] for i in order[:count]]
        self.unsent = [self.unsent[i] for i in order[count:]]
        for request, answer in chosen:
            self.producer.requests.answer(request, timeout=PUT_TIMEOUT_S, **answer)


def main() -> None:
    """Start a worker from the JSON in the first argument."""
    config = msgspec.json.decode(sys.argv[1], type=WorkerConfig)
    Worker(config, SortTask(), PolicyConfig()).run()


if __name__ == "__main__":
    main()
