"""A rollout worker of the demo, as a separate process, and its supervisor: no torch.

A worker takes prompts requested by the trainer, many samples at once, and puts the answers
interleaved, some of them a round later, like rollouts of different lengths. So the groups of the
workers mix in the ring. The remaining workers take over a killed worker's prompts.

Invariants:

- Weights from `WeightsChannel.newest` equal the whole weights of one `publish`.
- A `Supervisor` ends only its own processes, by their handles; after `stop` no process remains.
  They live in separate sessions, so Ctrl-C reaches the trainer alone.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

import shmbus
from shmbus.base.programs import program
from shmbus.data.encoding import decodable
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec
from trainer_adapter.demo.sampler import PolicyConfig, Sampler
from trainer_adapter.demo.task import SortTask, reward

#: Seconds of a worker's wait for a prompt, before a look for the trainer.
REQUEST_WAIT_S: Final = 0.5
#: Share of the samples at hand that finish a round later.
KEPT_BACK_SHARE: Final = 0.3
#: Seconds of a put's wait for space.
PUT_TIMEOUT_S: Final = 30.0
#: Samples of a worker in one batch.
SAMPLES_AT_ONCE: Final = 48
#: Sets of weights kept while workers are stopped, each of some hundred kilobytes.
MAX_WEIGHT_SETS: Final = 8
#: Mean seconds between two kills in chaos mode, drawn from half to one and a half times the value;
#: unplanned deaths of a worker in a row before the demo gives up.
CHAOS_PERIOD_S: Final = 3.0
MAX_UNEXPECTED_DEATHS: Final = 5

FloatArray = npt.NDArray[np.float32]


class WeightsChannel:
    """The way back, through a slot pool: the trainer publishes weights, every worker reads."""

    def __init__(self, bus: str, size: int, *, create: bool = False) -> None:
        self._bytes = 4 * size
        self._end: Any
        if create:
            spec = PoolSpec(slot_bytes=self._bytes, max_slots=MAX_WEIGHT_SETS)
            label = "demo trainer"
            self._end = PoolPublisher(bus, "weights", spec=spec, label=label, when_held="grow")
        else:
            self._end = PoolReader(bus, "weights", label="demo worker")

    def publish(self, weights: FloatArray, version: int) -> None:
        """Write a set; the previous set stays readable until the next."""
        with self._end.begin(version, self._bytes) as write:
            np.copyto(write.view().view(np.float32), weights)

    def newest(self, known: int = -1) -> tuple[int, FloatArray] | None:
        """Copy the newest set, with its version; None for the known version."""
        try:
            lease = self._end.latest(timeout=0)
        except shmbus.WaitTimeoutError:
            return None
        with lease:
            if lease.version == known or lease.size != self._bytes:
                return None
            copy: FloatArray = lease.view().view(np.float32).copy()
            self._end.applied(lease)
            return lease.version, copy

    def close(self) -> None:
        """Let go of the memory; the trainer's end removes the name."""
        self._end.close(**({"remove": True} if isinstance(self._end, PoolPublisher) else {}))


@decodable
class WorkerConfig(msgspec.Struct, frozen=True):
    """Parameters of a worker, as JSON on its command line."""

    bus: str
    seed: int
    #: Process id of the trainer: its end ends the worker.
    parent: int
    #: Number of the worker, and its count of restarts, together the seed of its randomness.
    number: int = 0
    life: int = 0


