"""Evaluation beside training: groups of another split, in the trainer's process.

Invariant: evaluated groups never enter a batch, and training groups never enter an evaluation.
"""

from __future__ import annotations

import time

import numpy as np

import shmbus
from shmbus.base.arguments import check_int, check_split, check_timeout
from shmbus.batch.gather import FieldNames
from trainer_adapter.handler.group_calls import WORK_SLICE_S, GroupScoring

#: Upper limit of groups per take.
MOST_AT_ONCE = 64


class Evaluation:
    """Takes groups of other splits for a handler, scored, and makes figures of them."""

    def __init__(
        self,
        consumer: shmbus.Consumer,
        fields: FieldNames,
        scoring: GroupScoring | None,
        trained_split: str,
    ) -> None:
        self._consumer = consumer
        self._trained_split = trained_split
        self._fields = fields
        self._scoring = scoring
        #: Consumers of further splits, if a daemon serves the bus.
        self._evaluators: dict[str, shmbus.Consumer] = {}
        #: Groups without scores yet, by split; a later call goes on with them.
        self._unscored: dict[str, list[shmbus.Group]] = {}

    def close(self) -> None:
        """Close the consumers of further splits."""
        for consumer in self._evaluators.values():
            consumer.close()

    def take(
        self, split: str = "eval", *, max_groups: int = MOST_AT_ONCE, timeout: float | None = 0.1
    ) -> list[shmbus.Group]:
        """Take complete groups of a split beside the trained split, like `Consumer.take`."""
        if check_split(split) == self._trained_split:
            raise ValueError(
                f"split: expected another than {split!r}, whose groups come as batches"
            )
        if self._scoring is None:
            return self._take(split, max_groups, timeout)
        timeout = check_timeout(timeout)
        deadline_s = None if timeout is None else time.monotonic() + timeout
        held = self._unscored.setdefault(split, [])
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if len(held) < MOST_AT_ONCE:
                held += self._take(split, max_groups, 0.0 if held else left_s)
            slice_s = None if left_s is None else min(left_s, WORK_SLICE_S)
            self._scoring.run(held, slice_s, trained=False)
            held[:] = [group for group in held if group.state == "leased"]
            found = [group for group in held if self._scoring.is_done(group)][:max_groups]
            if found or left_s == 0.0:
                held[:] = [group for group in held if all(group is not one for one in found)]
                return found

    def _take(self, split: str, max_groups: int, timeout: float | None) -> list[shmbus.Group]:
        if not self._consumer.has_daemon:
            return self._consumer.take(max_groups, timeout, split=split)
        if split not in self._evaluators:
            self._evaluators[split] = shmbus.Consumer(self._consumer.name, split=split)
        return self._evaluators[split].take(max_groups, timeout)

    def evaluate(
        self, groups: int, *, timeout: float | None = None, split: str = "eval"
    ) -> dict[str, float]:
        """Take groups of another split, acknowledge them, and return figures to log."""
        groups = check_int("groups", groups, 1)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        rewards: list[list[float]] = []
        lengths: list[int] = []
        versions: list[int] = []
        while len(rewards) < groups:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            wanted = min(MOST_AT_ONCE, groups - len(rewards))
            found = self.take(split, max_groups=wanted, timeout=left_s)
            for group in found:
                with group:
                    rewards.append([sample.score for sample in group])
                    versions += [sample.policy_version for sample in group]
                    lengths += [
                        sample[self._fields.tokens].size
                        for sample in group
                        if self._fields.tokens in sample
                    ]
            if not found and left_s is not None and left_s <= 0:
                break
        figures = {"groups": float(len(rewards)), "samples": float(len(versions))}
        if rewards:
            every = np.array([reward for group in rewards for reward in group])
            lags = self._consumer.policy_version - np.array(versions)
            figures["reward/mean"] = float(every.mean())
            figures["reward/std"] = float(every.std())
            figures["reward/best"] = float(np.mean([max(group) for group in rewards]))
            figures["lag/mean"] = float(lags.mean())
            figures["lag/max"] = float(lags.max())
        if lengths:
            figures["length/mean"] = float(np.mean(lengths))
        return {f"{split}/{name}": value for name, value in figures.items()}
