"""What the coordinator knows of a sink, and what may be placed on it.

Invariant: `bytes` is what `leases` weigh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shmbus.relay.origin_head import OriginHead
from shmbus.relay.origins import Origin
from shmbus_ext._core import GroupEntry

__all__ = ["SinkView", "choose_dropper", "journal_parts"]

#: More than any bus takes.
_ALL = 1 << 30


class SinkView(msgspec.Struct):
    """What the coordinator knows of a sink."""

    incarnation: int = -1
    heard: bool = False
    #: Bytes that are assigned and not put, and those of all groups that were placed here; the
    #: latter count as at most a window behind those of others.
    bytes: int = 0
    placed: int = 0
    #: Bytes of a record and of a group that its bus takes, and records of a group.
    largest: tuple[int, int, int] = (_ALL << 30, _ALL << 30, _ALL)
    leases: dict[frozenset[Origin], GroupEntry[OriginHead]] = {}
    #: Bytes of each of them.
    weights: dict[frozenset[Origin], int] = {}
    #: What it owes to an earlier coordinator: it is written down nowhere else.
    owed: frozenset[Origin] = frozenset()

    def has_room(self, window_bytes: int) -> bool:
        """Whether more may be assigned to it; one group always may."""
        return not self.leases or self.bytes < window_bytes

    def lease(self, origins: frozenset[Origin], group: GroupEntry[OriginHead], weight: int) -> None:
        """Assign a group to it."""
        self.leases[origins], self.weights[origins] = group, weight
        self.bytes += weight
        self.placed += weight

    def end_lease(self, origins: frozenset[Origin]) -> GroupEntry[OriginHead]:
        """End an assignment; what was placed here stays so."""
        self.bytes -= self.weights.pop(origins)
        return self.leases.pop(origins)

    def takes(self, sizes: Sequence[int], weight: int) -> bool:
        """Whether its bus ever has room for a group of records of so many bytes, and all of it."""
        record, whole, count = self.largest
        return len(sizes) <= count and weight <= whole and max(sizes) <= record


def choose_dropper(sinks: Mapping[str, SinkView]) -> str | None:
    """Return the sink that writes down what is dropped: the one with the largest journal."""
    heard = [name for name in sorted(sinks) if sinks[name].heard]
    return max(heard, key=lambda name: sinks[name].largest[2], default=None)


def journal_parts(
    sinks: Mapping[str, SinkView], whole: Sequence[Origin]
) -> list[tuple[Origin, ...]]:
    """Cut a group into parts that such a journal has room for: nearly always it is one."""
    most = max([1, *(view.largest[2] for view in sinks.values())])
    return [tuple(whole[at : at + most]) for at in range(0, len(whole), most)]
