"""The watchdog: reports a wait on a bus without movement.

A movement is a trajectory committed, aborted, acknowledged or dropped, by an arbitrary process.
The counters of the segment show movements, without a call to another process. The watchdog checks
them after each slice of a wait, so a short wait pays for a comparison.

Invariants:

- A stall is logged once a period while the stall lasts, by a single process for all producers and a
  single process for all trainers. A daemon's clients map the segment read-only: each logs for
  itself.
- A process with a callback, or with a wait to end, makes a report of its own.
- By default a trainer's wait ends with an error only if no other process can end it: no living
  worker is attached for STALL_DEAD_S, or the attached workers commit nothing for STALL_SLOW_S. An
  operator's pause never ends a run.
- A report comes from `inspect.status`, which disturbs no process and waits at most a second for a
  daemon. A report is gathered only after a stall.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import check_choice, check_period
from shmbus_ext import _core

if TYPE_CHECKING:
    from shmbus.inspect.stall_report import StallReport


logger = logging.getLogger("shmbus.stall")

#: The longest period: a watchdog silent for more than a day watches nothing.
_TIMEOUT_MAX_S = 86_400.0
#: Checks per period, of some microseconds each; a stall is reported at most 25% late.
_CHECKS = 4


OnStall: TypeAlias = 'Literal["log", "raise"] | Callable[[StallReport], object] | None'


class Watch:
    """Watches the waits of a handle."""

    def __init__(self, bus: str, on_stall: OnStall, timeout_s: float | None) -> None:
        if on_stall is not None and not callable(on_stall):
            check_choice("on_stall", on_stall, ("log", "raise"), "or pass a callable, or None")
        if timeout_s is not None and check_period("stall_timeout", timeout_s) > _TIMEOUT_MAX_S:
            raise ValueError(
                f"stall_timeout: expected more than 0, at most {_TIMEOUT_MAX_S:g} seconds, "
                f"got {timeout_s!r}"
            )
        self._bus = bus
        self._on_stall: OnStall = on_stall
        self._timeout_s = timeout_s
        self._period_s = limits.STALL_REPORT_S if timeout_s is None else timeout_s
        self.slice_s: float | None = None if on_stall is None else self._period_s / _CHECKS
        self._seen: tuple[int, ...] = ()
        self._since_s = 0.0  # start of unchanged counters under a wait
        self._fired_s = 0.0
        self._checked_s = 0.0
        self._waited_until_s = 0.0  # end of the last wait, or slice of a wait

    @property
    def options(self) -> tuple[OnStall, float | None]:
        """The arguments on_stall and timeout_s, for a pickled handle."""
        return self._on_stall, self._timeout_s

    def first_s(self, timeout: float | None) -> float | None:
        """Seconds of the first slice of a wait of `timeout` seconds."""
        if self.slice_s is None or (timeout is not None and timeout <= self.slice_s):
            return timeout
        return self.slice_s

    def go_on(
        self,
        wait: Callable[[float | None], bool],
        segment: _core.Segment,
        waits_for: str,
        timeout: float | None,
    ) -> bool:
        """Go on waiting after a first slice without a result, with a check after each slice."""
        began_s = time.monotonic() - (self.first_s(timeout) or 0.0)
        while True:
            now = time.monotonic()
            self.check(segment, waits_for, now - began_s)
            remaining_s = None if timeout is None else began_s + timeout - now
            if remaining_s is not None and remaining_s <= 0:
                return False
            if wait(self.first_s(remaining_s)):
                return True

    def check(self, segment: _core.Segment, waits_for: str, waited_s: float) -> None:
        """Report a stall that lasts too long; `waited_s` is the age of this wait."""
        slice_s = self.slice_s
        if slice_s is None:
            return
        now = time.monotonic()
        # A pause between two waits restarts the watch: without a wait, nothing stalled.
        restarts = now - waited_s - self._waited_until_s > slice_s
        self._waited_until_s = now
        if not restarts and now - self._checked_s < slice_s:
            return
        self._checked_s = now
        seen = (*segment.tally()[1:], *segment.released())
        if restarts or seen != self._seen:
            self._seen = seen
            self._since_s = self._fired_s = now
        elif now - self._fired_s >= self._period_s:
            self._fired_s = now
            self._fire(segment, waits_for, now - self._since_s)

    def _fire(self, segment: _core.Segment, waits_for: str, stalled_s: float) -> None:
        # Imported here: a worker without stalls does not load the module.
        from shmbus.inspect.stall_report import OF_TRAINERS, gather

        hears = callable(self._on_stall)
        raises = self._on_stall == "raise" and (
            self._timeout_s is not None
            or stalled_s >= min(limits.STALL_DEAD_S, limits.STALL_SLOW_S)
        )
        tells = not hears and segment.tells_stall(waits_for in OF_TRAINERS, self._period_s)
        if not (hears or raises or tells):
            return
        report = gather(self._bus, waits_for, stalled_s)
        if callable(self._on_stall):
            self._on_stall(report)
        elif raises and self._ends(report):
            raise errors.StallError(report)
        elif tells:
            logger.warning("%s", report)

    def _ends(self, report: StallReport) -> bool:
        """Tell if a wait ends: after the given seconds, else by the processes left to end it."""
        if self._timeout_s is not None:
            return True
        status = report.status
        if status is not None and status.paused is not None:
            return False
        at_work = status is None or any(
            each.state == "alive" and not each.stopped for each in status.producers
        )
        return report.stalled_s >= (limits.STALL_SLOW_S if at_work else limits.STALL_DEAD_S)
