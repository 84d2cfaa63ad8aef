"""A source: says what its bus holds, hands it out, and lets it go when it is told to.

Invariants:

- It knows nothing that is not in its ring, but the number of its last announcement.
- No announcement that is made after a release names what was released.
"""

from __future__ import annotations

from collections.abc import Iterable

from shmbus import RecordHead
from shmbus.relay.messages import (
    Announcement,
    Fetch,
    Fetched,
    Mark,
    Message,
    Origin,
    Release,
    Released,
    Subscription,
)

__all__ = ["Source"]


class Source:
    """The relay's side at a rollout node's bus.

    Parameters
    ----------
    bus : str
        The identity of the bus.
    incarnation : int
        Greater than that of any earlier source of this bus.
    """

    def __init__(self, bus: str, incarnation: int) -> None:
        self.bus = bus
        self.incarnation = incarnation
        self.number = 0
        self.asked = (0, 0)
        self.held: dict[Origin, RecordHead] = {}

    @property
    def mark(self) -> Mark:
        """Where its announcements have come to."""
        return (self.incarnation, self.number)

    def begin(self, heads: Iterable[RecordHead]) -> list[Message]:
        """Take the heads of all that the ring has, and announce them as all there is."""
        self._take(heads)
        return [self._announce(tuple(self.held.values()), whole=True)]

    def poll(self, heads: Iterable[RecordHead]) -> list[Message]:
        """Take heads that have come since, and announce them."""
        new = self._take(heads)
        return [self._announce(new, whole=False)] if new else []

    def _take(self, heads: Iterable[RecordHead]) -> tuple[RecordHead, ...]:
        new = tuple(heads)
        self.held.update(((self.bus, *head.id), head) for head in new)
        return new

    def _announce(self, heads: tuple[RecordHead, ...], *, whole: bool) -> Announcement:
        self.number += 1
        return Announcement(self.bus, self.mark, whole, heads, self.asked)

    def subscribe(self, message: Subscription) -> list[Message]:
        """Announce all that is held to a coordinator that has missed something."""
        self.asked = max(self.asked, (message.epoch, message.question))
        return [self._announce(tuple(self.held.values()), whole=True)]

    def fetch(self, message: Fetch) -> list[Message]:
        """Say which of the records it holds; whoever calls this adds their bytes."""
        here = tuple(origin for origin in message.origins if origin in self.held)
        gone = tuple(origin for origin in message.origins if origin not in self.held)
        return [Fetched(message.sink, message.incarnation, here, gone, self.mark)]

    def release(self, message: Release) -> list[Message]:
        """Let records go, once or again; the caller has released them in the ring."""
        for origin in message.origins:
            self.held.pop(origin, None)
        return [Released(self.bus, message.sink, message.origins, self.mark)]
