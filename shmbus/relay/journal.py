"""A sink's journal in its bus's segment: what the core keeps, as the sink's state machine has it.

Invariant: an entry is written before what it vouches for, and freed after its source let go.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence

from shmbus import errors
from shmbus.ledger import REASONS
from shmbus.relay.messages import Origin
from shmbus.relay.sink import Journal
from shmbus_ext import _core

__all__ = ["BusJournal"]

_NEW = 0xFFFFFFFF


class BusJournal:
    """The journal of one bus, for the process that is its sink.

    Parameters
    ----------
    segment : Segment
        The bus's.
    name : str
        Its name, for messages.

    Raises
    ------
    BusBusyError
        Another relay puts records onto this bus.
    """

    def __init__(self, segment: _core.Segment, name: str) -> None:
        incarnation = _core.relay_begin(segment)
        if incarnation is None:
            raise errors.BusBusyError(
                f"bus {name!r}: another relay puts records onto it; a bus has one. `shmbus status "
                f"{name}` shows its process: stop it, or let it go on"
            )
        self.incarnation: int = incarnation
        self._segment = segment
        self._entries: dict[Origin, int] = {}
        self._origins: dict[int, Origin] = {}
        self._ended = -1
        settled, owed, ends = set(), [], set()
        for entry, bus, producer, sequence, state, ended in _core.relay_notes(segment):
            origin = (bus, producer, sequence)
            self._enter(origin, entry)
            if state == _core.RELAY_SETTLED:
                settled.add(origin)
                if ended >= 0:
                    ends.add((origin, REASONS[ended]))
            else:
                owed.append(origin)
        #: What the sinks before this one have left.
        self.found = Journal(frozenset(settled), tuple(sorted(owed)), ended=frozenset(ends))
        self.epoch = _core.relay_words(segment)[4]
        self.capacity = _core.relay_words(segment)[0]

    def _enter(self, origin: Origin, entry: int) -> None:
        self._entries[origin] = entry
        self._origins[entry] = origin

    def bind(self, writer: _core.Writer) -> None:
        """Have this writer's lane be the one that the journal speaks of."""
        _core.relay_bind(writer)

    def intend(self, writer: _core.Writer, origins: Sequence[Origin]) -> bool:
        """Write that these are put next, in this order; False without room for them."""
        given = _core.relay_intend(writer, _packed(origins), self._pack(origins))
        return self._enter_all(origins, given)

    def drop(self, origins: Sequence[Origin], reason: str) -> bool:
        """Write that these are not put, and have ended; False without room for them."""
        given = _core.relay_drop(self._segment, _packed(origins), REASONS.index(reason))
        return self._enter_all(origins, given)

    def _enter_all(self, origins: Sequence[Origin], given: bytes | None) -> bool:
        if given is None:
            return False
        for origin, (entry,) in zip(origins, struct.iter_unpack("<I", given), strict=True):
            self._enter(origin, entry)
        return True

    def _pack(self, origins: Iterable[Origin]) -> bytes:
        entries = [self._entries.get(origin, _NEW) for origin in origins]
        return struct.pack(f"<{len(entries)}I", *entries)

    def entries(self, origins: Iterable[Origin]) -> bytes:
        """Return the numbers of these records' entries, for the core."""
        return self._pack(origins)

    def settle(self, writer: _core.Writer, origins: Sequence[Origin]) -> None:
        """Write that these were put."""
        _core.relay_settle(writer, self._pack(origins))

    def forget(self, origins: Collection[Origin]) -> None:
        """Free the entries of these."""
        _core.relay_forget(self._segment, self._pack(origins))
        for origin in origins:
            del self._origins[self._entries.pop(origin)]

    def keep(self, origins: set[Origin]) -> None:
        """Free the entries of all but these."""
        self.forget([origin for origin in self._entries if origin not in origins])

    def ends(self) -> dict[str, frozenset[Origin]]:
        """Return what the trainer is done with, by reason; empty where nothing has changed."""
        ended = _core.relay_words(self._segment)[5]
        if ended == self._ended:
            return {}
        self._ended = ended
        found: dict[str, set[Origin]] = {}
        for entry, reason in _core.relay_ends(self._segment):
            if entry in self._origins:
                found.setdefault(REASONS[reason], set()).add(self._origins[entry])
        return {reason: frozenset(origins) for reason, origins in found.items()}

    def note(self, epoch: int, seen_ns: int, figures: tuple[int, ...]) -> None:
        """Write what a successor and `shmbus status` need."""
        _core.relay_note(self._segment, epoch, seen_ns, figures)


def _packed(origins: Iterable[Origin]) -> bytes:
    return b"".join(
        struct.pack("<16sQQ", bytes.fromhex(bus), producer, sequence)
        for bus, producer, sequence in origins
    )
