"""How far the clocks of other machines are from this one's. Pure: times are arguments.

Invariant: nothing but ages, and which of two records is older, is decided by a clock of elsewhere.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Clocks"]

#: Words of a peer that are compared: what was under way for longest says the least. About as many
#: seconds after a clock was set back, it is believed.
_WORDS: Final = 16
#: A change of the offset that is told: far above what a network delays a word by.
JUMP_S: Final = 1.0


class Clocks:
    """Offsets of monotonic clocks, from times that peers say.

    A word is never here before it was said. So the clock of its sender is ahead by at least what
    the word says minus the time of its arrival, and the greatest of such differences is nearest.
    """

    def __init__(self) -> None:
        self._words: dict[str, deque[int]] = {}

    def note(self, peer: str, said_ns: int, now_ns: int) -> float:
        """Take the time that a peer says.

        Parameters
        ----------
        peer : str
            Who.
        said_ns, now_ns : int
            Its clock when it said so, and this one's when that came.

        Returns
        -------
        float
            Seconds by which its clock has jumped; 0 where it has not.
        """
        words = self._words.setdefault(peer, deque(maxlen=_WORDS))
        before = max(words, default=None)
        words.append(said_ns - now_ns)
        after = max(words)
        jump_s = 0.0 if before is None else (after - before) / 1e9
        if abs(jump_s) < JUMP_S:
            return 0.0
        if jump_s > 0:
            words.clear()
            words.append(after)
        return jump_s

    def offset_ns(self, peer: str) -> int:
        """Return a peer's clock minus this one's; 0 where it has said nothing.

        Parameters
        ----------
        peer : str
            Who.

        Returns
        -------
        int
            Nanoseconds.
        """
        return max(self._words.get(peer, ()), default=0)
