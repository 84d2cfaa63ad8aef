"""Groups into the bus: a POST is held while the bus is full, and a body is put once.

A client whose answer was lost sends its body again, and nothing in it says so. So a body is known
by its bytes from its first record until its answer was delivered, in the journal too, where a
successor finds it.

Invariants:

- What was answered 200 is in the bus, whole.
- Bodies are put one after the other, in the order in which they came, so that none starves.
- A body whose answer was lost is put no second time, also by a successor. Equal bodies whose
  answers were delivered are different groups.
- A group of which some records are in the bus is completed, or reported as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from isal import isal_zlib

import shmbus
from shmbus.gateway import settings
from shmbus.gateway.journal import PUT, PUTTING, BodyKey, Journal, JournalEntry
from shmbus.gateway.recovery import committed_by
from shmbus.http.access import Refusal

__all__ = ["Body", "IdempotentPut", "key_of"]

logger = logging.getLogger(__name__)

#: Seconds between two looks whether the client of a held body is there still.
_LOOK_S: Final = 1.0
#: Seconds between two tries, where there is room that no record can have.
_RETRY_PAUSE_S: Final = 0.01
#: Bytes of a record beside its arrays and meta: header, schema, shapes, padding.
_RECORD_BYTES: Final = 1024

#: The part of a bus that one group may need: a batch has several, and others wait beside it.
_GROUP_PART: Final = 0.5

Records = list[dict[str, Any]]


def key_of(body: bytes | bytearray | memoryview) -> BodyKey:
    """Return what tells a body from others."""
    return BodyKey(len(body), isal_zlib.crc32(body), isal_zlib.adler32(body))


class Body:
    """A body that is put, or was.

    Attributes
    ----------
    key : BodyKey
        Of its bytes.
    producer_id, first, count : int
        What its groups are called, and how many they are.
    done : int
        Groups that are in the bus, whole.
    accepted : int
        Records of the next one that are.
    """

    def __init__(self, key: BodyKey, producer_id: int, first: int, count: int) -> None:
        self.key = key
        self.producer_id = producer_id
        self.first = first
        self.count = count
        self.done = 0
        self.accepted = 0
        self.open_sizes: list[int] = []
        self.entry: int | None = None
        self.lost_s = 0.0
        #: Whether a predecessor died while it put this body.
        self.inherited = False
        #: How many of its groups were not seen complete since.
        self.unseen = 0
        #: How many records of the group after `done` the predecessor had put, at least.
        self.put_before = 0

    @property
    def whole(self) -> bool:
        """Whether all of its groups are in the bus."""
        return self.done == self.count

    def id_of(self, number: int, kind: str) -> str:
        """Return the key of one of its groups on the bus."""
        return f"{kind}-{self.producer_id}-{self.first + number}"


class IdempotentPut:
    """Puts bodies into one bus.

    Parameters
    ----------
    bus : Bus
        The bus.
    producer : Producer
        This gateway's.
    journal : Journal
        The journal.
    hold_s : float
        Seconds that a body waits for room.
    committed : mapping of int to int
        Of `committed_by`, from before this gateway's producer was there.
    """

    def __init__(
        self,
        bus: shmbus.Bus,
        producer: shmbus.Producer,
        journal: Journal,
        hold_s: float,
        committed: Mapping[int, int],
    ) -> None:
        self._bus = bus
        self._producer = producer
        self._journal = journal
        self._hold_s = hold_s
        #: What its slot had committed before this producer had it.
        self._committed_before = committed_by(bus.name).get(producer.producer_id, 0)
        self._turn = asyncio.Lock()
        self._next = 0
        #: Bodies whose answers were lost, the oldest first.
        self._lost: dict[BodyKey, Body] = {}
        #: Groups that a predecessor had begun to put, and that were not seen complete.
        self._awaited: dict[str, Body] = {}
        self.holding = 0
        self.repeated = 0
        now = time.monotonic()
        for number, entry in journal.entries:
            body = Body(entry.key, entry.producer_id, entry.first, entry.groups)
            body.entry = number
            body.lost_s = now
            body.inherited = entry.state == PUTTING
            body.done = entry.done if body.inherited else body.count
            self._lost[entry.key] = body
            if body.inherited:
                if entry.mark and entry.producer_id in committed:
                    body.put_before = committed[entry.producer_id] - (entry.mark - 1)
                body.unseen = body.count - body.done
                for at in range(body.done, body.count):
                    keys = (body.id_of(at, kind) for kind in ("atropos", "slime"))
                    self._awaited |= dict.fromkeys(keys, body)

    # -- a body ---------------------------------------------------------------------------------

    def known(self, key: BodyKey) -> Body | None:
        """Return a body whose answer was lost, as this one comes again."""
        body = self._lost.pop(key, None)
        if body is not None:
            self.repeated += 1
        return body

    def awaited(self, body: Body) -> list[str]:
        """Return the keys of its groups that a predecessor may have put, of both kinds."""
        keys = (body.id_of(at, kind) for at in range(body.count) for kind in ("atropos", "slime"))
        return [key for key in keys if key in self._awaited]

    def new(self, key: BodyKey, count: int) -> Body:
        """Return a body that was not there before."""
        body = Body(key, self._producer.producer_id, self._next, count)
        self._next += count
        return body

    async def put(
        self, body: Body, groups: Sequence[Records], deadline_s: float, alive: Callable[[], bool]
    ) -> None:
        """Put what is not in the bus yet.

        Parameters
        ----------
        body : Body
            Of `known` or `new`.
        groups : sequence of list of dict
            The records of each group.
        deadline_s : float
            Until when this may wait for room, by `time.monotonic`.
        alive : callable
            Whether the client waits still.

        Raises
        ------
        Refusal
            There was no room in time, or never will be.
        ConnectionResetError
            The client went before anything was put.
        """
        if body.whole:
            return
        body.open_sizes = [len(records) for records in groups]
        for records in groups:
            self._require_possible(body.key, records)
        self.holding += 1
        try:
            await self._acquire(deadline_s)
            try:
                await self._put_all(body, groups, deadline_s, alive)
            finally:
                self._turn.release()
        except BaseException:
            if body.done or body.accepted or body.inherited:
                # The client sends it again: what is missing follows then, after other bodies.
                self._note_put(body)
                self.lost(body)
            else:
                self._close_entry(body)
            raise
        finally:
            self.holding -= 1

    async def _acquire(self, deadline_s: float) -> None:
        if self.holding == 1:
            # Nobody else has it, or waits for it.
            await self._turn.acquire()
            return
        left = max(0.0, deadline_s - time.monotonic())
        try:
            await asyncio.wait_for(self._turn.acquire(), left)
        except asyncio.TimeoutError:
            raise self._full() from None

    async def _put_all(
        self,
        body: Body,
        groups: Sequence[Records],
        deadline_s: float,
        alive: Callable[[], bool],
    ) -> None:
        if not alive() and not (body.done or body.accepted):
            raise ConnectionResetError("the client went while its groups were held")
        self._open_entry(body)
        while body.done < body.count:
            records = groups[body.done]
            if not self._was_put(body, records):
                await self._put_group(body, records, deadline_s, alive)
            body.done += 1
            body.accepted = 0
            self._note_put(body, self._mark(body))

    def _open_entry(self, body: Body) -> None:
        if body.entry is not None:
            self._note_put(body, self._mark(body))
            return
        entry = _entry_of(body, self._mark(body))
        body.entry = self._journal.open_entry(entry)
        if body.entry is None:
            self._forget_oldest()
            body.entry = self._journal.open_entry(_entry_of(body, self._mark(body)))

    def _was_put(self, body: Body, records: Records) -> bool:
        """Whether a predecessor had put all of the next group."""
        if not body.inherited or not records:
            return False
        known = body.put_before >= len(records)
        body.put_before = 0
        return known or records[0]["instance_id"] not in self._awaited

    def _mark(self, body: Body) -> int:
        """Return what tells a successor which records of a body were committed after its note."""
        if body.whole or body.producer_id != self._producer.producer_id:
            return 0
        return self._committed_before + self._producer.stats().committed + 1

    def _note_put(self, body: Body, mark: int = 0) -> None:
        """Tell a successor how much of a body is in the bus."""
        if body.entry is not None:
            self._journal.write_entry(body.entry, _entry_of(body, mark))

    async def _put_group(
        self, body: Body, records: Records, deadline_s: float, alive: Callable[[], bool]
    ) -> None:
        while body.accepted < len(records):
            left = records[body.accepted :]
            if await self._room_for(_bytes_of(left), deadline_s):
                try:
                    self._producer.put_many(left, timeout=0)
                    return
                except shmbus.BusFullError as error:
                    body.accepted += error.accepted
                    await asyncio.sleep(_RETRY_PAUSE_S)
                except shmbus.RecordTooLargeError as error:
                    raise Refusal(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"one sequence is too long: {error}"
                    ) from error
                except (TypeError, ValueError) as error:
                    raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
                except (shmbus.BusRemovedError, shmbus.BusClosedError) as error:
                    raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
            begun = body.done or body.accepted
            if not begun and not alive():
                raise ConnectionResetError("the client went while its groups were held")
            if time.monotonic() >= deadline_s:
                raise self._full()

    async def _room_for(self, count: int, deadline_s: float) -> bool:
        """Wait a little for room; whether there is some."""
        # As the fill below which so many bytes are free; no group needs more than a part.
        below = 1.0 - count / self._bus.capacity
        if self._producer.pressure() < below:
            return True
        wait_s = min(_LOOK_S, max(0.0, deadline_s - time.monotonic()))
        return await self._producer.wait_ready(below, timeout=wait_s)

    def _require_possible(self, key: BodyKey, records: Records) -> None:
        most = int(self._bus.capacity * _GROUP_PART)
        limit = self._bus.record_limit
        # What arrays do not show: only a large body can have a meta that matters.
        with_meta = key.length > limit // 2
        for record in records:
            count = _bytes_of([record])
            if with_meta and "meta" in record:
                count += len(msgspec.msgpack.encode(record["meta"]))
            if count > limit:
                raise Refusal(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"one sequence: expected at most {limit} bytes, a quarter of bus "
                    f"{self._bus.name!r}, got about {count}; create the bus with a larger capacity",
                )
        count = _bytes_of(records)
        if count > most:
            raise Refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a group: expected at most {most} bytes, half of bus {self._bus.name!r}, got "
                f"about {count}; create the bus with a larger capacity",
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

    # -- answers --------------------------------------------------------------------------------

    def delivered(self, body: Body) -> None:
        """Note that the client has its answer: an equal body is another one."""
        self._close_entry(body)

    def lost(self, body: Body) -> None:
        """Note that the client does not have its answer: it sends the body again."""
        body.lost_s = time.monotonic()
        self._lost[body.key] = body

    def _close_entry(self, body: Body) -> None:
        if body.entry is not None:
            self._journal.close_entry(body.entry)
            body.entry = None

    # -- what nobody sent again -----------------------------------------------------------------

    def seen(self, instance_id: str) -> None:
        """Note that a group is complete, which a predecessor had begun."""
        body = self._awaited.pop(instance_id, None)
        if body is None:
            return
        body.unseen -= 1
        if not body.unseen:
            # The next successor must know it too: by then the group may be gone.
            body.done, body.inherited = body.count, False
            self._note_put(body)

    async def forget_old(self) -> None:
        """Forget bodies that were not sent again for RETRY_S."""
        before = time.monotonic() - settings.RETRY_S
        # While a body is put, nothing else is: its mark counts what is committed.
        while self._lost and not self._turn.locked():
            body = next(iter(self._lost.values()))
            if body.lost_s > before:
                return
            self._forget_oldest()
            await asyncio.sleep(0)

    def _forget_oldest(self) -> None:
        if not self._lost:
            return
        body = self._lost.pop(next(iter(self._lost)))
        self._close_entry(body)
        if body.accepted and body.open_sizes:
            size = body.open_sizes[body.done]
            instance_id = body.id_of(body.done, "atropos")
            logger.warning(
                "group %r was not sent again: it is given up", instance_id,
                extra={"bus": self._bus.name, "records": body.accepted, "group_size": size},
            )  # fmt: skip
            for index in range(body.accepted, size):
                with contextlib.suppress(shmbus.BusFullError):
                    self._producer.fail(
                        instance_id,
                        index,
                        "its group was not sent again",
                        group_size=size,
                        timeout=0,
                    )


def _entry_of(body: Body, mark: int) -> JournalEntry:
    state = PUT if body.whole else PUTTING
    return JournalEntry(state, body.count, body.key, body.producer_id, body.first, body.done, mark)


def _bytes_of(records: Records) -> int:
    """Return about how many bytes records need in the ring."""
    return sum(
        _RECORD_BYTES + sum(value.nbytes for value in record.values() if hasattr(value, "nbytes"))
        for record in records
    )
