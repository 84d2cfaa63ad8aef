"""A sink: puts what it was assigned onto a trainer's bus, each record once, whoever dies.

Invariants:

- A record is on the bus only if it is in the journal: as settled, or in the intent with the lane's
  counter before it, which tells how many of the intent are there.
- The journal forgets a record only when its source has said that it does not hold it any more.
- A group that was begun is put to its end here, by this sink or its successor.
- What is put next is what was asked for first; what is asked for meanwhile is bounded.
- It takes assignments of the newest coordinator only, and those that were meant for itself.
- It takes an answer of a source only for the block for which it asked: a late one, of a block that
  was put or given back, would have a record put once more that came again as an assignment.
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

#: Bytes that are fetched at a time: groups are put together until they are as many. What one core's
#: cache holds is checked and put without coming from memory again.
BLOCK_BYTES = 4 << 20

#: Blocks under way at a time: one is put, one crosses the network, and one its sources copy.
BLOCKS_UNDER_WAY = 3

#: The reason of a release on put: what becomes of the record is not known to its source.
RELAYED = "relayed"

#: Records that are fetched at a time, as many as one release ends.
BLOCK_RECORDS = 16_384

#: Older than any announcement: of a bus that has gone, none will come.
_LONG_AGO: Mark = (-1, -1)


class Journal(NamedTuple):
    """What of a sink outlives it: a row in the segment of its bus, written as one."""

    #: On the bus; their sources may hold them too.
    settled: frozenset[Origin] = frozenset()
    #: What is being put, in this order.
    intent: tuple[Origin, ...] = ()
    #: Commits of the lane before the first of those.
    before: int = 0
    #: Those of `settled` that their sources may let go, with the reason.
    ended: frozenset[tuple[Origin, str]] = frozenset()


class Batch(NamedTuple):
    """Groups whose bytes are asked for together, and put together."""

    #: Their assignments; empty of what an earlier sink has begun.
    groups: tuple[Assignment, ...]
    #: Their records, in the order in which they are put.
    origins: tuple[Origin, ...]
    #: Under which they are asked for; no other block of this sink has it.
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
        #: What the journal says, which is written as one, and before anything that it vouches for.
        self.settled: set[Origin] = set(journal.settled)
        self.intent = journal.intent
        self.before = journal.before
        #: Of `settled`, what was dropped and never put, or has ended under an earlier sink.
        self.dropped: dict[Origin, str] = dict(journal.ended)
        #: Of `settled`, why their sources may let them go.
        self.ended: dict[Origin, str] = {}
        if release == "put":
            self.ended = dict.fromkeys(journal.settled, RELAYED)
        self.ended.update(journal.ended)
        #: Assignments that were taken and not begun, in order.
        self.waiting: list[Assignment] = []
        self._waiting_bytes = 0
        #: Those whose bytes are asked for, in the order in which they are put.
        self.batches: list[Batch] = []
        #: What of them is missing still.
        self.wanted: set[Origin] = set()
        #: What it has taken on and not put: of `intent`, `batches` and `waiting`.
        self.owed: set[Origin] = set(journal.intent)
        self._gone: dict[Origin, Mark] = {}
        #: Of the last block.
        self._number = 0
        self._block_bytes = block_bytes
        self._block_records = block_records
        #: Put for sources that have gone, and not ended: nobody is to be told of their end, but a
        #: record on the bus names its entry of the journal.
        self.left_behind: set[Origin] = set()

    @property
    def journal(self) -> Journal:
        """What its row must say."""
        ended = frozenset(self.dropped.items())
        return Journal(frozenset(self.settled), self.intent, self.before, ended)

    # -- what the coordinator says ---------------------------------------------------------------

    def begin(self) -> list[Message]:
        """Say what there is, and go on with what an earlier sink had begun."""
        return [self._state(), *self._next()]

    def _state(self) -> SinkState:
        settled, owed = frozenset(self.settled), frozenset(self.owed)
        return SinkState(self.name, self.incarnation, self.term, settled, owed)

    def tell(self, message: SinkStateWanted) -> list[Message]:
        """Say what there is to a coordinator, unless it has a successor already."""
        if message.term < self.term:
            return []
        self.term = message.term
        return [self._state()]

    def is_meant(self, message: Assignment | Drop) -> bool:
        """Whether it is for this sink, by its coordinator, and about nothing that it has."""
        if (message.incarnation, message.term) != (self.incarnation, self.term):
            return False
        return self.owed.isdisjoint(message.origins) and self.settled.isdisjoint(message.origins)

    def assign(self, message: Assignment) -> list[Message]:
        """Take on a group, unless another sink or coordinator was meant."""
        return self.assign_all([message])

    def assign_all(self, messages: Iterable[Assignment]) -> list[Message]:
        """Take on several groups likewise, each by itself; what they make is fetched together."""
        before = len(self.waiting)
        for message in messages:
            if self.is_meant(message):
                self.waiting.append(message)
                self._waiting_bytes += message.nbytes
                self.owed.update(message.origins)
        return self._next() if len(self.waiting) > before else []

    def drop(self, message: Drop) -> list[Message]:
        """Have sources let a group go; the caller has written down that it is dropped."""
        if not self.is_meant(message):
            return []
        origins = frozenset(message.origins)
        self.settled |= origins
        self.dropped.update(dict.fromkeys(origins, message.reason))
        return [Settled(self.name, origins), *self.end(origins, message.reason)]

    # -- blocks of groups, a few under way at a time ---------------------------------------------

    @property
    def fetching(self) -> tuple[Origin, ...]:
        """What is put next, once all of it is here."""
        return self.batches[0].origins if self.batches else ()

    def _next(self) -> list[Message]:
        """Ask for the bytes of what was begun, and of as many groups as may be under way."""
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
        # Beside another one only a whole block is worth its transfer; more groups may come.
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
        # Of one bus behind each other: what is put then lies so in its block.
        origins = tuple(chain.from_iterable([sorted(group.origins) for group in groups]))
        return self._make_batch(groups, origins)

    def _wait(self, groups: list[Assignment]) -> None:
        """Let these be what waits, in this order."""
        self.waiting = groups
        self._waiting_bytes = sum(group.nbytes for group in groups)

    def _fetch(self, origins: Collection[Origin], number: int) -> list[Message]:
        return [
            Fetch(bus, self.name, self.incarnation, tuple(theirs), number)
            for bus, theirs in by_bus(origins)
        ]

    def ask_again(self) -> list[Message]:
        """Ask for what is missing, after an answer was lost."""
        said: list[Message] = []
        for batch in self.batches:
            missing = [origin for origin in batch.origins if origin in self.wanted]
            said += self._fetch(missing, batch.number)
        return said

    def asked_by(self, message: Fetched) -> Batch | None:
        """Return for what a message is an answer: None where it is for another sink, or put."""
        if message.incarnation != self.incarnation:
            return None
        return next((each for each in self.batches if each.number == message.number), None)

    def fetched(self, message: Fetched) -> list[Message]:
        """Take an answer. With a block's last one it can be put, or some of it is given back."""
        if self.asked_by(message) is None:
            return []
        gone = self.wanted.intersection(message.gone)
        self._gone.update(dict.fromkeys(gone, message.mark))
        self.wanted.difference_update(message.origins, gone)
        return self._give_back() if self._gone else []

    def _give_back(self) -> list[Message]:
        """Give back groups of which nobody holds a part, once all about their block is known."""
        said: list[Message] = []
        for batch in list(self.batches):
            gone = {origin: self._gone[origin] for origin in batch.origins if origin in self._gone}
            if gone and self.wanted.isdisjoint(batch.origins):
                said += self._give_back_of(batch, gone)
        return [*said, *self._next()]

    def _give_back_of(self, batch: Batch, gone: dict[Origin, Mark]) -> list[Message]:
        """Give back what of a block cannot be put. What was begun goes on without that part."""
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
        """Whether it has got less to fetch than may be under way."""
        return len(self.batches) < BLOCKS_UNDER_WAY

    @property
    def ready(self) -> bool:
        """Whether all bytes of the next groups are there."""
        return bool(self.batches) and self.wanted.isdisjoint(self.fetching)

    def intend(self, committed: int) -> None:
        """Have the next groups be the intent, which is in the segment before the first is put."""
        assert self.ready
        self.intent, self.before = self.fetching, committed

    def settle(self) -> list[Message]:
        """All of the intent is on the bus, and the caller writes the journal that this leaves."""
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
        """Have sources let go of these: the trainer is done with them, or need not be."""
        self.ended.update(dict.fromkeys(origins, reason))
        return [
            Release(bus, self.name, frozenset(theirs), reason) for bus, theirs in by_bus(origins)
        ]

    def ask_release_again(self, waited: Iterable[Origin] | None = None) -> list[Message]:
        """Ask once more for what no source has confirmed; of these only, where they are given."""
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
        """Forget a source that will not come back: no answer of it can be awaited."""
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
