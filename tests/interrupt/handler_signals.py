"""Interrupts an OnlineDataHandler by real signals at random instants, and audits it at the end.

Usage: ``python tests/interrupt/handler_signals.py NAME PREFETCH SEED INTERRUPTS``. Prints one JSON
line: how many exceptions were raised, and what is wrong, which is nothing.

A signal's handler raises while a batch is taken, acknowledged or given back. The same call, made
again, succeeds or says that it has happened already. In the end every group was trained once.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np

import shmbus
from trainer_adapter import Batch, OnlineDataHandler

SAMPLES = 2
GROUPS = 4


class Interrupt(BaseException):
    """What the signal's handler raises."""


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupt


class Trainer:
    """A loop that is interrupted, and goes on."""

    def __init__(self, handler: OnlineDataHandler, seed: int) -> None:
        self.handler = handler
        self.random = random.Random(seed)
        self.interrupts = 0
        self.trained: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.kept: list[BaseException] = []
        self.held: list[Batch] = []

    def interrupted(self, operate: Any) -> bool:
        """Run it under a timer; whether it was interrupted."""
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, self.random.uniform(1e-6, 1.5e-3))
                operate()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt as error:
            self.interrupts += 1
            # As a notebook keeps the last exception with all its frames.
            self.kept[:] = [error]
            return True
        return False

    def take(self) -> Batch | None:
        def operate() -> None:
            self.held.append(self.handler.next_batch(timeout=0.5))

        while not self.held:
            try:
                if self.interrupted(operate):
                    # What was returned is listed, also where the list here has not got it.
                    self.held[:] = self.handler.out
            except TimeoutError:
                return None
        return self.held.pop()

    def end(self, verb: str, batch: Batch) -> None:
        keys = [group.instance_id for group in batch.groups]

        def operate() -> None:
            getattr(self.handler, verb)(batch)

        again = False
        try:
            while self.interrupted(operate):
                again = True
        except shmbus.ProtocolError as error:
            if not (again and "already" in str(error)):
                self.wrong.append(str(error))
        if verb == "ack":
            self.trained.update(keys)


def main(name: str, prefetch: int, seed: int, interrupts: int) -> dict[str, Any]:
    signal.signal(signal.SIGALRM, raise_interrupt)
    put: set[str] = set()
    tokens = np.arange(7, dtype=np.int32)
    with (
        shmbus.Bus.create(name, "1MiB", max_producers=2),
        shmbus.Producer(name) as producer,
        OnlineDataHandler(
            name, groups_per_batch=2, max_wait=0.0, prefetch=prefetch, daemon=False
        ) as handler,
    ):
        trainer = Trainer(handler, seed)
        while trainer.interrupts < interrupts:
            for _ in range(GROUPS):
                key = f"g{len(put)}"
                put.add(key)
                for index in range(SAMPLES):
                    producer.put(key, group_size=SAMPLES, index=index, score=index, tokens=tokens)
            while (batch := trainer.take()) is not None:
                verb = "give_back" if trainer.random.random() < 0.2 else "ack"
                trainer.end(verb, batch)
                if sum(trainer.trained.values()) >= len(put):
                    break
            if trainer.wrong or set(trainer.trained) != put:
                break
        ledger = handler.stats()
        twice = [key for key, count in trainer.trained.items() if count != 1]
        if twice or set(trainer.trained) != put:
            trainer.wrong.append(f"twice {twice}, lost {sorted(put - set(trainer.trained))}")
        if not ledger.balanced or ledger.leased or ledger.stashed or ledger.in_ring:
            trainer.wrong.append(f"something is left: {ledger}")
    return {"interrupts": trainer.interrupts, "wrong": trainer.wrong}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
