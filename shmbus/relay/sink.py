"""A sink: puts its assignments onto a trainer's bus, each record exactly once despite any death.

Invariants:

- Every record on the bus is in the journal: as settled, or in the intent. The intent stores the
  lane's counter before its first record, and so tells how many of its records were put.
- The journal forgets a record only after its source confirmed the release.
- A begun group is put to its end here, by this sink or its successor.
- Puts follow the order of fetches; fetches under way are bounded.
- The sink takes only assignments of the newest coordinator, addressed to its incarnation.
- The sink takes a source's answer only for a fetched block still waiting. A late answer, for a
  block put or given back, would put a reassigned record twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import chain, repeat
from typing import NamedTuple

from shmbus.relay.messages import (
    Assignment,
    Confirmation,
    Drop,
    Fetch,
    Fetched,
    Mark,
    Message,
    Origin,
    Release,
    Released,
    Returned,
    Settled,
    SinkState,
    SinkStateWanted,
    by_bus,
    is_of,
)

#: Bytes fetched at a time, the limit for combining groups: a block in a core's cache is checked and
#: put without another read from memory.
BLOCK_BYTES = 4 << 20

#: Blocks under way: a block at the put, a block on the network, a block copied by its sources.
BLOCKS_UNDER_WAY = 3

#: The reason of a release on put: the source never learns the record's later fate.
RELAYED = "relayed"

#: Records fetched at a time: the limit of a release.
BLOCK_RECORDS = 16_384

#: Before every announcement: a lost bus sends none.
_LONG_AGO: Mark = (-1, -1)


class Journal(NamedTuple):
    """A sink's durable state: a row in the segment of its bus, written atomically."""

    #: On the bus; their sources may hold them too.
    settled: frozenset[Origin] = frozenset()
    #: The records being put, in this order.
    intent: tuple[Origin, ...] = ()
    #: The lane's commits before the first record of the intent.
    before: int = 0
    #: The settled records free for release at their sources, with the reason.
    ended: frozenset[tuple[Origin, str]] = frozenset()


class Batch(NamedTuple):
    """Groups fetched and put together."""

    #: Their assignments; empty for an earlier sink's intent.
    groups: tuple[Assignment, ...]
    #: Their records, in the order of the put.
    origins: tuple[Origin, ...]
    #: The number of the fetch, unique in this sink.
    number: int


