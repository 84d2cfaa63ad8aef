"""A mirror: gets a version's pieces from its upstream, and hands them on, as a pure state machine.

Invariants:

- It gets one transfer at a time, and each piece of it is taken once.
- What it has asked for and not got it asks for again, of whoever is its upstream then.
- What others ask of it waits until it has it; one that asks for another transfer asks for no more
  of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from shmbus.relay.messages import PiecesWanted, Transfer

__all__ = ["ASK_AGAIN_S", "WINDOW", "Mirror"]

#: Pieces that are under way to a mirror: what a fast network holds, and little beside a version.
WINDOW: Final = 8
#: Seconds without any piece after which those that are under way count as lost.
ASK_AGAIN_S: Final = 0.5
#: Of those that may ask, how many are remembered.
_MOST_WAITING: Final = 64


class Outgoing(NamedTuple):
    """A piece that is to be handed on."""

    to: str
    number: int


class Mirror:
    """Which pieces it has, which ones are under way, and who waits for some."""

    def __init__(self) -> None:
        self.getting: Transfer | None = None
        self.upstream = ""
        self.pieces = 0
        self.count = 0
        self._has = bytearray()
        self._asked: dict[int, None] = {}
        self._next = 0
        self._came_s = 0.0
        #: By address: which transfer it gets, and the pieces of it that it waits for.
        self._waiting: dict[str, tuple[Transfer, dict[int, None]]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether it has all pieces of what it is getting."""
        return self.getting is not None and self.count == self.pieces

    def begin(self, transfer: Transfer, pieces: int) -> None:
        """Get a transfer of so many pieces, and nothing of the one before."""
        self.getting, self.pieces = transfer, pieces
        self._has = bytearray(self.pieces)
        self._asked, self._next, self.count, self.upstream = {}, 0, 0, ""

    def end(self) -> None:
        """Get nothing."""
        self.getting, self.upstream, self._asked = None, "", {}
        self.pieces = self.count = self._next = 0

    def attach(self, upstream: str, now_s: float) -> list[PiecesWanted]:
        """Get the rest from there; what was under way from elsewhere is asked for again."""
        self.upstream, self._came_s = upstream, now_s
        return self._again()

    def _again(self) -> list[PiecesWanted]:
        said = self._say(self._asked)
        return said + self.ask()

    def _say(self, pieces: Iterable[int]) -> list[PiecesWanted]:
        wanted = tuple(pieces)
        return [PiecesWanted(self.getting, wanted)] if wanted and self.getting is not None else []

    def ask(self) -> list[PiecesWanted]:
        """Ask for what comes next, where few pieces are under way."""
        if self.getting is None or not self.upstream or len(self._asked) > WINDOW // 2:
            return []
        new = []
        while self._next < self.pieces and len(self._asked) < WINDOW:
            if not self._has[self._next]:
                self._asked[self._next] = None
                new.append(self._next)
            self._next += 1
        return self._say(new)

    def lacks(self, transfer: Transfer, index: int) -> bool:
        """Whether a piece that came is one to be taken."""
        return transfer == self.getting and index < self.pieces and not self._has[index]

    def take(self, index: int, now_s: float) -> list[Outgoing]:
        """Note that a piece is here, and was checked; return to whom it goes on."""
        assert self.getting is not None
        self._has[index] = 1
        self.count += 1
        self._asked.pop(index, None)
        self._came_s = now_s
        going = []
        for address, (transfer, pieces) in self._waiting.items():
            if transfer == self.getting and index in pieces:
                del pieces[index]
                going.append(Outgoing(address, index))
        return going

    def round(self, now_s: float) -> list[PiecesWanted]:
        """Ask again where nothing has come for a while."""
        if not self._asked or now_s - self._came_s < ASK_AGAIN_S:
            return []
        self._came_s = now_s
        return self._again()

    def asked(self, asker: str, wanted: PiecesWanted) -> None:
        """Take what another one waits for; it is handed on by `due` and `take`."""
        before = self._waiting.pop(asker, None)
        waits = before[1] if before is not None and before[0] == wanted.transfer else {}
        waits.update(dict.fromkeys(wanted.pieces[: 2 * WINDOW]))
        while len(waits) > 2 * WINDOW:
            del waits[next(iter(waits))]
        self._waiting[asker] = (wanted.transfer, waits)
        while len(self._waiting) > _MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def due(self, asker: str, done: Transfer | None, done_pieces: int) -> list[int]:
        """Return those pieces for which it waits that are here; it waits for them no more."""
        transfer, pieces = self._waiting.get(asker, (None, {}))
        if transfer is None:
            return []
        if transfer == done:
            found = [each for each in pieces if each < done_pieces]
        elif transfer == self.getting:
            found = [each for each in pieces if each < self.pieces and self._has[each]]
        else:
            found = []
        for each in found:
            del pieces[each]
        return found

    def transfer_of(self, asker: str) -> Transfer | None:
        """Return which transfer another one gets from here."""
        return self._waiting.get(asker, (None, {}))[0]
