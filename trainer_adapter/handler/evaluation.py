"""Evaluation beside training: groups of another split, in the process that trains.

Invariant: what is evaluated is never in a batch, and what is trained on never in an evaluation.
"""

from __future__ import annotations

import time

import numpy as np

import shmbus
from shmbus._arguments import check_int, check_timeout
from shmbus.batch.field_names import FieldNames
from trainer_adapter.handler.scoring import GroupScoring

__all__ = ["EvaluatingHandler"]

#: Groups that one take brings at the most.
_AT_ONCE = 64


class EvaluatingHandler:
    """What of a handler takes groups of other splits; the rest of it is `OnlineDataHandler`."""

    _consumer: shmbus.Consumer
    _fields: FieldNames
    _evaluators: dict[str, shmbus.Consumer]
    _scoring: GroupScoring | None

    def _begin_evaluation(self) -> None:
        #: Consumers of other splits, where a daemon serves the bus.
        self._evaluators = {}

    def _end_evaluation(self) -> None:
        for consumer in self._evaluators.values():
            consumer.close()

    def take(
        self, split: str = "eval", *, max_groups: int = _AT_ONCE, timeout: float | None = 0.1
    ) -> list[shmbus.Group]:
        """Take complete groups of another split than "train", as `shmbus.Consumer.take` does.

        Parameters
        ----------
        split : str, default "eval"
            As `request` or `shmbus.Producer.put` was given it.
        max_groups : int, default 64
            The most to take.
        timeout : float, optional
            Seconds to wait for the first: None waits for ever, 0 does not wait.

        Returns
        -------
        list of shmbus.Group
            To be acknowledged by the caller: ``with group:`` does. With a `score_group` they are
            scored; what it raises is raised here, and they are given back.

        Raises
        ------
        ValueError
            The split is "train", whose groups come as batches.
        TypeError, BusClosedError, BusRemovedError, StallError, DaemonUnavailableError
            As for `shmbus.Consumer.take`.
        """
        if split == "train":
            raise ValueError("split: expected another than 'train', whose groups come as batches")
        if not self._consumer.served:
            return self._scored_now(self._consumer.take(max_groups, timeout, split=split))
        if split not in self._evaluators:
            self._evaluators[split] = shmbus.Consumer(self._consumer.name, split=split)
        return self._scored_now(self._evaluators[split].take(max_groups, timeout))

    def _scored_now(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        if self._scoring is None:
            return groups
        try:
            return self._scoring.score(groups, trained=False)
        except BaseException:
            for group in groups:
                if group.state == "leased":
                    group.give_back()
            raise

    def evaluate(
        self, groups: int, *, timeout: float | None = None, split: str = "eval"
    ) -> dict[str, float]:
        """Take groups of another split, acknowledge them, and return figures to log.

        Offer them by `request` with ``split="eval"`` and a high priority, so that workers take them
        first. No batch is made meanwhile: keep no more prompts for training in the lane than the
        bus has room for, or call this with ``timeout=0`` between steps, for what there is.

        Parameters
        ----------
        groups : int
            How many to take.
        timeout : float, optional
            Seconds to wait for all of them together: None waits for ever, 0 does not wait.
        split : str, default "eval"
            Which.

        Returns
        -------
        dict of str to float
            By names that begin with the split: ``eval/groups``, which is less than asked for where
            the time was over first, and, of what came, ``eval/samples``; ``eval/reward/mean`` and
            ``/std``, and ``/best``, the mean of each group's best sample; ``eval/length/mean`` in
            tokens; ``eval/lag/mean`` and ``/max`` in versions.

        Raises
        ------
        TypeError, ValueError
            `groups` is no int of 1 or more, or as for `take`.
        BusClosedError, BusRemovedError, StallError, DaemonUnavailableError
            As for `take`.

        Examples
        --------
        ::

            for batch in handler:
                train(batch)
                handler.ack(batch)
                if handler.step % 50 == 0:
                    for number, prompt in enumerate(held_out):
                        handler.request(f"e{handler.step}-{number}", group_size=4, split="eval",
                                        priority=7, prompt=prompt)
                    wandb.log(handler.evaluate(len(held_out), timeout=600), step=handler.step)
        """
        groups = check_int("groups", groups)
        check_timeout(timeout)
        if groups < 1:
            raise ValueError(f"groups: expected 1 or more, got {groups}")
        deadline = None if timeout is None else time.monotonic() + timeout
        rewards: list[list[float]] = []
        lengths: list[int] = []
        versions: list[int] = []
        while len(rewards) < groups:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            wanted = min(_AT_ONCE, groups - len(rewards))
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
        return _figures(split, rewards, lengths, versions, self._consumer.policy_version)


def _figures(
    split: str, rewards: list[list[float]], lengths: list[int], versions: list[int], now: int
) -> dict[str, float]:
    figures = {"groups": float(len(rewards)), "samples": float(len(versions))}
    if rewards:
        every = np.array([reward for group in rewards for reward in group])
        lags = now - np.array(versions)
        figures["reward/mean"] = float(every.mean())
        figures["reward/std"] = float(every.std())
        figures["reward/best"] = float(np.mean([max(group) for group in rewards]))
        figures["lag/mean"] = float(lags.mean())
        figures["lag/max"] = float(lags.max())
    if lengths:
        figures["length/mean"] = float(np.mean(lengths))
    return {f"{split}/{name}": value for name, value in figures.items()}