class Sink:
    """The relay's side at a trainer's bus."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        journal: Journal,
        release: str = "acknowledged",
        block_bytes: int = BLOCK_BYTES,
        block_records: int = BLOCK_RECORDS,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.term = -1
        self.release_on = release
        #: The journal's content, written atomically before every act that relies on the entry.
        self.settled: set[Origin] = set(journal.settled)
        self.intent = journal.intent
        self.before = journal.before
        #: Settled records dropped and never put, or ended under an earlier sink.
        self.dropped: dict[Origin, str] = dict(journal.ended)
        #: Of `settled`, why their sources may let them go.
        self.ended: dict[Origin, str] = {}
        if release == "put":
            self.ended = dict.fromkeys(journal.settled, RELAYED)
        self.ended.update(journal.ended)
        #: Accepted assignments not begun, in order.
        self.waiting: list[Assignment] = []
        self._waiting_bytes = 0
        #: Fetched batches, in the order of the put.
        self.batches: list[Batch] = []
        #: Records of these batches still missing.
        self.wanted: set[Origin] = set()
        #: Records accepted and not put: in `intent`, `batches` and `waiting`.
        self.owed: set[Origin] = set(journal.intent)
        self._gone: dict[Origin, Mark] = {}
        #: Of the last block.
        self._number = 0
        self._block_bytes = block_bytes
        self._block_records = block_records
        #: Records put for lost sources, and not ended. No source waits for their end, but a record
        #: on the bus refers to its journal entry.
        self.left_behind: set[Origin] = set()

    # -- coordinator -----------------------------------------------------------------------------

    def begin(self) -> list[Message]:
        """Report the state, and continue an earlier sink's intent."""
        return [self._state(), *self._next()]

    def _state(self) -> SinkState:
        settled, owed = frozenset(self.settled), frozenset(self.owed)
        return SinkState(self.name, self.incarnation, self.term, settled, owed)

    def tell(self, message: SinkStateWanted) -> list[Message]:
        """Report the state to a coordinator, unless a newer coordinator is known."""
        if message.term < self.term:
            return []
        self.term = message.term
        return [self._state()]

    def is_meant(self, message: Assignment | Drop) -> bool:
        """Return True for a message to this sink, by its coordinator, about unknown records."""
        if (message.incarnation, message.term) != (self.incarnation, self.term):
            return False
        return self.owed.isdisjoint(message.origins) and self.settled.isdisjoint(message.origins)

    def assign_all(self, messages: Iterable[Assignment]) -> list[Message]:
        """Take on groups, unless addressed to another sink or sent by another coordinator."""
        before = len(self.waiting)
        for message in messages:
            if self.is_meant(message):
                self.waiting.append(message)
                self._waiting_bytes += message.nbytes
                self.owed.update(message.origins)
        return self._next() if len(self.waiting) > before else []

    def drop(self, message: Drop) -> list[Message]:
        """Have sources release a group; the caller has written the drop down."""
        if not self.is_meant(message):
            return []
        origins = frozenset(message.origins)
        self.settled |= origins
        self.dropped.update(dict.fromkeys(origins, message.reason))
        return [Settled(self.name, origins), *self.end(origins, message.reason)]

    # -- blocks of groups, a few under way at a time ---------------------------------------------

    @property
    def fetching(self) -> tuple[Origin, ...]:
        """The next records to put, once every byte is here."""
        return self.batches[0].origins if self.batches else ()

    def _next(self) -> list[Message]:
        """Fetch begun groups first, then more groups within the limits."""
        said: list[Message] = []
        while (batch := self._next_batch()) is not None:
            self.batches.append(batch)
            self.wanted.update(batch.origins)
            said += self._fetch(batch.origins, batch.number)
        return said

    def _make_batch(self, groups: tuple[Assignment, ...], origins: tuple[Origin, ...]) -> Batch:
        self._number += 1
        return Batch(groups, origins, self._number)

    def _next_batch(self) -> Batch | None:
        if self.intent and not self.batches:
            return self._make_batch((), self.intent)
        if not self.waiting or len(self.batches) >= BLOCKS_UNDER_WAY:
            return None
        # Beside a running fetch only a whole block pays; more groups may come.
        if self.batches and self._waiting_bytes < self._block_bytes:
            return None
        nbytes = count = taken = 0
        for group in self.waiting:
            count += len(group.origins)
            if taken and (nbytes + group.nbytes > self._block_bytes or count > self._block_records):
                break
            nbytes += group.nbytes
            taken += 1
        groups = tuple(self.waiting[:taken])
        del self.waiting[:taken]
        self._waiting_bytes -= nbytes
        # Sorted by bus: records put together then lie together in their block.
        origins = tuple(chain.from_iterable([sorted(group.origins) for group in groups]))
        return self._make_batch(groups, origins)

    def _wait(self, groups: list[Assignment]) -> None:
        """Replace the waiting groups, in this order."""
        self.waiting = groups
        self._waiting_bytes = sum(group.nbytes for group in groups)

    def _fetch(self, origins: Collection[Origin], number: int) -> list[Message]:
        return [
            Fetch(bus, self.name, self.incarnation, tuple(theirs), number)
            for bus, theirs in by_bus(origins)
        ]

    def ask_again(self) -> list[Message]:
        """Fetch missing records again, after a lost answer."""
        said: list[Message] = []
        for batch in self.batches:
            missing = [origin for origin in batch.origins if origin in self.wanted]
            said += self._fetch(missing, batch.number)
        return said

    def asked_by(self, message: Fetched) -> Batch | None:
        """Return the batch of an answer; None for another sink's answer, or a finished batch."""
        if message.incarnation != self.incarnation:
            return None
        return next((each for each in self.batches if each.number == message.number), None)

    def fetched(self, message: Fetched) -> list[Message]:
        """Take an answer. A block's last answer allows its put, or returns a part of the groups."""
        if self.asked_by(message) is None:
            return []
        gone = self.wanted.intersection(message.gone)
        self._gone.update(dict.fromkeys(gone, message.mark))
        self.wanted.difference_update(message.origins, gone)
        return self._give_back() if self._gone else []

    def _give_back(self) -> list[Message]:
        """Give back groups with lost parts, once every answer about their block came."""
        said: list[Message] = []
        for batch in list(self.batches):
            gone = {origin: self._gone[origin] for origin in batch.origins if origin in self._gone}
            if gone and self.wanted.isdisjoint(batch.origins):
                said += self._give_back_of(batch, gone)
        return [*said, *self._next()]

    def _give_back_of(self, batch: Batch, gone: dict[Origin, Mark]) -> list[Message]:
        """Give back the lost part of a block. A begun put goes on without the part."""
        at = self.batches.index(batch)
        for origin in gone:
            del self._gone[origin]
            self.owed.discard(origin)
        marks = frozenset(gone.items())
        if self.intent and at == 0:
            self.intent = tuple(origin for origin in batch.origins if origin not in gone)
            self.batches[:1] = [batch._replace(origins=self.intent)] if self.intent else []
            return [Returned(self.name, marks, frozenset())]
        whole = [group for group in batch.groups if gone.keys().isdisjoint(group.origins)]
        self._wait(whole + self.waiting)
        rest = frozenset(batch.origins).difference(gone, *(group.origins for group in whole))
        self.owed -= rest
        del self.batches[at]
        return [Returned(self.name, marks, rest)]

    @property
    def is_hungry(self) -> bool:
        """True if fewer blocks are under way than allowed."""
        return len(self.batches) < BLOCKS_UNDER_WAY

    @property
    def ready(self) -> bool:
        """True if every byte of the next groups is here."""
        return bool(self.batches) and self.wanted.isdisjoint(self.fetching)

    def intend(self, committed: int) -> None:
        """Make the next groups the intent; the segment holds the intent before the first put."""
        assert self.ready
        self.intent, self.before = self.fetching, committed

    def settle(self) -> list[Message]:
        """Settle the intent, now on the bus; the caller writes the resulting journal."""
        origins = frozenset(self.intent)
        self.settled |= origins
        self.owed -= origins
        self.intent, self.before = (), 0
        del self.batches[0]
        said: list[Message] = [Settled(self.name, origins)]
        if self.release_on == "put":
            said += self.end(origins, RELAYED)
        return [*said, *self._next()]

    # -- letting go ------------------------------------------------------------------------------

    def end(self, origins: frozenset[Origin], reason: str = "acknowledged") -> list[Message]:
        """Have sources release records: the trainer ended them, or does not need them."""
        self.ended.update(dict.fromkeys(origins, reason))
        return [
            Release(bus, self.name, frozenset(theirs), reason) for bus, theirs in by_bus(origins)
        ]

    def ask_release_again(self, waited: Iterable[Origin] | None = None) -> list[Message]:
        """Repeat unconfirmed releases; only of `waited`, if given."""
        by_reason: dict[str, set[Origin]] = {}
        for origin in list(self.ended) if waited is None else waited:
            reason = self.ended.get(origin)
            if reason is not None:
                by_reason.setdefault(reason, set()).add(origin)
        said: list[Message] = []
        for reason in sorted(by_reason):
            said += self.end(frozenset(by_reason[reason]), reason)
        return said

    def released(self, message: Released) -> list[Message]:
        """Forget what a source holds no more; the caller writes the journal first."""
        gone = message.origins & self.settled
        if not gone:
            return []
        self._forget(gone)
        return [Confirmation(message.bus, gone, message.mark)]

    def _forget(self, gone: Collection[Origin]) -> None:
        self.settled.difference_update(gone)
        for of in (self.ended, self.dropped):
            if of:
                deque(map(of.pop, gone, repeat(None)), maxlen=0)

    def bus_gone(self, bus: str) -> list[Message]:
        """Forget a lost source, because no answer of its bus will come."""
        theirs = {origin for origin in self.settled if is_of(origin, bus)}
        self.left_behind |= theirs - self.ended.keys()
        self._forget(theirs)
        lost = [group for group in self.waiting if any(is_of(each, bus) for each in group.origins)]
        self._wait([group for group in self.waiting if group not in lost])
        said: list[Message] = []
        for group in lost:
            self.owed.difference_update(group.origins)
            gone = frozenset((each, _LONG_AGO) for each in group.origins if is_of(each, bus))
            rest = frozenset(group.origins).difference(each for each, _ in gone)
            said.append(Returned(self.name, gone, rest))
        awaited = {origin for origin in self.wanted if is_of(origin, bus)}
        if awaited:
            self._gone.update(dict.fromkeys(awaited, _LONG_AGO))
            self.wanted -= awaited
            said += self._give_back()
        return said
