"""The groups held by TRL's async trainer: from the hand-out of a row to the acknowledgement.

TRL's collator iterates over the metrics of each row once, while making a micro-batch, and the
batcher takes at least one row between two micro-batches. So each unbroken run of marks is one
micro-batch, and after n micro-batches the rows of the first n runs are trained. Accelerate's
look-ahead only makes runs early. A checkpoint's record lists the unacknowledged rows already
trained into its weights, in ``trainer_state.json``, the last file of a checkpoint.

Invariants:

- A row is trained after the end of its micro-batch, never at its hand-out, and a row in a
  checkpoint's weights is never handed out again.
- A row dropped by TRL is known as dropped after a later row's hand-out and a new micro-batch: TRL's
  batchers hold back at most the last row.
- A group ends, and may be acknowledged, once each of its rows is trained, dropped, or known from a
  checkpoint; with saves, after the save of a checkpoint with the group.
- A row of a record is recognised by producer id, sequence and row, unique on a bus, and only on the
  same bus. The row stays listed until its next delivery, or until enough newer groups prove an
  earlier acknowledgement.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

import shmbus
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

#: Producer id, sequence and row: unique on a bus for ever.
Identity = tuple[int, int, int]

RowState = Literal["handed", "packed", "trained", "dropped", "known"]


class OpenGroup(msgspec.Struct, eq=False):
    """A leased group with rows at the trainer."""

    #: The group, acknowledged in the end.
    lease: object
    rows: list[Row] = []
    #: Rows neither trained nor dropped nor known.
    open_rows: int = 0

    def add(self, identity: Identity, index: int, *, known: bool) -> Row:
        """Add a row."""
        row = Row(self, identity, index, "known" if known else "handed")
        self.rows.append(row)
        self.open_rows += not known
        return row

    @property
    def was_trained(self) -> bool:
        """True if a row was trained, now or before a checkpoint."""
        return any(row.state in ("trained", "known") for row in self.rows)


class Row(msgspec.Struct, eq=False):
    """One token row of a sample on its way through the trainer."""

    group: OpenGroup
    identity: Identity
    index: int
    state: RowState


class RowMetrics(dict[str, float]):
    """The metrics of a row, as TRL's RolloutSample has them; iteration marks the row as packed."""

    __slots__ = ("_account", "row")

    def __init__(self, values: dict[str, float], account: Account, row: Row) -> None:
        super().__init__(values)
        self._account = account
        self.row = row

    def __iter__(self) -> Iterator[str]:
        self._account.pack(self.row)
        return super().__iter__()


class Account:
    """Rows between their handing out and the end of their groups."""

    def __init__(self) -> None:
        #: Micro-batches finished by the trainer.
        self.finished = 0
        #: Packed micro-batches, including the current one.
        self.packed = 0
        self._handed: deque[Row] = deque()
        self._last: Row | None = None
        self._run: list[Row] = []
        self._runs: deque[list[Row]] = deque()

    def hand_out(self, row: Row) -> list[OpenGroup]:
        """Note a row on its way to the trainer."""
        ended = self._close_run() if self._run else []
        self._handed.append(row)
        self._last = row
        return ended

    def pack(self, row: Row) -> None:
        """Note a row in the current micro-batch."""
        if row.state == "handed":
            row.state = "packed"
            if not self._run:
                self.packed += 1
            self._run.append(row)

    def finish(self, micro_batches: int) -> list[OpenGroup]:
        """Note finished micro-batches of the trainer."""
        ended = self._close_run() if self._run else []
        while micro_batches > 0 and self._runs:
            micro_batches -= 1
            self.finished += 1
            ended += self._end_rows(self._runs.popleft(), "trained")
        return ended

    def _close_run(self) -> list[OpenGroup]:
        self._runs.append(self._run)
        self._run = []
        dropped = [row for row in self._handed if row.state == "handed" and row is not self._last]
        self._handed.clear()
        if self._last is not None and self._last.state == "handed":
            self._handed.append(self._last)
        return self._end_rows(dropped, "dropped")

    def _end_rows(self, rows: list[Row], state: RowState) -> list[OpenGroup]:
        ended = []
        for row in rows:
            row.state = state
            row.group.open_rows -= 1
            if row.group.open_rows == 0:
                ended.append(row.group)
        return ended


#: Format version of the saved state.
_VERSION: Final = 1
#: Newer groups after which a row without a second delivery counts as acknowledged. A bus delivers
#: groups in order of completion; lanes cannot mix up this many.
FORGET_AFTER_GROUPS: Final = 4096

_CHECKPOINT: Final = re.compile(r"checkpoint-(\d+)")
_STATE_FILE: Final = "trainer_state.json"


def last_whole_checkpoint(output_dir: str | Path) -> str | None:
    """Find the newest complete checkpoint.

    A trainer killed during a save leaves a folder without its last file. Transformers takes such a
    folder for a checkpoint, and begins at step 0 with its weights.

    Parameters
    ----------
    output_dir : path
        The trainer's.

    Returns
    -------
    str or None
        For ``trainer.train(resume_from_checkpoint=...)``; None without a checkpoint.
    """
    found: list[tuple[int, Path]] = []
    for path in Path(output_dir).glob("checkpoint-*"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match is None:
            continue
        try:
            json.loads((path / _STATE_FILE).read_text())
        except (OSError, ValueError):
            continue
        found.append((int(match[1]), path))
    return str(max(found)[1]) if found else None


class TrainedRows:
    """Rows trained before a checkpoint and possibly delivered again."""

    def __init__(self, created: int) -> None:
        #: Creation time of the rows' bus: it tells buses of one name apart.
        self.created: Final = created
        self._waiting: dict[Identity, tuple[str, int | None, int]] = {}
        self._newer_groups = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, identity: Identity) -> bool:
        """Remove a row from the list; return False for an unlisted row."""
        return self._waiting.pop(identity, None) is not None

    def note_group(self, known: bool) -> None:
        """Note a delivered group, with a known row or without."""
        self._newer_groups = 0 if known else self._newer_groups + 1
        if self._newer_groups >= FORGET_AFTER_GROUPS:
            self._waiting.clear()

    def save(self, bus: str, version: int, behind: bool, groups: list[OpenGroup]) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        rows: list[list[Any]] = [[*where, *identity] for identity, where in self._waiting.items()]
        for group in groups:
            lease: Any = group.lease
            rows += [
                [lease.instance_id, lease.round, row.index, *row.identity]
                for row in group.rows
                if row.state in ("trained", "known")
            ]
        return {
            "version": _VERSION,
            "bus": bus,
            "created": self.created,
            "policy_version": version,
            "behind": behind,
            "trained": rows,
        }

    def load(self, saved: dict[str, Any]) -> bool:
        """Take over a checkpoint's record."""
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"checkpoint: expected the bus's state in form {_VERSION}, got "
                f"{saved.get('version')!r}; resume with the version of shmbus that saved it"
            )
        if saved["created"] != self.created:
            return False
        for instance_id, round, index, *identity in saved["trained"]:
            producer, sequence, row = identity
            self._waiting[producer, sequence, row] = (instance_id, round, index)
        return True


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
