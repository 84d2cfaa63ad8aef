"""Scores within a group: equal up to rounding, or relative to each other.

The same reward, computed in a different order or in float32, changes in its last bits. Divided by
the standard deviation of its group, the difference would become an advantage of size 1.

Invariant: a group of one, and a group of equal scores, give 0; finite scores never give nan or an
infinity.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["SCORE_RESOLUTION", "are_equal", "relative_scores"]

#: Scores with a difference below this share of the larger score are equal: 8 units of float32's
#: last place, for a reward summed from a few float32 numbers.
SCORE_RESOLUTION: Final = 2.0**-20
Floats = NDArray[np.float64]


def are_equal(lowest: Any, highest: Any) -> Any:
    """Tell if scores between these two are equal up to rounding; for numbers or arrays."""
    return highest - lowest <= SCORE_RESOLUTION * np.maximum(np.abs(lowest), np.abs(highest))


def relative_scores(
    scores: Floats, sizes: NDArray[np.int64], kind: str, by_n: bool, eps: float
) -> Floats:
    """Return the scores of consecutive groups relative to their group, by a kind of advantage."""
    sizes = sizes[sizes > 0]
    if not len(sizes):
        return np.zeros(0)
    distances = _distances(scores, sizes)
    if kind == "dr_grpo":
        return distances
    if kind == "rloo":
        return distances * np.repeat(sizes / np.maximum(sizes - 1, 1), sizes)
    if kind == "batch_std":
        whole = np.array([len(scores)])
        return distances / _deviations(_distances(scores, whole), whole, by_n, eps)
    return distances / np.repeat(_deviations(distances, sizes, by_n, eps), sizes)


def _distances(scores: Floats, sizes: NDArray[np.int64]) -> Floats:
    """Return the scores minus the mean of their group; 0 for equal scores."""
    starts = np.cumsum(sizes) - sizes
    means = np.add.reduceat(scores, starts) / sizes
    lowest, highest = np.minimum.reduceat(scores, starts), np.maximum.reduceat(scores, starts)
    level = np.repeat(are_equal(lowest, highest), sizes)
    return np.where(level, 0.0, scores - np.repeat(means, sizes))


def _deviations(distances: Floats, sizes: NDArray[np.int64], by_n: bool, eps: float) -> Floats:
    """Return the standard deviation of each group, by n - 1 or n, plus eps; 1 for equal scores."""
    starts = np.cumsum(sizes) - sizes
    largest = np.maximum.reduceat(np.abs(distances), starts)
    # In units of the largest distance no square can under- or overflow.
    unit = np.where(largest > 0, largest, 1.0)
    squares = np.add.reduceat((distances / np.repeat(unit, sizes)) ** 2, starts)
    counts = sizes if by_n else np.maximum(sizes - 1, 1)
    with np.errstate(over="ignore"):
        found = unit * (np.sqrt(squares / counts) + eps / unit)
    return np.where(largest > 0, found, 1.0)
