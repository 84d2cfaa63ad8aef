"""A sink: puts what it was assigned onto a trainer's bus, each record once, whoever dies.

Invariants:

- A record is on the bus only if it is in the journal: as settled, or in the intent with the lane's
  counter before it, which tells how many of the intent are there.
- The journal forgets a record only when its source has said that it does not hold it any more.
- A group that was begun is put to its end here, by this sink or its successor.
- It takes assignments of the newest coordinator only, and those that were meant for itself.
"""

from __future__ import annotations

from typing import NamedTuple

from shmbus.relay.messages import (
    Assignment,
    Confirmation,
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
)

__all__ = ["Journal", "Sink"]


class Journal(NamedTuple):
    """What of a sink outlives it: a row in the segment of its bus, written as one.

    Attributes
    ----------
    settled : frozenset
        On the bus; their sources may hold them too.
    intent : tuple
        What is being put, in this order.
    before : int
        Commits of the lane before the first of those.
    """

    settled: frozenset[Origin] = frozenset()
    intent: tuple[Origin, ...] = ()
    before: int = 0

    def healed(self, committed: int) -> Journal:
        """Return what it says once the lane is nobody's: which part of the intent is on the bus."""
        done = self.intent[: committed - self.before]
        rest = self.intent[len(done) :]
        return Journal(self.settled.union(done), rest, self.before + len(done))


class Sink:
    """The relay's side at a trainer's bus.

    Parameters
    ----------
    name : str
        Its name among all sinks.
    incarnation : int
        Greater than that of any earlier sink of this name.
    journal : Journal
        What an earlier one has left, healed.
    release : "acknowledged" | "put"
        When a source lets go: once the trainer is done with a record, or once it is on the bus.
    """

    def __init__(
        self, name: str, incarnation: int, journal: Journal, release: str = "acknowledged"
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.journal = journal
        self.epoch = -1
        self.release_on = release
        #: Assignments that were taken and not begun, in order.
        self.waiting: list[tuple[Origin, ...]] = []
        #: The one whose bytes are being fetched: what is missing still.
        self.wanted: set[Origin] = set()
        self.fetching: tuple[Origin, ...] = ()
        self._gone: dict[Origin, Mark] = {}
        #: Settled, and the trainer is done with them.
        self.ended: set[Origin] = set(journal.settled) if release == "put" else set()

    # -- what the coordinator says ---------------------------------------------------------------

    @property
    def owed(self) -> frozenset[Origin]:
        """What it has taken on and not put."""
        return frozenset(self.journal.intent).union(self.fetching, *self.waiting)

    def begin(self) -> list[Message]:
        """Say what there is, and go on with what an earlier sink had begun."""
        return [self._state(), *self._next()]

    def _state(self) -> SinkState:
        return SinkState(self.name, self.incarnation, self.epoch, self.journal.settled, self.owed)

    def tell(self, message: SinkStateWanted) -> list[Message]:
        """Say what there is to a coordinator, unless it has a successor already."""
        if message.epoch < self.epoch:
            return []
        self.epoch = message.epoch
        return [self._state()]

    def assign(self, message: Assignment) -> list[Message]:
        """Take on a group, unless another sink or coordinator was meant."""
        if (message.incarnation, message.epoch) != (self.incarnation, self.epoch):
            return []
        if self.owed.union(self.journal.settled).intersection(message.origins):
            return []
        self.waiting.append(message.origins)
        return self._next()

    # -- one group at a time ---------------------------------------------------------------------

    def _next(self) -> list[Message]:
        """Ask for the bytes of what was begun, else of the next group."""
        if self.fetching:
            return []
        if self.journal.intent:
            self.fetching = self.journal.intent
        elif self.waiting:
            self.fetching = self.waiting.pop(0)
        self.wanted = set(self.fetching)
        self._gone = {}
        return self.ask_again()

    def ask_again(self) -> list[Message]:
        """Ask for what is missing: at first, and after an answer was lost."""
        buses = sorted({origin[0] for origin in self.wanted})
        return [
            Fetch(
                bus,
                self.name,
                self.incarnation,
                tuple(each for each in self.fetching if each in self.wanted and each[0] == bus),
            )
            for bus in buses
        ]

    def fetched(self, message: Fetched) -> list[Message]:
        """Take an answer. With the last one the group can be put, or is given back."""
        if message.incarnation != self.incarnation:
            return []
        here = self.wanted.intersection(message.origins)
        gone = self.wanted.intersection(message.gone)
        self._gone.update(dict.fromkeys(gone, message.mark))
        self.wanted -= here | gone
        if not self.fetching or self.wanted or not self._gone:
            return []
        return self._give_back()

    def _give_back(self) -> list[Message]:
        """Nobody holds a part of the group. One that was begun goes on without that part."""
        gone = frozenset(self._gone.items())
        rest = tuple(origin for origin in self.fetching if origin not in self._gone)
        if self.journal.intent:
            self.journal = self.journal._replace(intent=rest)
            self.fetching = rest
            self._gone = {}
            said: list[Message] = [Returned(self.name, gone, frozenset())]
            return said if rest else [*said, *self._next()]
        self.fetching = ()
        self._gone = {}
        return [Returned(self.name, gone, frozenset(rest)), *self._next()]

    @property
    def ready(self) -> bool:
        """Whether all bytes of a group are there."""
        return bool(self.fetching) and not self.wanted and not self._gone

    def intend(self, committed: int) -> Journal:
        """Return the journal that must be in the segment before the group's first record is put.

        Parameters
        ----------
        committed : int
            Commits of the lane so far.
        """
        assert self.ready
        self.journal = Journal(self.journal.settled, self.fetching, committed)
        return self.journal

    def settle(self) -> list[Message]:
        """All of the intent is on the bus, and the caller writes the journal that this leaves."""
        origins = frozenset(self.journal.intent)
        self.journal = Journal(self.journal.settled | origins)
        self.fetching = ()
        said: list[Message] = [Settled(self.name, origins)]
        if self.release_on == "put":
            said += self.end(origins)
        return [*said, *self._next()]

    # -- letting go ------------------------------------------------------------------------------

    def end(self, origins: frozenset[Origin], reason: str = "acknowledged") -> list[Message]:
        """Have sources let go of these: the trainer is done with them, or need not be."""
        self.ended |= origins
        return [
            Release(bus, self.name, frozenset(o for o in origins if o[0] == bus), reason)
            for bus in sorted({origin[0] for origin in origins})
        ]

    def ask_release_again(self) -> list[Message]:
        """Ask once more for what no source has confirmed."""
        return self.end(frozenset(self.ended & self.journal.settled))

    def released(self, message: Released) -> list[Message]:
        """Forget what a source holds no more; the caller writes the journal first."""
        gone = self.journal.settled & message.origins
        if not gone:
            return []
        self.journal = self.journal._replace(settled=self.journal.settled - gone)
        self.ended -= gone
        return [Confirmation(message.bus, gone, message.mark)]
