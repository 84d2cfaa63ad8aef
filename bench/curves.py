"""How the stash's cost grows with the number of open groups: not one point, but a curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench import stash

__all__ = ["open_groups"]


def open_groups(
    counts: Sequence[int], adds: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure each number of open groups, in both orders of arrival.

    Returns
    -------
    list of dict
        ``order``, ``open_groups`` and ``ns``: processor nanoseconds of one add.
    """
    points: dict[tuple[str, int], dict[str, Any]] = {}
    for many in counts[1:]:
        say(f"the stash with {many:,} open groups")
        for row in stash.measure((counts[0], many), adds):
            order = row.name.removeprefix("stash-")
            for figures, count in ((row.figures["few"], counts[0]), (row.figures["many"], many)):
                point = {"order": order, "open_groups": count, "ns": figures["ns"]}
                points.setdefault((order, count), point)
    return list(points.values())
