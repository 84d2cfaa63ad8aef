"""Asking producers for samples again: the collector's side of the table of wanted samples.

The table lies in the segment, so asking costs a producer no call to anybody, works with and
without a daemon, and outlives either side: a request is the collector's, a claim the producer's,
and each is put right by who finds the other dead.

Invariants
----------
- A row asks for what the stash wants; what is settled is withdrawn before the next look at the
  ring.
- A claim counts as a failed attempt only when the producer that has it is dead, and all that it
  committed has been read; one that leaves in order has put it back.
- What an earlier collector asked for is taken over where its failure is found again, with the count
  of its attempts; the rest is withdrawn once the ring has been read to its end.
"""

from __future__ import annotations

from collections.abc import Hashable

from shmbus.stash.failures import Request
from shmbus.stash.stash import Stash
from shmbus_ext import _core

__all__ = ["Retries", "split_key"]

_At = tuple[Hashable, int]


def split_key(key: Hashable) -> tuple[str, int | None]:
    """Instance id and epoch of a group's key."""
    return key if isinstance(key, tuple) else (str(key), None)


class Retries:
    """Writes what the stash wants into the table, and watches over who has taken it.

    Parameters
    ----------
    segment : Segment
        Of which this process is the collector.
    stash : Stash
        Whose failures are asked for again.
    """

    def __init__(self, segment: _core.Segment, stash: Stash[_core.Trajectory]) -> None:
        self._segment = segment
        self._stash = stash
        self._failures = stash.failures
        self._rows: dict[int, Request] = {}
        self._row_of: dict[_At, int] = {}
        self._taken_over: dict[_At, tuple[int, int]] = {}
        self._free: list[int] = []
        #: Producers that died with a claim, by row; counted once the ring is read to its end.
        self._dead: dict[int, int] = {}
        _, self._failed_before = _core.retry_noted(segment)
        self._begin()

    def _begin(self) -> None:
        """Keep what producers have claimed, and how often anything was asked for; free the rest."""
        claimed: set[int] = set()
        requests = _core.retry_requests(self._segment)
        for row, _, claimant, id_, epoch, _, index, attempt, _, _ in requests:
            at = (id_ if epoch is None else (id_, epoch), index)
            self._failures.before[at] = attempt
            if claimant:
                self._taken_over[at] = (row, attempt)
                claimed.add(row)
        for row in range(_core.RETRY_ENTRIES - 1, -1, -1):
            if row not in claimed:
                _core.retry_withdraw(self._segment, row)
                self._free.append(row)
        self._failures.dirty = bool(self._failures.before)

    def look_for_dead(self) -> None:
        """Look whether those who took something live, for a later update; after a sweep."""
        if not self._rows:
            return
        # In this order: who is in the table is in a slot by then, or has left it.
        claims = {row: claimant - 1 for row, _, claimant, *_ in _core.retry_requests(self._segment)}
        rows = self._segment.producers()
        alive = {row[2] for row in rows if row[1] == _core.SLOT_ACTIVE}
        self._dead = {row: id_ for row, id_ in claims.items() if id_ >= 0 and id_ not in alive}
        if self._dead:
            self._failures.dirty = True

    def update(self, now_s: float, *, drained: bool) -> None:
        """Bring the table to what the stash wants. `drained`: all that was committed is read."""
        failures = self._failures
        failures.dirty = False
        if self._dead and drained:
            self._count_the_dead(now_s)
        for at, row in list(self._row_of.items()):
            if failures.requests.get(at) is not self._rows[row]:
                del self._row_of[at], self._rows[row]
                self._withdraw(row)
        for at, request in failures.requests.items():
            if at not in self._row_of:
                if not self._free and not self._taken_over:
                    break  # the next that is settled makes room
                self._ask(at, request, now_s)
        if drained:
            for row, _ in self._taken_over.values():
                self._withdraw(row)
            self._taken_over.clear()
            failures.before.clear()
        # What is left to do waits for the ring to be read to its end.
        failures.dirty = bool(self._dead or failures.before)
        failed = self._failed_before + self._stash.given_up
        _core.retry_note(self._segment, len(self._rows), failed)

    def _withdraw(self, row: int) -> None:
        _core.retry_withdraw(self._segment, row)
        self._free.append(row)

    def _ask(self, at: _At, request: Request, now_s: float) -> None:
        row, attempt = self._taken_over.pop(at, (-1, 0))
        if row >= 0 and attempt != request.attempt:
            self._withdraw(row)
            row = -1
        if row < 0:
            if not self._free:
                return
            row = self._free.pop()
            self._publish(row, request)
        self._rows[row] = request
        self._row_of[at] = row
        self._failures.publish(request, now_s)

    def _publish(self, row: int, request: Request) -> None:
        id_, epoch = split_key(request.key)
        _core.retry_publish(
            self._segment,
            row,
            # Grows over collectors too, so that no claim is for another request than was seen.
            _core.monotonic_ns(),
            id_,
            _core.NO_EPOCH if epoch is None else epoch,
            request.group_size,
            request.index,
            request.attempt,
            _cut(request.reason),
        )

    def _count_the_dead(self, now_s: float) -> None:
        """Count claims of the dead: each was seen dead before the ring was read to its end."""
        for row, _, claimant, *_ in _core.retry_requests(self._segment):
            request = self._rows.get(row)
            # One that left in order has put it back since.
            if request is not None and self._dead.get(row) == claimant - 1:
                self._stash.lost(request, f"producer {claimant - 1} died while it had it", now_s)
        self._dead.clear()


def _cut(reason: str) -> bytes:
    """As many bytes of UTF-8 as a row has room for, whole characters."""
    encoded = reason.encode("utf-8", "replace")[: _core.RETRY_REASON_BYTES]
    return encoded.decode("utf-8", "ignore").encode()
