"""What a figure is near: a bound, measured beside it and in turns with it, in the same run.

A machine's memory and scheduler change from minute to minute. So a row of the report is judged by
what the same minute gave its bound: a run lies between two measurements of it, and its share is
taken of those two. Rows without a bound of their own are watched for what others took.

Invariants:

- A share is of a run and of the bound right before and behind it, never of a mean over all runs.
- An interval is the one of the median: the ranks around it that hold it in `CONFIDENCE` of all
  cases. Of too few values for that it is the lowest and the highest.
- Where a bound's interval is wider than `MOVED`, the machine was not quiet, and there is no
  verdict.
- Nothing here starts a process; a clock is an argument.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["CONFIDENCE", "MOVED", "NARROW", "Beside", "Bound", "interval", "turns", "width"]

#: Of all series of runs, those whose interval holds the median.
CONFIDENCE: Final = 0.95
#: A bound that moved by more than this part of itself judges nothing.
MOVED: Final = 0.10
#: An interval of shares that is narrower than this part of them needs no further run.
NARROW: Final = 0.05


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median of independent values.

    Parameters
    ----------
    values : sequence of float
        At least one.

    Returns
    -------
    (float, float)
        The k-th lowest and the k-th highest, for the largest k whose pair holds the median in
        `CONFIDENCE` of all cases: the sign test's interval. With fewer than six values no pair
        does, and the lowest and the highest are returned.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, rank = 0.0, 0
    while rank < count // 2:
        # What lies outside of the next narrower pair: so few heads, or tails, of `count` coins.
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[-rank]


def width(values: Sequence[float]) -> float:
    """Return the width of the interval of the median, as a part of its lower end."""
    low, high = interval(values)
    if low == high:
        return 0.0
    return high / low - 1 if low > 0 else math.inf


def turns(
    least: int,
    most: int,
    seconds: float,
    enough: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[int]:
    """Yield the number of each turn, from 1, until the turns so far are enough.

    Parameters
    ----------
    least, most : int
        Turns that there are in any case, and at most.
    seconds : float
        From now; after them no turn begins but the least.
    enough : callable
        Asked from the `least`-th turn on whether a further one is not needed.
    clock : callable
        Returns seconds.
    """
    deadline = clock() + seconds
    for number in range(1, most + 1):
        if number > least and (clock() >= deadline or enough()):
            return
        yield number


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a row cannot beat while it does what it does.

    Attributes
    ----------
    name : str
        What was measured: "memcpy, one core".
    unit : str
        Of its figures and of the row's: "GB/s", "us".
    sense : {"rate", "cost"}
        Whether more is better, or less.
    """

    name: str
    unit: str
    sense: Literal["rate", "cost"] = "rate"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A row's runs and what its bound came to beside them.

    Attributes
    ----------
    bound : Bound
    values : tuple of float
        Of the row's runs, in the bound's unit.
    bounds : tuple of tuples of float
        For each run what was measured of its bound around it: before and behind it, or in its turn.
    """

    bound: Bound
    values: tuple[float, ...]
    bounds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        assert self.values, "a bound stands beside at least one run"
        assert len(self.bounds) == len(self.values) and all(self.bounds), "each run has its own"

    @property
    def measured(self) -> list[float]:
        """Everything that was measured of the bound."""
        return [one for around in self.bounds for one in around]

    @property
    def ratios(self) -> list[float]:
        """Each run in terms of its bound: its value over the mean of those around it."""
        return [
            value / statistics.mean(around)
            for value, around in zip(self.values, self.bounds, strict=True)
        ]

    @property
    def shares(self) -> list[float]:
        """The part of its bound that each run reached; 1 is all of it, for rates and for costs."""
        ratios = self.ratios
        if self.bound.sense == "rate":
            return ratios
        return [1 / ratio if ratio > 0 else math.inf for ratio in ratios]

    @property
    def narrow(self) -> bool:
        """Whether no further run is needed."""
        return len(self.values) > 1 and width(self.ratios) <= NARROW and not self.not_quiet

    @property
    def not_quiet(self) -> str:
        """Why there can be no verdict; nothing if the bound stood still."""
        moved = width(self.measured)
        if moved <= MOVED:
            return ""
        return f"{self.bound.name} moved by {moved:.0%} meanwhile"

    def __str__(self) -> str:
        return (
            f"{self.bound.name}: {statistics.median(self.measured):,.4g} {self.bound.unit}, "
            f"{statistics.median(self.shares):.2g} of it"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as what json can write."""
        return {
            "name": self.bound.name,
            "unit": self.bound.unit,
            "sense": self.bound.sense,
            "median": statistics.median(self.measured),
            "interval": interval(self.measured),
            "share": statistics.median(self.shares),
            "share_interval": interval(self.shares),
            "values": self.values,
            "bounds": self.bounds,
        }
