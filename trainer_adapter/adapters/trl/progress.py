"""Account of trained rows, kept from TRL's calls on each row.

TRL's collator iterates over the metrics of each row once, while making a micro-batch, and the
batcher takes at least one row between two micro-batches. So each unbroken run of marks is one
micro-batch, and after n micro-batches the rows of the first n runs are trained. Accelerate's
look-ahead only makes runs early.

Invariants:

- A row is trained after the end of its micro-batch, never at its hand-out.
- A row dropped by TRL is known as dropped after a later row's hand-out and a new micro-batch: TRL's
  batchers hold back at most the last row.
- A group ends after the training or drop of every row, in this run or before a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

import msgspec

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
