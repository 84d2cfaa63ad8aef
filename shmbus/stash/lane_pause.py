"""Whether the request lane is paused, since all samples of late failed alike.

A pure state machine: time and counts are arguments. An engine that is away fails each sample in the
same words, whichever prompt it is of. So the lane is closed then, and probed: one sample is let
through each interval, and the first that succeeds opens it again.

Invariants
----------
- Only failures without any success between them pause the lane, of several prompts, in the same
  words but for those with a digit. A prompt that cannot be sampled never pauses it alone.
- Failures that come together with successes count for nothing: which came first is not known.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Final

from shmbus import limits
from shmbus._backoff import backoff_s

__all__ = ["LanePause", "words_of"]

#: Words that are no part of what a reason says: numbers, addresses, ids.
_WITH_DIGIT: Final = re.compile(r"[\w.:-]*\d[\w.:-]*")


def words_of(reason: str) -> str:
    """Return what failures that are alike have in common."""
    return _WITH_DIGIT.sub("#", reason)


class LanePause:
    """Follows successes and failures of the samples that are asked for through the lane."""

    def __init__(self, backoff: tuple[float, float]) -> None:
        self._backoff = backoff
        #: Producers that are attached; twice as many failures tell of more than one each.
        self.workers = 0
        #: Why the lane is paused; None while it is open.
        self.reason: str | None = None
        #: Whether it was paused or opened, and workers do not know yet.
        self.changed = False
        #: When the next sample is let through, while it is paused.
        self.probe_due_s = 0.0
        #: Samples that have come since this was made.
        self.successes = 0
        self._probes = 0
        self._accepted = 0
        self._mixed = False
        #: How the last failures were alike, how many they are, and some of their groups.
        self._alike = ""
        self._count = 0
        self._keys: set[Hashable] = set()
        #: Successes after which a lane that was opened is as any other.
        self._tried_at = 0

    @property
    def paused(self) -> bool:
        """Whether samples are let through one at a time."""
        return self.reason is not None

    def look(self, accepted: int) -> None:
        """Note how many samples the group table has accepted, before failures are told."""
        self._mixed = accepted != self._accepted
        if self._mixed:
            self.succeeded(accepted - self._accepted)
            self._accepted = accepted

    def succeeded(self, count: int = 1) -> None:
        """Note samples that have come: the lane is open, or opened again."""
        self.successes += count
        self._count = 0
        self._keys.clear()
        if self.reason is not None:
            self.reason = None
            self.changed = True
            self._tried_at = self.successes + limits.ALIKE_FAILURES

    def failed(self, key: Hashable, reason: str, now_s: float) -> None:
        """Note a sample of a group that a worker reported as failed."""
        if self._mixed:
            return
        alike = words_of(reason)
        if alike != self._alike:
            self._alike, self._count = alike, 0
            self._keys.clear()
            self._tried_at = 0
        self._count += 1
        if len(self._keys) < limits.ALIKE_PROMPTS:
            self._keys.add(key)
        if self.reason is not None:
            return
        needed = max(limits.ALIKE_FAILURES, 2 * self.workers)
        if self.successes < self._tried_at:
            self._pause("a probe succeeded, and the next sample failed as before", reason, now_s)
        elif self._count >= needed and len(self._keys) >= limits.ALIKE_PROMPTS:
            self._pause(f"the last {self._count} samples all failed", reason, now_s)

    def _pause(self, what: str, reason: str, now_s: float) -> None:
        self.restore(f"{what}: {reason}; asked again one at a time", now_s)

    def restore(self, reason: str, now_s: float) -> None:
        """Pause, as an earlier collector has or as the failures say."""
        self.reason = reason
        self.changed = True
        self.probe_due_s = now_s
        self._probes = 0

    def probe(self, now_s: float) -> None:
        """Note that a sample is let through."""
        self._probes += 1
        wait_s = backoff_s(self._backoff, self._probes, (self._probes, self._alike))
        self.probe_due_s = now_s + max(wait_s, limits.PROBE_S)
