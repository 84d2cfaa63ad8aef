"""Starts the demo's workers, restarts those that die, and, for ``--chaos``, kills some.

Invariants: only processes that this object started are ever ended, by their own handle; after
`stop` none of them is left. Workers live in sessions of their own, so that Ctrl-C reaches the
trainer alone, which then stops them.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from typing import Final

import msgspec

from shmbus._programs import program
from trainer_adapter.demo.worker import WorkerConfig

#: Seconds between two kills in chaos mode, on average; each is drawn between half and one and a
#: half of it.
CHAOS_PERIOD_S: Final = 3.0
#: Unplanned deaths of one worker in a row before the demo gives up.
MAX_UNEXPECTED_DEATHS: Final = 5


class WorkersFailedError(RuntimeError):
    """A worker dies again and again by itself; its last words are in the message."""


class Supervisor:
    """A fixed number of worker processes, kept alive."""

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
        # One thread for numpy's BLAS: the workers share the cores with the trainer.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            program("trainer_adapter.demo.worker", msgspec.json.encode(config).decode()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=env,
        )

    def _draw_kill_s(self) -> float:
        return time.monotonic() + CHAOS_PERIOD_S * (0.5 + self._random.random())

    @property
    def alive(self) -> int:
        """Workers that run now."""
        return sum(worker.poll() is None for worker in self._workers)

    @property
    def restarts(self) -> int:
        """How often a worker was started again."""
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
            last_words = _last_words(worker)
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
            if worker.poll() is None:
                worker.kill()
        for worker in self._workers:
            worker.wait()
            if worker.stderr is not None:
                worker.stderr.close()


def _last_words(worker: subprocess.Popen[bytes]) -> str:
    if worker.stderr is None:
        return ""
    with worker.stderr as stream:
        return stream.read()[-2000:].decode(errors="replace")
