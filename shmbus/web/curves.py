"""The last minutes of one bus as curves: a value a poll, the oldest forgotten.

Invariants:

- Bounded: `settings.HISTORY` points of `NAMES`, and no time without a poll is drawn over: it is a
  point without values.
- Mean and percentiles are of what was delivered between two polls, by the differences of counters.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

from shmbus.web import settings

__all__ = ["NAMES", "Curves", "percentile"]

#: What a point has, in this order, after its time.
NAMES: Final = (
    "committed", "acknowledged", "dropped", "tokens", "bytes", "fill",
    "reward", "age50", "age99", "version",
)  # fmt: skip

Point = list[float | None]


class Curves:
    """The points of one bus."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=settings.HISTORY)
        self._before: dict[str, Any] = {}

    def add(self, picture: dict[str, Any]) -> Point:
        """Add the point of a poll."""
        rates = picture.get("rates", {})
        delivered = picture.get("delivered", {})
        reward = _since_before(delivered, self._before, "score")
        age = _since_before(delivered, self._before, "age")
        self._before = delivered
        values: dict[str, float | None] = {
            **{name: rates.get(name) for name in NAMES[:5]},
            "fill": picture["used"] / picture["capacity"],
            "reward": None if reward is None else reward[2] / max(1, sum(reward[1])),
            "age50": None if age is None else percentile(age[0], age[1], 0.5),
            "age99": None if age is None else percentile(age[0], age[1], 0.99),
            "version": picture["policy_version"],
        }
        point: Point = [picture["now"], *(_rounded(values[name]) for name in NAMES)]
        self.points.append(point)
        return point


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def _since_before(
    now: dict[str, Any], before: dict[str, Any], name: str
) -> tuple[list[float], list[int], float] | None:
    """Bounds, buckets and sum of what came since; None where nothing did."""
    if name not in now or name not in before:
        return None
    new, old = now[name], before[name]
    buckets = [a - b for a, b in zip(new["buckets"], old["buckets"], strict=True)]
    if sum(buckets) <= 0 or min(buckets) < 0:
        return None
    return new["bounds"], buckets, new["sum"] - old["sum"]


def percentile(bounds: list[float], buckets: list[int], part: float) -> float:
    """Estimate a percentile of a histogram, by straight lines within its buckets."""
    wanted = part * sum(buckets)
    below = 0.0
    for number, count in enumerate(buckets):
        if count and below + count >= wanted:
            low = bounds[number - 1] if number else min(0.0, bounds[0])
            high = bounds[number] if number < len(bounds) else low
            return low + (high - low) * (wanted - below) / count
        below += count
    return bounds[-1]
