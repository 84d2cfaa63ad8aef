"""A sink's journal in its bus's segment: what the core keeps, as the sink's state machine has it.

Invariant: an entry is written before what it vouches for, and freed after its source let go.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from shmbus import errors
from shmbus.ledger import REASONS
from shmbus.relay.origins import Origin
from shmbus.relay.sink import Journal
from shmbus_ext import _core

__all__ = ["ENTRY_BYTES", "BusJournal"]

#: Of an entry's number, as the core takes it.
ENTRY_BYTES: Final = 4
_NEW: Final = 0xFFFFFFFF


class BusJournal:
    """The journal of one bus, for the process that is its sink."""

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
        for entry, origin, state, ended in _core.relay_notes(segment):
            self._entries[origin] = entry
            self._origins[entry] = origin
            if state == _core.RELAY_SETTLED:
                settled.add(origin)
                if ended >= 0:
                    ends.add((origin, REASONS[ended]))
            else:
                owed.append(origin)
        #: What the sinks before this one have left.
        self.found = Journal(frozenset(settled), tuple(sorted(owed)), ended=frozenset(ends))
        self.term = _core.relay_words(segment)[4]
        self.capacity = _core.relay_words(segment)[0]

    def bind(self, writer: _core.Writer) -> None:
        """Have this writer's lane be the one that the journal speaks of."""
        _core.relay_bind(writer)

    def intend(self, writer: _core.Writer, origins: Sequence[Origin]) -> bytes | None:
        """Write that these are put next, in this order; None without room for them."""
        given = _core.relay_intend(writer, b"".join(origins), self._pack(origins))
        if given is not None:
            self._enter(origins, given)
        return given

    def drop(self, origins: Sequence[Origin], reason: str) -> bool:
        """Write that these are not put, and have ended; False without room for them."""
        given = _core.relay_drop(self._segment, b"".join(origins), REASONS.index(reason))
        if given is None:
            return False
        self._enter(origins, given)
        return True

    def _enter(self, origins: Sequence[Origin], given: bytes) -> None:
        entries = array("I", given)
        self._entries.update(zip(origins, entries, strict=True))
        self._origins.update(zip(entries, origins, strict=True))

    def _pack(self, origins: Sequence[Origin]) -> array[int]:
        known = self._entries
        if known.keys().isdisjoint(origins):
            return array("I", [_NEW]) * len(origins)
        return array("I", [known.get(origin, _NEW) for origin in origins])

    def settle(self, writer: _core.Writer, entries: bytes) -> None:
        """Write that the records of these entries were put."""
        _core.relay_settle(writer, entries)

    def forget(self, origins: Collection[Origin]) -> None:
        """Free the entries of these."""
        entries = array("I", map(self._entries.pop, origins))
        _core.relay_forget(self._segment, entries)
        deque(map(self._origins.__delitem__, entries), maxlen=0)

    def keep(self, origins: set[Origin]) -> None:
        """Free the entries of all but these."""
        self.forget([origin for origin in self._entries if origin not in origins])

    def ends(self) -> dict[str, list[Origin]]:
        """Return what the trainer is done with, by reason; empty where nothing has changed."""
        ended = _core.relay_words(self._segment)[5]
        if ended == self._ended:
            return {}
        self._ended = ended
        known = self._origins
        return {
            REASONS[reason]: [known[entry] for entry in array("I", entries) if entry in known]
            for reason, entries in _core.relay_ends(self._segment).items()
        }

    def look_again(self) -> None:
        """Have `ends` return all once more, though no more has ended."""
        self._ended = -1

    def note(self, term: int, seen_ns: int, figures: tuple[int, ...]) -> None:
        """Write what a successor and `shmbus status` need."""
        _core.relay_note(self._segment, term, seen_ns, figures)
