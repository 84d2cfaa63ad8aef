"""Groups that have ended: those that were asked for and never come, those that a call has ended.

Invariants:

- A group is called ended only where its request is over and the caller has not had it.
- What is open is read only after something was dropped: it has every prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import shmbus

#: Instance id and round.
Key = tuple[str, int | None]
#: Seconds after a drop in which a request may still be on its way to its end.
_SETTLE_S: Final = 10.0


def still_leased(groups: Iterable[shmbus.Group]) -> list[shmbus.Group]:
    """Return the groups that no call has ended yet."""
    return [group for group in groups if group.state == "leased"]


class EndedGroups:
    """Finds out which of the groups that a trainer waits for will not come."""

    def __init__(self, consumer: shmbus.Consumer) -> None:
        self._consumer: Final = consumer
        self._before: Final = dict(consumer.stats().dropped)
        self._dropped = sum(self._before.values())
        self._look_until_s = 0.0

    def among(self, wanted: Iterable[Key]) -> list[Key]:
        """Return which groups have ended."""
        dropped = sum(self._consumer.stats().dropped.values())
        now_s = time.monotonic()
        if dropped != self._dropped:
            self._dropped = dropped
            self._look_until_s = now_s + _SETTLE_S
        if now_s > self._look_until_s:
            return []
        state = self._consumer.state_dict()
        is_open = {(each["instance_id"], each["round"]) for each in state["open"]}
        return [key for key in wanted if key not in is_open]

    def raise_for(self, wanted: Iterable[Key]) -> None:
        """Raise where a group has ended that a step cannot do without."""
        ended = self.among(wanted)
        if ended:
            raise RuntimeError(
                f"bus {self._consumer.name!r}: the group {ended[0]!r} was asked for, and the bus "
                f"dropped it ({len(ended)} such groups; since then it dropped {self.why()}); the "
                "log names each. Stale: have workers load the weights before they sample, or raise "
                "max_policy_lag. Failed: raise sample_retries. Then ask for the step again"
            )

    def why(self) -> str:
        """Say what was dropped since this object was made."""
        counts = {
            reason: count - self._before.get(reason, 0)
            for reason, count in self._consumer.stats().dropped.items()
        }
        return ", ".join(f"{n} samples as {reason}" for reason, n in counts.items() if n > 0)
