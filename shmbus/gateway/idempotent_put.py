"""Idempotent puts into the bus: a POST waits while the bus is full, and a body is put once.

A client with a lost answer sends its body again, without a mark. The bytes of a body identify it
from before its first group until its answer's delivery, in the journal too, for a successor.

Invariants:

- A body answered with 200 is whole in the bus.
- Bodies are put one after another, in order of arrival: no body starves.
- A body with a lost answer is never put twice, not even by a successor. Equal bodies with delivered
  answers are different groups.
- A group is put atomically, so a journal entry counts groups.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import shmbus
from shmbus.gateway import settings
from shmbus.gateway.journal import KEY_BYTES, Journal, JournalEntry
from shmbus.http.access import Refusal
from shmbus.inspect.dump import inspect

logger = logging.getLogger(__name__)

#: Seconds between two checks of a held body's client.
_ALIVE_S: Final = 1.0
#: Bytes of a record beside its arrays and meta: header, schema, shapes, padding.
_RECORD_BYTES: Final = 256

#: A group, in the form of `Producer.put_group`.
Samples = list[dict[str, Any]]


def key_of(body: bytes | bytearray | memoryview) -> bytes:
    """Return the digest that identifies a body."""
    return hashlib.blake2b(body, digest_size=KEY_BYTES).digest()


class Body:
    """A body: the names of its groups, and the number already put."""

    def __init__(self, key: bytes, producer_id: int, first: int, count: int) -> None:
        self.key = key
        self.producer_id = producer_id
        self.first = first
        self.count = count
        #: Groups in the bus.
        self.done = 0
        #: The journal entry's number, while the entry exists.
        self.entry: int | None = None
        self.lost_s = 0.0

    @property
    def whole(self) -> bool:
        """True if every group is in the bus."""
        return self.done == self.count

    def id_of(self, number: int) -> str:
        """Return a group's key on the bus."""
        return f"http-{self.producer_id}-{self.first + number}"


