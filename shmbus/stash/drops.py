"""DropLog: every drop leaves a line in the log.

The first drop of each reason is told in full: group, samples, producer, and remedy. Further drops
within LOG_INTERVAL_S are summed up. A message is logged after its samples' release: a log handler's
work must not come between.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from shmbus import errors
from shmbus.base import limits
from shmbus.base.format import printable, several
from shmbus.base.throttle import Throttle
from shmbus.data.keys import split_key
from shmbus_ext import _core

#: The documentation of all reasons.
PAGE = "docs/errors.md#dropped-samples"

logger = logging.getLogger("shmbus.drops")

Trajectory = _core.Trajectory
_SHOWN = 6
#: A harmless failure report, made obsolete by later events.
_SUPERSEDED = "failed (reports)"
#: A sample not needed by its complete group, as its producers had asked.
_NOT_NEEDED = "surplus (not needed)"
#: Causes and remedies by the ledger's reason.
_OWN_ROUND = "give each round of a prompt its own number: round=producer.next_round()"
REMEDIES = {
    "duplicate": "a second sample of the index, and the first stays; number the samples of a "
    f"prompt once, or {_OWN_ROUND}",
    "size_mismatch": "group_size or need differs from the group's; pass the same values with "
    f"every sample of a group, or {_OWN_ROUND}",
    "surplus": f"the group of this id and round had ended, or held enough samples; {_OWN_ROUND}",
    "timeout": "the group was incomplete after group_timeout; raise group_timeout, or deliver the "
    "present samples by on_timeout='partial'",
    "stale": "more than max_policy_lag versions behind; raise max_policy_lag, or check that "
    "workers pass policy_version=",
    "zero_variance": "equal scores, under skip_zero_variance",
    "overflow": "incomplete groups held more than max_stash_bytes; raise max_stash_bytes, or have "
    "workers finish groups before beginning new groups",
    "malformed": "refused by the trainer, with the cause in the trainer's own message",
    "corrupt": "damaged bytes in the segment; look for a process that writes through a view",
    "failed": "a sample failed for good; raise sample_retries, or deliver the remaining samples by "
    "on_failure='partial'",
    "filtered": "refused by the trainer's filter, on purpose",
    "relayed": "put onto the trainer's bus by a relay",
    _NOT_NEEDED: "the group already held its needed samples; workers may ask Producer.cancelled",
    _SUPERSEDED: "the sample was requested again or came later, or the group had ended",
}


class DropLog:
    """Logs a collector's drops."""

    def __init__(self, segment: _core.Segment) -> None:
        self._segment = segment
        self._throttle = Throttle(limits.LOG_INTERVAL_S)
        self._messages: list[tuple[int, str]] = []
        #: Callback for every drop: the reason, and the samples of a group.
        self.told: Callable[[str, Sequence[Trajectory]], None] | None = None

    def note(
        self, reason: str, samples: Sequence[Trajectory], now_s: float, *, superseded: bool = False
    ) -> None:
        """Note a group's released samples; call for failure reports while they are held."""
        if self.told is not None and not superseded:
            self.told(reason, samples)
        if superseded:
            reason = _SUPERSEDED
        elif reason == "surplus" and samples[0].need < samples[0].group_size:
            reason = _NOT_NEEDED
        if self._throttle.first(reason, now_s, len(samples)):
            self._messages.append((_level(reason), self._describe(reason, samples)))

    def note_corrupt(self, count: int, now_s: float) -> None:
        """Note records quarantined by the reader."""
        if self._throttle.first("corrupt", now_s, count):
            what = f"dropped {several(count, 'record')} as corrupt: {REMEDIES['corrupt']}"
            self._messages.append((logging.WARNING, self._line(what)))

    def flush(self) -> None:
        """Log the noted drops; call after the release."""
        messages, self._messages = self._messages, []
        for level, message in messages:
            logger.log(level, "%s", message)

    def sum_up(self, now_s: float = math.inf) -> None:
        """Log the sums of ended intervals; all sums without a time."""
        for reason, count in self._throttle.sums(now_s):
            what = (
                f"dropped {several(count, 'more trajectory')} as {reason} since the last such line"
            )
            logger.log(_level(reason), "%s", self._line(what))

    def _line(self, what: str) -> str:
        return f"bus {self._segment.name!r}: {what}; see {PAGE}"

    def _describe(self, reason: str, samples: Sequence[Trajectory]) -> str:
        first = samples[0]
        key, round, split = split_key(first.key)
        indices = ", ".join(str(sample.index) for sample in samples[:_SHOWN])
        if len(samples) > _SHOWN:
            indices += ", ..."
        reports = [sample for sample in samples if sample.failed]
        what = "the failure report" if len(reports) == len(samples) else "sample"
        which = f"{what}{'s' if len(samples) > 1 else ''} {indices}"
        group = repr(key) + ("" if round is None else f" round {round}")
        if split:
            group += f" of split {_core.split_label(self._segment, split)!r}"
        ids = sorted({sample.producer_id for sample in samples})
        told = f"dropped {which} of {first.group_size or 'unknown size'}, group {group}, "
        told += f"from {', '.join(map(self._producer, ids[:_SHOWN]))}, as {reason}"
        if reason == "stale":
            version = min(sample.policy_version for sample in samples)
            told += f" (of version {version}, the trainer is at {self._segment.policy_version})"
        if reports:
            told += f" ({_why(reports[0])})"
        return printable(self._line(f"{told}: {REMEDIES[reason]}"))

    def _producer(self, producer_id: int) -> str:
        for row in self._segment.producers():
            if row[2] == producer_id:
                return f"producer {producer_id} ({row[4]}, pid {row[3]})"
        return f"producer {producer_id} (gone)"


def _why(report: Trajectory) -> str:
    try:
        return f"sample {report.index} failed: {str(report.meta)[: limits.STATUS_REASON_BYTES]}"
    except ValueError:
        return f"sample {report.index} failed, for a reason that cannot be read"


def _level(reason: str) -> int:
    # Drops on request, drops explained by the trainer's own message, or drops without a loss.
    quiet = ("zero_variance", "filtered", "relayed", _NOT_NEEDED, "malformed", _SUPERSEDED)
    return logging.INFO if reason in quiet else logging.WARNING


def duplicate_error(sample: _core.Trajectory) -> errors.ProtocolError:
    """Return the error for a second sample of an index."""
    return errors.ProtocolError(
        f"trajectory {sample.instance_id!r}[{sample.index}] came twice, now from producer "
        f"{sample.producer_id}; the first was kept. Number the samples of a prompt once, or give "
        "each round of it its own number: round=producer.next_round()"
    )
