"""Lines of text for people: the trainer's progress, and the state of the bus while it waits.

Invariant: the ledger is read only to write a line, so counting a batch costs almost nothing.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple, TextIO

import shmbus
from shmbus.base.format import several
from shmbus.stash.drops import REMEDIES
from trainer_adapter.batches.batch import Batch
from trainer_adapter.handler.planner import BatchPlanner

#: Seconds between two lines on a terminal. Each reads the ledger, a system call a producer.
TERMINAL_PERIOD_S: Final = 1.0
#: Seconds between two lines in a log file, without overwriting.
LOG_PERIOD_S: Final = 10.0
#: Batches in a rate.
RECENT: Final = 20


class _Last(NamedTuple):
    """A batch's figures for a line, without the batch: its memory is needed."""

    step: int
    groups: list[shmbus.Group]
    sequences: int
    tokens: int
    waited_s: float
    consumer: shmbus.Consumer


class Progress:
    """Counts the batches of a handler, and describes them in one line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._next_s = 0.0
        self._last: _Last | None = None
        self._line = "no batch yet"
        self.waited_s = 0.0

    @property
    def line(self) -> str:
        """The current line, from the ledger; the last line after the handler's close."""
        if self._last is not None:
            with suppress(shmbus.BusClosedError):
                self._line = self._text(self._last, self._last.consumer.stats())
        return self._line

    @classmethod
    def of(cls, wanted: bool | TextIO) -> Progress:
        """Make a Progress for True (stderr), False (no output) or a stream."""
        if isinstance(wanted, bool):
            return cls(sys.stderr if wanted else None)
        if not (hasattr(wanted, "write") and hasattr(wanted, "isatty")):
            raise TypeError(f"progress: expected a bool or a file, got {type(wanted).__name__}")
        return cls(wanted)

    def note(self, batch: Batch, waited_s: float, consumer: shmbus.Consumer) -> None:
        """Count a batch before its yield; write a line if the period is over."""
        self.waited_s += waited_s
        now_s = time.monotonic()
        assert batch.facts is not None, "a handler's batch has them"
        tokens = batch.facts.tokens
        self._recent.append((now_s, tokens))
        sequences = len(batch.instance_ids)
        self._last = _Last(batch.step, batch.groups, sequences, tokens, waited_s, consumer)
        if self._stream is None or now_s < self._next_s:
            return
        terminal = self._stream.isatty()
        self._next_s = now_s + (TERMINAL_PERIOD_S if terminal else LOG_PERIOD_S)
        line = self.line
        self._stream.write(f"\r{line}\x1b[K" if terminal else f"{line}\n")
        self._stream.flush()

    def _text(self, last: _Last, ledger: shmbus.Ledger) -> str:
        """Describe the last batch, and its bus now, in one line."""
        versions = [t.policy_version for group in last.groups for t in group]
        lag = ledger.policy_version - sum(versions) / max(1, len(versions))
        span_s = self._recent[-1][0] - self._recent[0][0]
        tokens = sum(count for _, count in list(self._recent)[1:])
        rate = f", {tokens / span_s:,.0f} tokens/s" if span_s > 0 else ""
        full = 1 - ledger.free / ledger.capacity if ledger.capacity else 0.0
        dropped = sum(ledger.dropped.values())
        return (
            f"step {last.step}: {several(len(last.groups), 'group')}, "
            f"{several(last.sequences, 'sequence')}, {several(last.tokens, 'token')}{rate}; "
            f"waited {last.waited_s:.2f} s; lag {lag:.1f}; ring {full:.0%} full, "
            f"{several(ledger.groups_open, 'group')} open, {several(ledger.producers, 'producer')}"
            + (f", {dropped} dropped" if dropped else "")
        )

    def end(self) -> None:
        """End the line on a terminal; other output then begins on a new line."""
        if self._stream is not None and self._stream.isatty() and self._recent:
            self._stream.write("\n")
            self._stream.flush()


def describe_wait(
    name: str,
    ledger: shmbus.Ledger,
    planner: BatchPlanner[Batch],
    dropped: str = "",
    prompts: str = "",
) -> str:
    """Describe for a message the content of the bus while no batch is due."""
    held, wanted = len(planner.waiting), planner.wanted_text
    text = (
        f"bus {name!r} has {several(ledger.groups_open, 'incomplete group')} with "
        f"{several(ledger.stashed - ledger.ready, 'trajectory')}, {ledger.in_ring} unread, "
        f"{several(ledger.producers, 'producer')} attached"
    )
    out = len(planner.out)
    here = f"{held}{wanted} groups are" if wanted else several(held, "group", "are")
    here += " held for the next batch"
    parts = [
        f"{here}, and {prompts}" if prompts else here,
        text,
        dropped,
        out and f"{out} batch{'es are' if out > 1 else ' is'} out and not acknowledged",
        planner.step_requirement(ledger.leased + ledger.ready),
    ]
    return "; ".join(part for part in parts if part)


class DropNotes:
    """Reports each drop once."""

    def __init__(self, ledger: shmbus.Ledger, max_policy_lag: int | None) -> None:
        self._before: Mapping[str, int] = dict(ledger.dropped)
        self._since = "since this handler was made"
        self._max_policy_lag = max_policy_lag

    def news(self, ledger: shmbus.Ledger, step: int) -> str:
        """Describe the drops since the last call."""
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
        return REMEDIES.get(reason, "see `shmbus status`")