class IdempotentPut:
    """Puts bodies into a bus, each once."""

    def __init__(self, bus: shmbus.Bus, journal: Journal, hold_s: float) -> None:
        self._bus = bus
        self._journal = journal
        self._hold_s = hold_s
        #: Bodies with lost answers, the oldest first.
        self._lost: dict[bytes, Body] = {}
        self._turn = asyncio.Lock()
        self._next = 0
        self.holding = 0
        self.repeated = 0
        # Read before a new producer, perhaps our own, takes the dead gateway's slot.
        committed = _committed_by(bus.name)
        self.producer = shmbus.Producer(bus.name, label="shmbus gateway", on_stall=None)
        #: Commits of the slot before this producer.
        self._committed_before = _committed_by(bus.name).get(self.producer.producer_id, 0)
        self._recover(committed)

    def _recover(self, committed: dict[int, int]) -> None:
        """Take over a predecessor's bodies, including a last group put before its death."""
        keys: set[str] | None = None
        for number, entry in self._journal.entries:
            body = Body(entry.key, entry.producer_id, entry.first, entry.groups)
            body.entry = number
            body.lost_s = time.monotonic()
            self._lost[body.key] = body
            body.done = entry.done
            if body.whole:
                continue
            if entry.mark and committed.get(body.producer_id, 0) >= entry.mark:
                body.done += 1
            else:
                keys = _keys_in(self._bus.name) if keys is None else keys
                there = (body.id_of(at) in keys for at in range(body.done, body.count))
                body.done += sum(itertools.takewhile(bool, there))
            # The next successor needs the progress too: by then the group may be gone.
            self._write(body)

    # -- a body ---------------------------------------------------------------------------------

    def body_of(self, key: bytes, count: int) -> Body:
        """Return the known body of a repeated request, or a new body."""
        body = self._lost.pop(key, None)
        if body is not None:
            self.repeated += 1
            return body
        body = Body(key, self.producer.producer_id, self._next, count)
        self._next += count
        return body

    async def put(
        self, body: Body, groups: Sequence[Samples], deadline_s: float, alive: Callable[[], bool]
    ) -> None:
        """Put the missing groups of a body, while the client is `alive`."""
        if body.whole:
            return
        self.holding += 1
        try:
            for samples in groups:
                if _bytes_of(samples) > self._bus.record_limit:
                    raise self._too_large()
            await self._acquire(deadline_s)
            try:
                if not body.done and not alive():
                    raise ConnectionResetError("the client went while its groups were held")
                self._write(body, self._mark(body))
                while not body.whole:
                    await self._put_group(body, groups[body.done], deadline_s, alive)
                    body.done += 1
                    self._write(body, self._mark(body))
            finally:
                self._turn.release()
        except BaseException:
            if body.done:
                # The client sends the body again: the missing groups follow then, after other
                # bodies.
                self._write(body)
                self.lost(body)
            else:
                self.delivered(body)
            raise
        finally:
            self.holding -= 1

    async def _acquire(self, deadline_s: float) -> None:
        left = max(0.0, deadline_s - time.monotonic())
        try:
            await asyncio.wait_for(self._turn.acquire(), left)
        except asyncio.TimeoutError:
            raise self._full() from None

    async def _put_group(
        self, body: Body, samples: Samples, deadline_s: float, alive: Callable[[], bool]
    ) -> None:
        while samples:
            left = max(0.0, deadline_s - time.monotonic())
            try:
                await self.producer.aput_group(
                    body.id_of(body.done), samples, timeout=min(left, _ALIVE_S)
                )
                return
            except shmbus.BusFullError as error:
                if not body.done and not alive():
                    raise ConnectionResetError(
                        "the client went while its groups were held"
                    ) from error
                if not left:
                    raise self._full() from error
            except shmbus.RecordTooLargeError as error:
                raise self._too_large() from error
            except (TypeError, ValueError) as error:
                raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error

    def _too_large(self) -> Refusal:
        return Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"a group: expected at most {self._bus.record_limit} bytes, a quarter of bus "
            f"{self._bus.name!r}, got more; create the bus with a larger capacity",
        )

    def _full(self) -> Refusal:
        paused = self._bus.paused
        why = "is paused" + (f" ({paused})" if paused else "") if paused is not None else "is full"
        return Refusal(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"bus {self._bus.name!r}: expected room within {self._hold_s:g} s, but it "
            f"{why}; nothing was lost: send the group again once the trainer has taken batches, or "
            "create the bus with a larger capacity (one batch must fit, and what environments send "
            "meanwhile)",
        )

    # -- the journal ----------------------------------------------------------------------------

    def _mark(self, body: Body) -> int:
        """Return the slot's commits after the put of the next group."""
        if body.whole or body.producer_id != self.producer.producer_id:
            return 0
        return self._committed_before + self.producer.stats().committed + 1

    def _write(self, body: Body, mark: int = 0) -> None:
        """Tell a successor the progress of a body."""
        entry = JournalEntry(body.count, body.key, body.producer_id, body.first, body.done, mark)
        if body.entry is not None:
            self._journal.write_entry(body.entry, entry)
            return
        body.entry = self._journal.open_entry(entry)
        if body.entry is None and self._lost:
            self._forget_oldest()
            body.entry = self._journal.open_entry(entry)

    def delivered(self, body: Body) -> None:
        """Note the answer's delivery: an equal body counts as new."""
        if body.entry is not None:
            self._journal.close_entry(body.entry)
            body.entry = None

    def lost(self, body: Body) -> None:
        """Note the lost answer: the client sends the body again."""
        body.lost_s = time.monotonic()
        self._lost[body.key] = body

    def forget_old(self) -> None:
        """Forget bodies not repeated within RETRY_S."""
        before_s = time.monotonic() - settings.RETRY_S
        while self._lost and next(iter(self._lost.values())).lost_s < before_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self.delivered(self._lost.pop(next(iter(self._lost))))

    def close(self) -> None:
        """Leave the bus."""
        self.producer.close()


def _committed_by(bus: str) -> dict[int, int]:
    """Return each slot's committed records, by the producer's number.

    A producer dead in the middle of a commit is left out: its commit is decided later.
    """
    slots = inspect(bus, limit=0).slots
    return {slot.producer_id: slot.committed for slot in slots if not slot.commit_under_way}


def _keys_in(bus: str) -> set[str]:
    """Return the keys of groups with a sample in the bus, including groups already read."""
    records = inspect(bus, limit=sys.maxsize).records
    return {each.instance_id for each in records if each.state in ("committed", "released")}


def _bytes_of(samples: Samples) -> int:
    """Return about how many bytes samples need in the ring, without their metas."""
    return sum(
        _RECORD_BYTES + sum(value.nbytes for value in sample.values() if hasattr(value, "nbytes"))
        for sample in samples
    )
