"""The cost of the stash by the number of open groups, as a curve."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.rows import stash
from bench.rows.row import Row

__all__ = ["open_groups"]


def open_groups(
    counts: Sequence[int], adds: int, say: Callable[[str], None], measured: Sequence[Row] = ()
) -> list[dict[str, Any]]:
    """Measure each number of open groups beside the first one, in both orders of arrival.

    Parameters
    ----------
    counts : sequence of int
    adds : int
        Timed at each.
    say : callable
        Told what is under way.
    measured : sequence of Row
        Those of the stash that are there already: what they have measured is not measured again.

    Returns
    -------
    list of dict
        ``order``, ``open_groups`` and ``ns``: processor nanoseconds of one add. The first number,
        which all others are compared with, has the median of the runs beside them.
    """
    runs: dict[tuple[str, int], list[float]] = {}
    for many in counts[1:]:
        pair = (counts[0], many)
        there = [row for row in measured if stash.groups_of(row) == pair]
        if not there:
            say(f"the stash with {many:,} open groups")
        for row in there or stash.measure(pair, adds):
            order = row.name.removeprefix("stash-")
            runs.setdefault((order, counts[0]), []).append(row.figures["few"]["ns"])
            runs.setdefault((order, many), []).append(row.figures["many"]["ns"])
    return [
        {"order": order, "open_groups": count, "ns": statistics.median(ns)}
        for (order, count), ns in runs.items()
    ]
