"""Batches that were given to a trainer: which are acknowledged, and which come again. Pure.

The protocols of Atropos and slime have no acknowledgement, so a request for the next batch is taken
as one for those before it, and a registration as the word of a trainer that was started again.

Invariants:

- A batch is ready, being answered, given or ended; it ends only by acknowledgement or `clear`.
- A batch whose answer was not delivered is the next to be answered, with the same groups.
- A batch is acknowledged only after its answer was delivered whole, and another one asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Batch", "Deliveries"]


class Leased(Protocol):
    """What a batch is made of."""

    @property
    def group(self) -> Any:
        """The bus group, leased."""


T = TypeVar("T", bound=Leased)


class Batch(Generic[T]):
    """Groups that go to a trainer together.

    Attributes
    ----------
    parts : list
        What it is made of.
    ids : list of str
        The groups' keys on the bus.
    times : int
        How often it was answered.
    acknowledged : bool
        Whether a request for another one ended it.
    """

    def __init__(self, parts: list[T], ids: list[str] | None = None) -> None:
        self.parts = parts
        self.ids = [part.group.instance_id for part in parts] if ids is None else ids
        self.times = 0
        self.acknowledged = False


class Deliveries(Generic[T]):
    """Batches of one kind.

    Parameters
    ----------
    keep : int
        Batches that stay given, 1 or more: with several trainer processes, one for each.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._ready: deque[Batch[T]] = deque()
        self._answering: list[Batch[T]] = []
        self._given: deque[Batch[T]] = deque()
        #: Whether one was given since the last registration.
        self.answered = False
        #: How often what is ready has changed.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._ready) + len(self._answering) + len(self._given)

    def given_ids(self) -> list[list[str]]:
        """Return the keys of what was given, for a successor."""
        return [batch.ids for batch in self._given]

    def ready_parts(self) -> list[T]:
        """Return what waits to be answered again: no trainer has it."""
        return [part for batch in self._ready for part in batch.parts]

    def due(self) -> list[Batch[T]]:
        """Take out what a request for the next batch acknowledges."""
        found = []
        while len(self._given) >= self._keep:
            found.append(self._given.popleft())
        return found

    def next_ready(self) -> Batch[T] | None:
        """Return a batch that has to be answered again, if there is one."""
        return self._ready[0] if self._ready else None

    def begin(self, batch: Batch[T]) -> None:
        """Note that a batch is being answered."""
        if self._ready and self._ready[0] is batch:
            self._ready.popleft()
            self.changes += 1
        batch.times += 1
        self._answering.append(batch)

    def is_answering(self, batch: Batch[T]) -> bool:
        """Whether a batch is being answered, and was not forgotten meanwhile."""
        return batch in self._answering

    def delivered(self, batch: Batch[T]) -> bool:
        """Note that all of its answer was written; False where it was forgotten meanwhile."""
        if batch not in self._answering:
            return False
        self._answering.remove(batch)
        self._given.append(batch)
        self.answered = True
        return True

    def lost(self, batch: Batch[T]) -> bool:
        """Note that its answer did not reach its trainer; returns whether it comes again."""
        for held in (self._answering, self._given):
            if batch in held:
                held.remove(batch)
                self._ready.appendleft(batch)
                self.changes += 1
                return True
        return False

    def restarted(self) -> int:
        """Have all that was given answered again: the trainer was started anew."""
        count = len(self._given)
        self._ready.extendleft(reversed(self._given))
        self._given.clear()
        self.changes += 1
        self.answered = False
        return count

    def restore(self, ids: list[str]) -> Batch[T]:
        """Take over a batch that a predecessor gave; its parts follow."""
        batch: Batch[T] = Batch([], ids)
        self._given.append(batch)
        self.answered = True
        return batch

    def clear(self) -> list[T]:
        """Forget everything, and return it; what is being answered goes on."""
        batches: Iterable[Batch[T]] = [*self._ready, *self._given, *self._answering]
        found = [part for batch in batches for part in batch.parts]
        self._ready.clear()
        self._given.clear()
        self._answering.clear()
        self.changes += 1
        self.answered = False
        return found
