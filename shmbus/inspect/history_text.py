"""Events, and the history of a group, as text for ``shmbus events``.

Invariant: pure functions of what was read; texts of producers have been escaped there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shmbus._format import show_count, show_duration
from shmbus.inspect.groups_text import cells_text
from shmbus.inspect.history import GroupHistory
from shmbus.inspect.view_types import BusEvent

__all__ = ["events_text", "history_text"]

_WORDS = {
    "daemon_began": "the daemon began",
    "producer_came": "came",
    "producer_left": "left",
    "producer_died": "died",
    "producer_gone": "left or died",
    "trainer_came": "came to take groups",
    "trainer_left": "left",
    "trainer_lost": "lost its connection",
    "paused": "producers were paused",
    "resumed": "producers were resumed",
    "requests_paused": "requests are given out one at a time",
    "requests_resumed": "requests are given out again",
    "policy_version": "policy version",
    "leased": "leased to",
    "given_back": "given back",
    "acknowledged": "acknowledged by",
    "dropped": "dropped",
    "failed": "failed for good",
    "asked": "failed, and asked for again",
}
_STATES = {
    "open": "incomplete",
    "ready": "complete, and waits for a trainer",
    "leased": "leased",
    "gone": "not on the bus",
}


def events_text(events: Sequence[BusEvent]) -> list[str]:
    """Lay out events, a line each."""
    return [_line(event) for event in events]


def _line(event: BusEvent) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.unix_s))
    word = _WORDS.get(event.kind, event.kind)
    if not event.instance_id:
        parts = [event.who, word] if event.kind.startswith(("producer", "trainer")) else [word]
        text = f"{'s' * (' ' in event.text)} {event.text}" if event.kind == "policy_version" else ""
        if event.kind in ("paused", "requests_paused"):
            text = f": {event.text or 'no reason given'}"
        return f"{at}  {' '.join(parts)}{text}"
    group = event.instance_id + ("" if event.round is None else f" round {event.round}")
    if event.split != "train":
        group += f" ({event.split})"
    sample = "" if event.index is None else f"[{event.index}]"
    text = f"{at}  {group}{sample}  {word}"
    if event.kind in ("failed", "asked"):
        times = "" if event.count < 2 else f" for the {event.count}th time"
        by = f" at {event.who}" if event.who else ""
        return f"{text}{times}{by}: {event.text or 'no reason given'}"
    if event.kind == "dropped":
        by = f" by {event.who}" if event.who else ""
        return f"{text}{by} as {event.text}"
    return f"{text} {event.who}".rstrip()


def history_text(name: str, found: GroupHistory) -> str:
    """Lay out the history of a group."""
    state = _STATES[found.state]
    if found.state == "leased":
        state = f"leased to {found.holder} for {show_duration(found.held_s)}"
    lines = [f"{name}  {state}"]
    if found.group is not None:
        group = found.group
        lines[0] += f"; {show_count(group.present)} of {group.need or group.size or '?'} samples"
        lines.append(cells_text(group))
    lines += [f"  {line}" for line in events_text(found.events)]
    if found.problem:
        lines.append(f"  {found.problem}")
    return "\n".join(lines)
