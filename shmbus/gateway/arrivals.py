"""Bodies on their way that have room, and which of them come too slowly while others wait for it.

Nothing here has a clock or a socket: the time is an argument, and what has come is asked for.

Invariants:

- A body is judged by what came of it in a whole window, which was watched from its beginning to its
  end: what came while this process did something else is held against nobody.
- Who asks for judgement knows that somebody waits: without that, a slow body costs nobody anything.
"""

from __future__ import annotations

from collections.abc import Callable

from shmbus.gateway import settings

__all__ = ["Arrival", "Arrivals"]


class Arrival:
    """One body that is being received.

    Parameters
    ----------
    came : callable
        Returns how many bytes of it have come.
    end : callable
        Ends it.
    now_s : float
        When it got its room, by `time.monotonic`.
    """

    def __init__(self, came: Callable[[], int], end: Callable[[], None], now_s: float) -> None:
        self._came = came
        self._since_s, self._before = now_s, 0
        self.end = end

    def begin_window(self, now_s: float) -> None:
        """Count from now on."""
        self._since_s, self._before = now_s, self._came()

    def is_slow(self, now_s: float) -> bool:
        """Whether too little came in a window that is over; if not, another begins."""
        window_s = now_s - self._since_s
        if window_s < settings.STALL_S:
            return False
        if self._came() - self._before < settings.SLOWEST_BYTES_PER_S * window_s:
            return True
        self.begin_window(now_s)
        return False


class Arrivals:
    """All bodies that are being received into one budget."""

    def __init__(self) -> None:
        self._all: dict[Arrival, None] = {}

    def begin(self, arrival: Arrival) -> None:
        """Note that a body has room, and comes."""
        self._all[arrival] = None

    def forget(self, arrival: Arrival) -> None:
        """Note that it has come, or will not."""
        self._all.pop(arrival, None)

    def begin_windows(self, now_s: float) -> None:
        """Count from now on: nobody has watched until now."""
        for arrival in self._all:
            arrival.begin_window(now_s)

    def end_slow(self, now_s: float) -> None:
        """End those that are too slow, for others who wait."""
        for arrival in [each for each in self._all if each.is_slow(now_s)]:
            self.forget(arrival)
            arrival.end()
