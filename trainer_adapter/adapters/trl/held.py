"""The groups held by TRL's async trainer: incoming rows, and groups ready for acknowledgement.

Invariants:

- A group may be acknowledged once each of its rows is trained, dropped, or known from a checkpoint;
  with saves, after the save of a checkpoint with the group.
- A row in a checkpoint's weights is never handed out again.
"""

from __future__ import annotations

import time
from typing import Any

import shmbus
from trainer_adapter.adapters.trl.checkpoints import TrainedRows
from trainer_adapter.adapters.trl.progress import Account, OpenGroup, Row, RowMetrics
from trainer_adapter.adapters.trl.rows import read_rows
from trainer_adapter.adapters.trl.samples import (
    Advantages,
    Expected,
    advantages_of,
    check_size,
    messages_of,
    metrics_of,
    rewards_of,
)
from trainer_adapter.adapters.trl.stack import versions


def open_within(bus: str, lag: int | None, options: dict[str, Any]) -> shmbus.Consumer:
    """Open a consumer without groups older than TRL's limit."""
    own = {} if lag is None else {"max_policy_lag": lag}
    try:
        return shmbus.Consumer(bus, **{**own, **options})
    except ValueError:
        if lag is None or "max_policy_lag" in options:
            raise
        # A daemon sets its own limit; TRL skips groups beyond TRL's.
        return shmbus.Consumer(bus, **options)


class HeldGroups:
    """Groups taken and not yet acknowledged."""

    def __init__(self) -> None:
        #: A checkpoint's record of the bus.
        self.trained = TrainedRows(0)
        self._account = Account()
        self._open: dict[int, OpenGroup] = {}
        self._numbers = 0
        self._ended: list[OpenGroup] = []
        self._at_save: list[OpenGroup] = []
        self._packed_before = 0

    def hint(self, *, at_save: bool) -> str:
        """Return a silent bus's message part about rows waiting for a save."""
        held = sum(len(group.rows) for group in self._open.values())
        if not (at_save and held):
            return ""
        return (
            f"; {held} rows wait for the next save: make the bus hold a whole save interval, or "
            'save more often, or take acknowledge="version"'
        )

    def open(
        self,
        group: shmbus.Group,
        expected: Expected,
        advantages: Advantages,
        sample_type: Any,
        offset: int,
    ) -> tuple[list[Any], OpenGroup]:
        """Make TRL's samples of a group's rows."""
        check_size(group, expected)
        arrays = read_rows(group, expected)
        rewards, zeroed = rewards_of(group)
        values, std = advantages_of(rewards, zeroed, advantages)
        number = self._numbers
        self._numbers += 1
        opened = OpenGroup(group)
        clock_s = time.time() - time.monotonic_ns() / 1e9
        made = []
        known = False
        for t, rows, reward, advantage in zip(
            group, arrays, rewards.tolist(), values.tolist(), strict=True
        ):
            meta = t.meta
            if not isinstance(meta, dict):
                meta = {}
            for place, row in enumerate(rows):
                if len(rows) > 1 and not row.completion_mask.any():
                    continue  # as TRL's own worker: a fork without a sampled token is no row
                identity = (t.producer_id, t.sequence, place)
                if self.trained.take(identity):
                    opened.add(identity, t.index, known=True)
                    known = True
                    continue
                account = opened.add(identity, t.index, known=False)
                made.append(
                    sample_type(
                        prompt=messages_of(meta.get("prompt")),
                        completion=messages_of(meta.get("completion")),
                        input_ids=row.input_ids,
                        completion_mask=row.completion_mask,
                        old_log_probs=row.old_log_probs,
                        advantage=advantage,
                        model_version=t.policy_version - offset,
                        group_id=number,
                        metrics=RowMetrics(metrics_of(meta, reward, std), self._account, account),
                        enqueued_at=clock_s + t.committed_ns / 1e9,
                    )
                )
        self.trained.note_group(known=known)
        self._open[id(opened)] = opened
        return made, opened

    def hand_out(self, row: Row) -> None:
        """Note a row on its way to the trainer."""
        self._ended += self._account.hand_out(row)

    def finish(self, micro_batches: int) -> int:
        """Note finished micro-batches of the trainer."""
        before = self._account.finished
        self._ended += self._account.finish(micro_batches)
        return self._account.finished - before

    def finish_all(self, micro_batches: int) -> None:
        """Note a finished step."""
        finished = self.finish(micro_batches)
        if finished < micro_batches:
            raise RuntimeError(
                f"TRL finished {micro_batches} micro-batches, and its collator has read the "
                f"metrics of {finished}: this version works in another way than the tested one: "
                f"{versions()}. Nothing of this step is acknowledged; resume with the tested "
                "version"
            )

    def finish_packed_before(self) -> None:
        """Finish the micro-batches packed before the previous call."""
        self.finish(self._packed_before - self._account.finished)
        self._packed_before = self._account.packed

    def take_ended(self) -> list[OpenGroup]:
        """Return the groups ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def save(self, bus: str, version: int, behind: bool) -> dict[str, Any]:
        """Return the state for a checkpoint; its save acknowledges the groups ended by now."""
        self._at_save = list(self._ended)
        return self.trained.save(bus, version, behind, list(self._open.values()))

    def take_saved(self) -> list[OpenGroup]:
        """Return the groups ended before the checkpoint just saved."""
        ended, self._at_save = self._at_save, []
        saved = {id(group) for group in ended}
        self._ended = [each for each in self._ended if id(each) not in saved]
        return ended

    def acknowledge(self, consumer: shmbus.Consumer, groups: list[OpenGroup]) -> None:
        """End the leases of groups."""
        if not groups:
            return
        trained: list[Any] = [group.lease for group in groups if group.was_trained]
        dropped: list[Any] = [group.lease for group in groups if not group.was_trained]
        consumer.ack(trained)
        if dropped:
            consumer.drop(dropped)
        for group in groups:
            self._open.pop(id(group), None)
