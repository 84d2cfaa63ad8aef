"""When to ask again: after a while without progress, and then less and less often.

Invariant: a party that is only slow is not asked so often that it gets slower.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Patience"]

#: Seconds without progress after which something is asked for again ...
FIRST_S = 1.0
#: ... and the most that is waited, so that an end of a partition is noticed soon.
MOST_S = 15.0


class Patience:
    """Watches one thing that should move.

    Parameters
    ----------
    first_s : float
        Seconds until it is asked for the first time.
    """

    def __init__(self, first_s: float = FIRST_S) -> None:
        self._first_s = first_s
        self._seen: Hashable = object()
        self._wait_s = first_s
        self._next_s = 0.0

    def is_over(self, seen: Hashable, now_s: float) -> bool:
        """Whether to ask again now, where `seen` is what would differ had it moved."""
        if seen != self._seen:
            self._seen = seen
            self._wait_s = self._first_s
        elif now_s >= self._next_s:
            self._wait_s = min(2 * self._wait_s, MOST_S)
            self._next_s = now_s + self._wait_s
            return True
        else:
            return False
        self._next_s = now_s + self._wait_s
        return False
