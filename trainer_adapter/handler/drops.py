"""What the bus has dropped since it was told last, and why, for messages to a trainer that waits.

Invariant: the ledger is compared only where a message is written, so a batch costs nothing here.
The text says from when on it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import shmbus
from shmbus._format import several

__all__ = ["DropNotes", "REASONS_IN_WORDS"]

#: Why samples are dropped, and what to do, by the ledger's reasons.
REASONS_IN_WORDS: Final[dict[str, str]] = {
    "duplicate": (
        "their index was there already; a prompt that is sampled again needs its own round=, from "
        "producer.next_round()"
    ),
    "size_mismatch": (
        "their group_size differs from their group's; a prompt that is sampled again needs its own "
        "round=, from producer.next_round()"
    ),
    "surplus": (
        "their group was complete; a prompt that is sampled again needs its own round=, from "
        "producer.next_round()"
    ),
    "timeout": "their groups stayed incomplete for group_timeout",
    "stale": "older than max_policy_lag allows; do workers pass policy_version=?",
    "zero_variance": "all scores of their group are the same, under skip_zero_variance",
    "overflow": "their incomplete groups held more than max_stash_bytes",
    "malformed": "their fields do not fit together; the log names each group",
    "corrupt": "their records are damaged; see `shmbus doctor`",
    "filtered": "keep_group or score_group refused their group",
    "failed": "a sample of their group failed for good; see `shmbus status`",
}


class DropNotes:
    """Says once what was dropped.

    Parameters
    ----------
    ledger : shmbus.Ledger
        Of now: what was dropped before is no news.
    max_policy_lag : int or None
    """

    def __init__(self, ledger: shmbus.Ledger, max_policy_lag: int | None) -> None:
        self._before: Mapping[str, int] = dict(ledger.dropped)
        self._since = "since this handler was made"
        self._max_policy_lag = max_policy_lag

    def news(self, ledger: shmbus.Ledger, step: int) -> str:
        """Describe what was dropped since the last call.

        Parameters
        ----------
        ledger : shmbus.Ledger
        step : int
            The step that is waited for.

        Returns
        -------
        str
            Empty if nothing was.
        """
        counts = {
            reason: count - self._before.get(reason, 0)
            for reason, count in ledger.dropped.items()
            if count > self._before.get(reason, 0)
        }
        if not counts:
            return ""
        since, self._since = self._since, f"since the last such note, before step {step}"
        self._before = dict(ledger.dropped)
        each = [f"{n} {reason} ({self._why(reason, ledger)})" for reason, n in counts.items()]
        return (
            f"{several(sum(counts.values()), 'sample', 'were')} dropped {since}: {', '.join(each)}"
        )

    def _why(self, reason: str, ledger: shmbus.Ledger) -> str:
        if reason == "stale" and self._max_policy_lag is not None:
            return (
                f"the trainer is at version {ledger.policy_version}, they are below "
                f"{ledger.policy_version - self._max_policy_lag}; do workers pass policy_version=?"
            )
        return REASONS_IN_WORDS.get(reason, "see `shmbus status`")
