"""Exponential backoff with jitter and a cap."""

from __future__ import annotations

import zlib
from collections.abc import Hashable


def backoff_s(backoff: tuple[float, float], attempt: int, of: object) -> float:
    """Return the seconds before an attempt, 1 for the first that follows a failure."""
    first_s, most_s = backoff
    longest_s = min(most_s, first_s * 2.0 ** min(max(attempt - 1, 0), 64))
    return longest_s * (0.5 + zlib.crc32(repr(of).encode()) / 2**33)


class Backoff:
    """Growing waits of a single caller, until `reset`.

    Parameters
    ----------
    span : tuple of float
        Seconds of the first wait and of the longest.
    seed : object
        Source of the jitter: callers with equal seeds wait in step.
    """

    __slots__ = ("_seed", "_seen", "_span", "_waits", "until_s")

    def __init__(self, span: tuple[float, float], seed: object = 0) -> None:
        self._span = span
        self._seed = seed
        self._seen: Hashable = object()
        self.reset()

    def reset(self) -> None:
        """End the wait, and begin with the shortest again."""
        self._waits = 0
        self.until_s = 0.0

    def wait(self, now_s: float) -> None:
        """Begin a longer wait, unless a wait is under way: many calls of a moment count once."""
        if now_s >= self.until_s:
            self._waits += 1
            self.until_s = now_s + backoff_s(self._span, self._waits, (self._waits, self._seed))

    def is_over(self, seen: Hashable, now_s: float) -> bool:
        """Tell if the caller may ask again now; progress changes `seen` and ends the wait."""
        moved, self._seen = seen != self._seen, seen
        if moved:
            self.reset()
        over = not moved and now_s >= self.until_s
        self.wait(now_s)
        return over
