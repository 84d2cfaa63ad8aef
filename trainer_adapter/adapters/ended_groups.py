"""Ended groups: requested groups that never come, and groups ended by a call.

Invariants:

- A group counts as ended only after its request ended without a delivery to the caller.
- Open requests are read only after a drop: the state holds every prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import shmbus

#: Instance id and round.
Key = tuple[str, int | None]
#: Seconds after a drop for a request's way to its end.
_SETTLE_S: Final = 10.0


def still_leased(groups: Iterable[shmbus.Group]) -> list[shmbus.Group]:
    """Return the groups still leased."""
    return [group for group in groups if group.state == "leased"]


class EndedGroups:
    """Finds awaited groups without a future."""

    def __init__(self, consumer: shmbus.Consumer) -> None:
        self._consumer: Final = consumer
        self._before: Final = dict(consumer.stats().dropped)
        self._dropped = sum(self._before.values())
        self._look_until_s = 0.0

    def among(self, wanted: Iterable[Key]) -> list[Key]:
        """Return the ended groups."""
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
        """Raise if a group necessary for a step ended."""
        ended = self.among(wanted)
        if ended:
            raise RuntimeError(
                f"bus {self._consumer.name!r}: the group {ended[0]!r} was asked for, and the bus "
                f"dropped it ({len(ended)} such groups; since then it dropped {self.why()}); the "
                "log names each. Stale: have workers load the weights before they sample, or raise "
                "max_policy_lag. Failed: raise sample_retries. Then ask for the step again"
            )

    def why(self) -> str:
        """Describe the drops during the life of this object."""
        counts = {
            reason: count - self._before.get(reason, 0)
            for reason, count in self._consumer.stats().dropped.items()
        }
        return ", ".join(f"{n} samples as {reason}" for reason, n in counts.items() if n > 0)