class Worker:
    """Samples and puts until the trainer is gone."""

    def __init__(self, config: WorkerConfig) -> None:
        policy = PolicyConfig()
        self.config = config
        self.task = SortTask()
        self.sampler = Sampler(policy)
        self.rng = np.random.default_rng((config.seed, config.number, config.life))
        self.weights = WeightsChannel(config.bus, policy.num_parameters)
        self.producer = shmbus.Producer(config.bus, label=f"rollout worker {config.number}")
        self.version = -1
        self.unsent: list[tuple[shmbus.Request, dict[str, Any]]] = []

    def run(self) -> None:
        """Work until the trainer is gone or the bus is closed."""
        while os.getppid() == self.config.parent:
            found = self.weights.newest(self.version)
            if found is not None:
                self.version, weights = found
                self.sampler.load(weights)
            requests = self.take()
            if requests:
                self.sample(requests)

    def take(self) -> list[shmbus.Request]:
        """Take samples to make, up to one batch of the sampler; wait if none came."""
        requests = self.producer.requests
        found = requests.next_many(SAMPLES_AT_ONCE, timeout=0)
        if not found:
            # Nothing to do: the samples kept back finish now.
            self.send(len(self.unsent))
            found = requests.next_many(SAMPLES_AT_ONCE, timeout=REQUEST_WAIT_S)
        return found

    def sample(self, requests: list[shmbus.Request]) -> None:
        """Sample once for each request, and put most of the samples at hand."""
        prompts = [request["prompt"] for request in requests]
        found = self.sampler.sample(prompts, self.task.max_completion_len, self.rng)
        for request, prompt, sample in zip(requests, prompts, found, strict=True):
            score = reward(prompt, sample.completion)
            answer = {"score": score, "policy_version": self.version, **sample.fields()}
            self.unsent.append((request, answer))
        self.send(round(len(self.unsent) * (1 - KEPT_BACK_SHARE)))

    def send(self, count: int) -> None:
        """Put a number of the samples at hand, in random order."""
        order = self.rng.permutation(len(self.unsent))
        chosen = [self.unsent[i] for i in order[:count]]
        self.unsent = [self.unsent[i] for i in order[count:]]
        for request, answer in chosen:
            self.producer.requests.answer(request, timeout=PUT_TIMEOUT_S, **answer)


class WorkersFailedError(RuntimeError):
    """A worker dies repeatedly by itself; its last output ends the message."""


class Supervisor:
    """A fixed number of worker processes, kept alive; for ``--chaos`` it kills some."""

    def __init__(self, template: WorkerConfig, count: int, *, chaos: bool = False) -> None:
        self._template = template
        self._random = random.Random(template.seed)
        self._lives = [0] * count
        self._unexpected = [0] * count
        self._chaos = chaos
        self.kills = 0
        self._workers = [self._start(number) for number in range(count)]
        self._next_kill_s = self._draw_kill_s()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        config = msgspec.structs.replace(self._template, number=number, life=self._lives[number])
        return subprocess.Popen(
            program("trainer_adapter.demo.worker", msgspec.json.encode(config).decode()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # One thread for numpy's BLAS: the workers share the cores with the trainer.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def _draw_kill_s(self) -> float:
        return time.monotonic() + CHAOS_PERIOD_S * (0.5 + self._random.random())

    @property
    def alive(self) -> int:
        """Running workers."""
        return sum(worker.poll() is None for worker in self._workers)

    @property
    def restarts(self) -> int:
        """Number of restarts of workers."""
        return sum(self._lives)

    def tend(self) -> None:
        """Restart dead workers; in chaos mode, sometimes kill one. Cheap: call it often."""
        if self._chaos and time.monotonic() >= self._next_kill_s:
            victim = self._random.randrange(len(self._workers))
            self._workers[victim].kill()
            self._workers[victim].wait()
            self._unexpected[victim] = -1
            self.kills += 1
            self._next_kill_s = self._draw_kill_s()
        for number, worker in enumerate(self._workers):
            if worker.poll() is None:
                continue
            self._unexpected[number] += 1
            assert worker.stderr is not None
            with worker.stderr as stream:
                last_words = stream.read()[-2000:].decode(errors="replace")
            if self._unexpected[number] >= MAX_UNEXPECTED_DEATHS:
                raise WorkersFailedError(
                    f"worker {number} ended with status {worker.returncode} "
                    f"{MAX_UNEXPECTED_DEATHS} times in a row; its last words:\n{last_words}"
                )
            self._lives[number] += 1
            self._workers[number] = self._start(number)

    def stop(self) -> None:
        """End every worker."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait()
            if worker.stderr is not None:
                worker.stderr.close()


if __name__ == "__main__":
    Worker(msgspec.json.decode(sys.argv[1], type=WorkerConfig)).run()
