"""A source: says what its bus holds, hands it out, and lets it go when it is told to.

Invariants:

- It knows nothing that is not in its ring, but the number of its last announcement.
- No announcement that is made after a release names what was released.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

from shmbus.relay.messages import (
    Announcement,
    Fetch,
    Fetched,
    Mark,
    Message,
    Release,
    Released,
    Subscription,
)
from shmbus.relay.origins import Origin
from shmbus_ext import _core


def _pack_heads(held: Mapping[Origin, Any]) -> bytes:
    return _core.pack_heads(held.values())


class Source:
    """The relay's side at a rollout node's bus."""

    def __init__(
        self,
        bus: str,
        incarnation: int,
        read: Callable[[Mapping[Origin, Any]], bytes] = _pack_heads,
    ) -> None:
        self.bus = bus
        self.incarnation = incarnation
        self.number = 0
        self.asked = (0, 0)
        self.held: dict[Origin, Any] = {}
        self._read = read

    @property
    def mark(self) -> Mark:
        """Where its announcements have come to."""
        return (self.incarnation, self.number)

    def begin(self, found: Mapping[Origin, Any]) -> list[Message]:
        """Take all that the ring has, and announce it as all there is."""
        self.held.update(found)
        return [self._announce(self.held, whole=True)]

    def poll(self, new: Mapping[Origin, Any]) -> list[Message]:
        """Take what has come since, and announce it."""
        self.held.update(new)
        return [self._announce(new, whole=False)] if new else []

    def _announce(self, what: Mapping[Origin, Any], *, whole: bool) -> Announcement:
        self.number += 1
        return Announcement(self.bus, self.mark, whole, self._read(what), self.asked)

    def subscribe(self, message: Subscription) -> list[Message]:
        """Announce all that is held to a coordinator that has missed something."""
        self.asked = max(self.asked, (message.term, message.question))
        return [self._announce(self.held, whole=True)]

    def fetch(self, message: Fetch) -> list[Message]:
        """Say which of the records it holds; whoever calls this adds their bytes."""
        here = message.origins
        gone: tuple[Origin, ...] = ()
        if not self.held.keys() >= set(here):
            here = tuple(origin for origin in message.origins if origin in self.held)
            gone = tuple(origin for origin in message.origins if origin not in self.held)
        return [Fetched(message.sink, message.incarnation, here, gone, self.mark, message.number)]

    def release(self, message: Release) -> list[Message]:
        """Let records go, once or again; the caller has released them in the ring."""
        deque(map(self.held.pop, message.origins, repeat(None)), maxlen=0)
        return [Released(self.bus, message.sink, message.origins, self.mark)]
