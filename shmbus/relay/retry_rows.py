"""A source's part of asking again: the coordinator's list as rows of the bus's retry table.

Producers see it as that of their own collector (`Producer.wanted`).

Invariants:

- The table has the samples of the newest list that was taken, and those that an earlier source has
  left, until the first list comes: a claim outlives the source and the coordinator.
- A claim counts as lost only when its producer is dead, and everything that it committed was read.
"""

from __future__ import annotations

from typing import TypeAlias

from shmbus.relay.messages import MissingSample, Unanswered, Wanted
from shmbus_ext import _core

__all__ = ["RetryRows"]

#: What a sample that is asked for is known by, as MissingSample.id says it.
_Id: TypeAlias = tuple[str, int | None, int, int]
_Row: TypeAlias = tuple[int, int, int, str, int | None, int, int, int, int, int, str, int]


class RetryRows:
    """Publishes in a bus what its producers are asked for.

    Parameters
    ----------
    segment : Segment
        The bus, whose records this process reads.
    identity : str
        The bus's.
    """

    def __init__(self, segment: _core.Segment, identity: str) -> None:
        self._segment = segment
        self._bus = identity
        #: Term and number of the newest list.
        self.mark = (0, 0)
        self._rows: dict[_Id, int] = {}
        #: Those whose claimant was found dead, and whose records may not all have been read.
        self._dead: dict[_Id, int] = {}
        for row, _, _, id_, round, split, _, _, index, attempt, _, _ in self._read():
            if split == _core.SPLIT_TRAIN:
                self._rows[id_, round, index, attempt] = row
        taken = set(self._rows.values())
        self._free = [row for row in range(_core.RETRY_ENTRIES - 1, -1, -1) if row not in taken]
        for row in self._free:
            _core.retry_withdraw(segment, row)
        self._note()

    def _read(self) -> list[_Row]:
        return _core.retry_requests(self._segment)

    def _note(self) -> None:
        _, failed = _core.retry_noted(self._segment)
        _core.retry_note(self._segment, len(self._rows), failed)

    def take(self, message: Wanted) -> None:
        """Have producers asked for these samples, and for no others; an older list is ignored.

        Parameters
        ----------
        message : Wanted
            The list.
        """
        mark = (message.term, message.number)
        if mark < self.mark:
            return
        self.mark = mark
        new = {sample.id: sample for sample in message.samples}
        for id_ in self._rows.keys() - new.keys():
            row = self._rows.pop(id_)
            _core.retry_withdraw(self._segment, row)
            self._free.append(row)
        for id_, sample in new.items():
            if id_ not in self._rows and self._free:
                self._rows[id_] = self._publish(sample)
        self._note()

    def _publish(self, sample: MissingSample) -> int:
        row = self._free.pop()
        _core.retry_publish(
            self._segment,
            row,
            # Grows over sources too, so that a claim is always for the request that was seen.
            _core.monotonic_ns(),
            sample.instance_id,
            _core.NO_ROUND if sample.round is None else sample.round,
            _core.SPLIT_TRAIN,
            sample.group_size,
            sample.need,
            sample.index,
            sample.attempt,
            _cut(sample.reason),
        )
        return row

    def check_claimants(self) -> None:
        """Note claims of dead producers. Call it after a sweep, and `lost` after the next read."""
        if not self._rows:
            self._dead = {}
            return
        claims = {row: claimant - 1 for row, _, claimant, *_ in self._read() if claimant}
        alive = {row[2] for row in self._segment.producers() if row[1] == _core.SLOT_ACTIVE}
        self._dead = {
            id_: claims[row]
            for id_, row in self._rows.items()
            if row in claims and claims[row] not in alive
        }

    def lost(self) -> list[Unanswered]:
        """Return what dead producers had; all that was committed before the check was read since.

        Returns
        -------
        list of Unanswered
            The same again with each call, until the coordinator asks for another attempt.
        """
        if not self._dead:
            return []
        said = []
        for _, _, claimant, id_, round, _, size, need, index, attempt, _, _ in self._read():
            if claimant and self._dead.get((id_, round, index, attempt)) == claimant - 1:
                why = f"producer {claimant - 1} died while it had it"
                sample = MissingSample(id_, round, size, need, index, attempt, why)
                said.append(Unanswered(self._bus, sample))
        return said


def _cut(reason: str) -> bytes:
    """Encode a reason as UTF-8, cut between characters to the room of a row."""
    encoded = reason.encode("utf-8", "replace")[: _core.RETRY_REASON_BYTES]
    return encoded.decode("utf-8", "ignore").encode()
