"""Incomplete groups as text, for ``shmbus inspect --groups``: a row a group, a sign a sample.

Invariant: a pure function of what was read; texts of producers have been escaped there.
"""

from __future__ import annotations

from shmbus._format import fold, show_count, show_duration, table
from shmbus.inspect.groups import Groups
from shmbus.inspect.view_types import GroupCells, SampleCell

__all__ = ["cells_text", "groups_text"]

#: Signs of a row; a larger group is cut, and says so.
_SIGNS = 64
_SIGN = {"there": "#", "failed": "x", "asked": "?", "begun": "+"}
_MISSING = "."
#: Kinds of failures that are told in words.
_FAILURES = 20


def groups_text(found: Groups) -> str:
    """Lay out incomplete groups."""
    omitted = f", and {show_count(found.omitted)} more" if found.omitted else ""
    lines = [f"{show_count(len(found.groups))} incomplete groups, the oldest first{omitted}"]
    if found.groups:
        head = ("instance", "present>", "waits>", "samples", "from producers", "begun by")
        lines.append(table(head, [_row(group) for group in found.groups]))
        lines.append(f"  # there   {_MISSING} missing   + begun   x failed   ? asked for again")
    alike: dict[str, list[str]] = {}
    for group in found.groups:
        for cell in group.cells:
            if cell.state in ("failed", "asked"):
                alike.setdefault(_why(cell), []).append(f"{group.instance_id}[{cell.index}]")
    told = list(alike.items())[:_FAILURES]
    lines += [f"  failed: {fold(samples)}, {why}" for why, samples in told]
    if len(alike) > _FAILURES:
        lines.append(f"  and {show_count(len(alike) - _FAILURES)} more kinds of failures: --json")
    return "\n".join(lines)


def _row(group: GroupCells) -> tuple[str, ...]:
    signs = dict.fromkeys(range(min(group.size, _SIGNS)), _MISSING)
    signs |= {cell.index: _SIGN[cell.state] for cell in group.cells if cell.index < _SIGNS}
    producers = sorted(
        {c.producer for c in group.cells if c.producer is not None and c.state != "begun"}
    )
    makers = sorted(
        {c.producer for c in group.cells if c.producer is not None and c.state == "begun"}
    )
    round = "" if group.round is None else f" round {group.round}"
    return (
        group.instance_id + round + ("" if group.split == "train" else f" ({group.split})"),
        f"{group.present} of {group.need or group.size}",
        show_duration(group.age_s),
        "".join(signs[index] for index in sorted(signs)) + ("..." if group.size > _SIGNS else ""),
        ", ".join(map(str, producers)),
        ", ".join(map(str, makers)),
    )


def _why(cell: SampleCell) -> str:
    again = "" if cell.state == "failed" else "; asked for again"
    if cell.taken_by is not None:
        again += f", producer {cell.taken_by} makes it"
    times = "once" if cell.attempts == 1 else f"{cell.attempts} times"
    return f"{times}: {cell.reason}{again}"


def cells_text(group: GroupCells) -> str:
    """Lay out the samples of one group, a row a sample."""
    rows = [
        (
            str(cell.index),
            cell.state,
            "" if cell.score is None else f"{cell.score:g}",
            "" if cell.producer is None else str(cell.producer),
            "" if cell.age_s is None else show_duration(cell.age_s),
            _more(cell),
        )
        for cell in group.cells[:_SIGNS]
    ]
    hidden = len(group.cells) - len(rows) + group.cells_omitted
    more = f"\n  and {show_count(hidden)} more: --json" if hidden else ""
    head = ("sample>", "what", "score>", "producer>", "since>", "")
    return table(head, rows) + more


def _more(cell: SampleCell) -> str:
    if cell.state not in ("failed", "asked"):
        return ""
    again = "" if cell.taken_by is None else f"; producer {cell.taken_by} makes it again"
    times = "once" if cell.attempts == 1 else f"{cell.attempts} times"
    return f"failed {times}: {cell.reason or 'no reason given'}{again}"
