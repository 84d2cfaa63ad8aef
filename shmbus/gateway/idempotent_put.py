"""Idempotent puts into the bus: a POST waits while the bus is full, and a body is put once.

A client with a lost answer sends its body again, without a mark. A digest of the body identifies
the repeat until the answer's delivery, in the journal too, for a successor. Digest and round name
the groups on the bus: the collector drops a group that was put twice as surplus.

Invariants:

- A body answered with 200 is whole in the bus; a refused body leaves no part there.
- Bodies are put one after another, in order of arrival: no body starves.
- The groups of a body with a lost answer keep their round, also under a successor. Equal bodies
  with delivered answers have different rounds: different groups.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import shmbus
from shmbus.gateway import settings
from shmbus.gateway.journal import KEY_BYTES, Journal, JournalEntry
from shmbus.http.access import Refusal

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

    def __init__(self, key: bytes, round: int, count: int) -> None:
        self.key = key
        self.round = round
        self.count = count
        #: Groups in the bus; True if the bus may have the next group too.
        self.done = 0
        self.in_doubt = False
        #: The journal entry's number, while the entry exists.
        self.entry: int | None = None
        self.lost_s = 0.0

    @property
    def whole(self) -> bool:
        """True if every group is in the bus."""
        return self.done == self.count

    def id_of(self, number: int) -> str:
        """Return a group's key on the bus."""
        return f"http-{self.key.hex()}-{number}"


class IdempotentPut:
    """Puts bodies into a bus, each once."""

    def __init__(self, bus: shmbus.Bus, journal: Journal, hold_s: float) -> None:
        self._bus = bus
        self._journal = journal
        self._hold_s = hold_s
        #: Bodies with lost answers, the oldest first.
        self._lost: dict[bytes, Body] = {}
        self._turn = asyncio.Lock()
        self.holding = 0
        self.repeated = 0
        self.producer = shmbus.Producer(bus.name, label="shmbus gateway", on_stall=None)
        for number, entry in journal.entries:
            body = Body(entry.key, entry.round, entry.groups)
            body.done, body.entry, body.in_doubt = entry.done, number, True
            self.settle(body, False)

    # -- a body ---------------------------------------------------------------------------------

    async def put(
        self, key: bytes, groups: Sequence[Samples], deadline_s: float, alive: Callable[[], bool]
    ) -> Body:
        """Put the missing groups of the body with this key, while the client is `alive`."""
        known = self._lost.get(key)
        if known is not None and known.whole:
            return self._body_of(key, known.count)
        for samples in groups:
            if _bytes_of(samples) > self._bus.record_limit:
                raise self._too_large()
        self.holding += 1
        try:
            await self._acquire(deadline_s)
            try:
                # In turn: an equal body before this one was put and answered, or is lost.
                body = self._body_of(key, len(groups))
                self._check(body, groups)
                await self._put(body, groups, deadline_s, alive)
                return body
            finally:
                self._turn.release()
        finally:
            self.holding -= 1

    def _body_of(self, key: bytes, count: int) -> Body:
        body = self._lost.pop(key, None)
        if body is None:
            return Body(key, self.producer.next_round(), count)
        self.repeated += 1
        return body

    async def _put(
        self, body: Body, groups: Sequence[Samples], deadline_s: float, alive: Callable[[], bool]
    ) -> None:
        try:
            if not body.done and not alive():
                raise ConnectionResetError("the client went while its groups were held")
            self._write(body)
            while not body.whole:
                await self._put_group(body, groups[body.done], deadline_s, alive)
                body.done += 1
                body.in_doubt = False
                self._write(body)
        except BaseException as error:
            body.in_doubt |= not isinstance(error, (Refusal, ConnectionResetError))
            self.settle(body, not (body.done or body.in_doubt))
            raise

    def _check(self, body: Body, groups: Sequence[Samples]) -> None:
        """Refuse a body before its first put if the bus would refuse a later group."""
        if body.done or len(groups) < 2:
            return
        try:
            for number, samples in enumerate(groups):
                if samples:
                    self.producer.check_group(body.id_of(number), samples, round=body.round)
        except shmbus.RecordTooLargeError as error:
            raise self._too_large() from error
        except (TypeError, ValueError) as error:
            raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error

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
                    body.id_of(body.done),
                    samples,
                    round=body.round,
                    timeout=min(left, _ALIVE_S),
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

    def _write(self, body: Body) -> None:
        """Tell a successor the progress of a body."""
        entry = JournalEntry(body.count, body.done, body.key, body.round)
        if body.entry is not None:
            self._journal.write_entry(body.entry, entry)
            return
        body.entry = self._journal.open_entry(entry)
        if body.entry is None and self._lost:
            self._forget_oldest()
            body.entry = self._journal.open_entry(entry)

    def settle(self, body: Body, delivered: bool) -> None:
        """Note an answer's fate: after a delivery an equal body counts as new."""
        if not delivered:
            # The client sends the body again: missing groups follow then.
            body.lost_s = time.monotonic()
            self._lost[body.key] = body
        elif body.entry is not None:
            self._journal.close_entry(body.entry)
            body.entry = None

    def forget_old(self) -> None:
        """Forget bodies not repeated within RETRY_S."""
        before_s = time.monotonic() - settings.RETRY_S
        while self._lost and next(iter(self._lost.values())).lost_s < before_s:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self.settle(self._lost.pop(next(iter(self._lost))), True)

    def close(self) -> None:
        """Leave the bus."""
        self.producer.close()


def _bytes_of(samples: Samples) -> int:
    """Return about how many bytes samples need in the ring, without their metas."""
    return sum(
        _RECORD_BYTES + sum(value.nbytes for value in sample.values() if hasattr(value, "nbytes"))
        for sample in samples
    )
