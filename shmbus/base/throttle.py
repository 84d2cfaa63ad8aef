"""Throttle: limits the reports of an event. Time is an argument.

Invariants:

- The first event of a cause is told in full; those of the next interval are only counted.
- Every event is told in the end, in full or in a sum; `sums` hands out a sum once.
- A counted event costs a look-up and an addition.
"""

from __future__ import annotations

import logging


class Throttle:
    """Decision by event: tell in full, or count."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        #: By cause: start of the interval, and number of events in it.
        self._since_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def first(self, cause: str, now_s: float, count: int = 1) -> bool:
        """Return True to tell an event in full; else count the event as `count` events."""
        counts = self._counts
        if cause in counts:
            counts[cause] += count
            return False
        counts[cause] = 0
        self._since_s[cause] = now_s
        return True

    def sums(self, now_s: float) -> list[tuple[str, int]]:
        """Return the nonzero counts of causes whose interval is over."""
        found = []
        for cause, since_s in list(self._since_s.items()):
            if now_s - since_s < self.interval_s:
                continue
            count = self._counts[cause]
            if count:
                found.append((cause, count))
                self._since_s[cause] = now_s
                self._counts[cause] = 0
            else:
                del self._since_s[cause], self._counts[cause]
        return found


class LimitedLog:
    """Log of warnings other processes trigger: the first of a cause, then a sum per interval."""

    def __init__(self, logger: logging.Logger, interval_s: float) -> None:
        self._logger = logger
        self._throttle = Throttle(interval_s)
        #: The latest message by cause.
        self._latest: dict[str, str] = {}

    def warning(self, cause: str, now_s: float, message: str, **extra: object) -> None:
        """Log or count a warning; `cause` comes from a short list of words."""
        if self._throttle.first(cause, now_s):
            self._logger.warning("%s", message, extra=extra)
        self._latest[cause] = message

    def sum_up(self, now_s: float) -> None:
        """Log the sums of ended intervals."""
        for cause, count in self._throttle.sums(now_s):
            self._logger.warning(
                "%s: %d more since the last such line; the latest: %s",
                cause,
                count,
                self._latest[cause],
            )
