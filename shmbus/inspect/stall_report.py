"""The watchdog's report of a stalled wait: the status of the bus at that time.

Invariant: every bus can be reported on, even an unreadable bus.
"""

from __future__ import annotations

import msgspec

from shmbus import errors
from shmbus.base.format import show_duration
from shmbus.data.status_types import BusStatus
from shmbus.inspect.status import read_status
from shmbus.inspect.text import status_text

#: Waits of trainers; the remaining waits belong to producers.
OF_TRAINERS = ("a complete group", "this rank's step")
#: Rows for producers and clients in the text of a report.
_ROWS = 20


class StallReport(msgspec.Struct, frozen=True, kw_only=True):
    """A wait without movement, and the state of the bus then; ``str(report)`` is for people.

    Attributes
    ----------
    bus : str
        The bus.
    waits_for : str
        "a complete group", "this rank's step" or "space".
    stalled_s : float
        Seconds of this process's wait without movement.
    status : BusStatus | None
        As `shmbus status` shows it: the ledger, the oldest incomplete groups with their missing
        samples, leases, producers, a pause. None if unreadable.
    problem : str
        Reason for an unreadable status.
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
        return f"{head}\n{status_text(self.status, most=_ROWS)}"


def gather(bus: str, waits_for: str, stalled_s: float) -> StallReport:
    """Make a report now."""
    wants = waits_for if waits_for in OF_TRAINERS else None
    try:
        status = read_status(bus, still_s=stalled_s, wants=wants)
    except (errors.ShmbusError, OSError) as error:
        return StallReport(bus=bus, waits_for=waits_for, stalled_s=stalled_s, problem=str(error))
    return StallReport(bus=bus, waits_for=waits_for, stalled_s=stalled_s, status=status)


def wait_sentence(bus: str, wants: str) -> str:
    """Explain a trainer's wait, for the message of its timeout."""
    try:
        verdict = read_status(bus, wants=wants).verdict
    except (errors.ShmbusError, OSError):
        return ""
    return "" if verdict is None else verdict.sentence
