"""What sources, the coordinator and sinks say to each other.

Messages may be late, lost with whoever sent or awaited them, and overtake each other. Whoever takes
one judges it by its numbers alone:

- An announcement by (incarnation, number): only growing ones are taken.
- What a coordinator says by its epoch, and what is said to a sink by that sink's incarnation.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from shmbus import RecordHead

__all__ = [
    "Announcement",
    "Assignment",
    "Confirmation",
    "Fetch",
    "Fetched",
    "Mark",
    "Message",
    "Origin",
    "Release",
    "Released",
    "Returned",
    "Settled",
    "SinkState",
    "SinkStateWanted",
    "Subscription",
]

#: A record among all buses: the bus's identity, producer id and sequence.
Origin: TypeAlias = tuple[str, int, int]

#: Where a source's announcements have come to: its incarnation, and the number of the last one.
Mark: TypeAlias = tuple[int, int]


class Subscription(NamedTuple):
    """A coordinator to a source: announce all that you hold."""

    bus: str


class Announcement(NamedTuple):
    """A source to the coordinator: heads of what it holds.

    `whole` says that it holds nothing else; otherwise they are what came since the one before.
    """

    bus: str
    mark: Mark
    whole: bool
    heads: tuple[RecordHead, ...]


class SinkStateWanted(NamedTuple):
    """A coordinator to a sink: say what you have, and take no assignment of an earlier epoch."""

    sink: str
    epoch: int


class SinkState(NamedTuple):
    """A sink to the coordinator, as an answer or since it has just begun.

    `settled` are on its bus, and their source has not said that it released them. `owed` it has
    taken on and will put.
    """

    sink: str
    incarnation: int
    epoch: int
    settled: frozenset[Origin]
    owed: frozenset[Origin]


class Assignment(NamedTuple):
    """The coordinator to a sink: put these, in this order."""

    sink: str
    incarnation: int
    epoch: int
    origins: tuple[Origin, ...]


class Fetch(NamedTuple):
    """A sink to a source: send these records."""

    bus: str
    sink: str
    incarnation: int
    origins: tuple[Origin, ...]


class Fetched(NamedTuple):
    """The source's answer: those that it holds. `gone` had left after the announcement `mark`."""

    sink: str
    incarnation: int
    origins: tuple[Origin, ...]
    gone: tuple[Origin, ...]
    mark: Mark


class Returned(NamedTuple):
    """A sink to the coordinator: `gone` had gone at their source after its announcement `mark`.

    `rest` was assigned with them, and is not put.
    """

    sink: str
    gone: frozenset[tuple[Origin, Mark]]
    rest: frozenset[Origin]


class Settled(NamedTuple):
    """A sink to the coordinator: these are on its bus, and in its journal."""

    sink: str
    origins: frozenset[Origin]


class Release(NamedTuple):
    """To a source: these may go, for this reason of its ledger. `sink` is who wants an answer."""

    bus: str
    sink: str
    origins: frozenset[Origin]
    reason: str


class Released(NamedTuple):
    """The source's answer: they have gone, and `mark` was its last announcement by then."""

    bus: str
    sink: str
    origins: frozenset[Origin]
    mark: Mark


class Confirmation(NamedTuple):
    """A sink to the coordinator: their source has released them, after the announcement `mark`."""

    bus: str
    origins: frozenset[Origin]
    mark: Mark


Message: TypeAlias = (
    Subscription
    | Announcement
    | SinkStateWanted
    | SinkState
    | Assignment
    | Fetch
    | Fetched
    | Returned
    | Settled
    | Release
    | Released
    | Confirmation
)
