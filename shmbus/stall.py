"""The watchdog: what happens when somebody waits on a bus where nothing moves any more.

Nothing moves when no trajectory was committed, aborted, acknowledged or dropped, by anybody. The
counters of the segment tell, with no call to another process, and only when a slice of a wait is
over: a wait that ends sooner pays for a comparison.

Invariants:

- A stall is reported once a period, for as long as it lasts, by whoever waits.
- What a report says comes from `inspect.status`, which disturbs nobody and waits for nobody longer
  than a second; it is gathered only when there is something to report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import msgspec

from shmbus import errors
from shmbus._format import show_duration
from shmbus_ext import _core

if TYPE_CHECKING:
    from shmbus.inspect.types import BusStatus

__all__ = ["OnStall", "StallReport", "Watch", "check_stall"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The longest period: a watchdog that is silent for more than a day watches nothing.
_TIMEOUT_MAX_S = 86_400.0
#: Checks per period, of some microseconds each; a stall is reported at most 25% late.
_CHECKS = 4


class StallReport(msgspec.Struct, frozen=True, kw_only=True):
    """Who waits, for what, and what the bus looked like then; ``str(report)`` is for people.

    Attributes
    ----------
    bus : str
        The bus.
    waits_for : str
        What the one who reports waits for: "a complete group", "this rank's step", "space".
    stalled_s : float
        Seconds for which it has waited and nothing has moved.
    status : BusStatus | None
        All that `shmbus status` says: the ledger, the oldest incomplete groups with what they miss,
        who holds what, the producers, a pause.
    problem : str
        Why there is no status.
    """

    bus: str
    waits_for: str
    stalled_s: float
    status: BusStatus | None = None
    problem: str = ""

    def __str__(self) -> str:
        head = (
            f"bus {self.bus!r}: nothing has moved for {show_duration(self.stalled_s)}, and this "
            f"process waits for {self.waits_for}"
        )
        if self.status is None:
            return f"{head}; its status cannot be read: {self.problem}"
        from shmbus.inspect.status_text import status_text

        return f"{head}\n{status_text(self.status)}"


OnStall: TypeAlias = 'Literal["log", "raise"] | Callable[[StallReport], object] | None'


def check_stall(on_stall: object, timeout_s: object) -> None:
    """Raise TypeError or ValueError unless these are what a Watch takes."""
    if isinstance(on_stall, str) and on_stall not in ("log", "raise"):
        raise ValueError(f"on_stall: expected 'log', 'raise', a callable or None, got {on_stall!r}")
    if not (on_stall is None or isinstance(on_stall, str) or callable(on_stall)):
        raise TypeError(
            f"on_stall: expected 'log', 'raise', a callable or None, got {type(on_stall).__name__}"
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"stall_timeout: expected seconds, got {type(timeout_s).__name__}")
    if not 0 < timeout_s <= _TIMEOUT_MAX_S:
        raise ValueError(
            f"stall_timeout: expected more than 0, at most {_TIMEOUT_MAX_S:g} seconds, "
            f"got {timeout_s!r}"
        )


class Watch:
    """Watches the waits of one handle.

    Parameters
    ----------
    bus : str
        The bus.
    on_stall : "log" | "raise" | callable | None
        What to do: a warning of the logger ``shmbus.stall``, StallError, or a call with the
        StallReport, in the thread that waits; what it raises ends the wait. None for nothing.
    timeout_s : float
        Seconds without any movement that are a stall.
    """

    def __init__(self, bus: str, on_stall: OnStall, timeout_s: float) -> None:
        check_stall(on_stall, timeout_s)
        self._bus = bus
        self._on_stall: OnStall = on_stall
        self._timeout_s = timeout_s
        self.slice_s: float | None = None if on_stall is None else timeout_s / _CHECKS
        self._seen: tuple[int, ...] = ()
        self._since_s = 0.0  # since when the counters are as seen, and somebody waits
        self._fired_s = 0.0
        self._looked_s = 0.0
        self._left_s = 0.0  # when the last wait, or part of one, was over

    @property
    def options(self) -> tuple[OnStall, float]:
        """What it was made with, for a handle that travels."""
        return self._on_stall, self._timeout_s

    def first_s(self, timeout: float | None) -> float | None:
        """Seconds that the first part of a wait of `timeout` seconds may last."""
        if self.slice_s is None or (timeout is not None and timeout <= self.slice_s):
            return timeout
        return self.slice_s

    def go_on(
        self,
        wait: Callable[[float | None], list[T]],
        segment: _core.Segment,
        waits_for: str,
        timeout: float | None,
    ) -> list[T]:
        """Wait on after a first part that brought nothing, and look at the bus in between."""
        began_s = time.monotonic() - (self.first_s(timeout) or 0.0)
        while True:
            now = time.monotonic()
            self.look(segment, waits_for, now - began_s)
            left = None if timeout is None else began_s + timeout - now
            if left is not None and left <= 0:
                return []
            found = wait(self.first_s(left))
            if found:
                return found

    def look(self, segment: _core.Segment, waits_for: str, waited_s: float) -> None:
        """Act where nothing has moved for too long; `waited_s` is how long this wait lasts.

        Raises
        ------
        StallError
            Under "raise".
        """
        slice_s = self.slice_s
        if slice_s is None:
            return
        now = time.monotonic()
        # Between two waits that are further apart nobody waited, so nothing stalled.
        anew = now - waited_s - self._left_s > slice_s
        self._left_s = now
        if not anew and now - self._looked_s < slice_s:
            return
        self._looked_s = now
        seen = _movements(segment)
        if anew or seen != self._seen:
            self._seen = seen
            self._since_s = self._fired_s = now
        elif now - self._fired_s >= self._timeout_s:
            self._fired_s = now
            self._fire(waits_for, now - self._since_s)

    def _fire(self, waits_for: str, stalled_s: float) -> None:
        report = gather(self._bus, waits_for, stalled_s)
        if self._on_stall == "log":
            logger.warning("%s", report)
        elif self._on_stall == "raise":
            raise errors.StallError(report)
        elif callable(self._on_stall):
            self._on_stall(report)


def _movements(segment: _core.Segment) -> tuple[int, ...]:
    """Counters that change with whatever anybody does."""
    counts = [(row[5], row[6]) for row in segment.producers()]
    return sum(c for c, _ in counts), sum(a for _, a in counts), *segment.released()


def gather(bus: str, waits_for: str, stalled_s: float) -> StallReport:
    """Make a report now; a bus that cannot be read is one, too."""
    # Here, so that a worker that never stalls loads nothing of it.
    from shmbus.inspect.status import read_status

    try:
        status = read_status(bus)
    except (errors.ShmbusError, OSError) as error:
        return StallReport(bus=bus, waits_for=waits_for, stalled_s=stalled_s, problem=str(error))
    return StallReport(bus=bus, waits_for=waits_for, stalled_s=stalled_s, status=status)
