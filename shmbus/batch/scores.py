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

from shmbus_ext import _core

#: Scores with a difference below this share of the larger score are equal.
SCORE_RESOLUTION: Final[float] = _core.SCORE_RESOLUTION
#: The standard deviation that divides a kind of advantage.
_DEVIATIONS: Final = {
    "dr_grpo": _core.DEVIATION_OF_NONE,
    "rloo": _core.DEVIATION_OF_NONE,
    "batch_std": _core.DEVIATION_OF_ALL,
}
Floats = NDArray[np.float64]


def are_equal(lowest: Any, highest: Any) -> Any:
    """Tell if scores between these two are equal up to rounding; for numbers or arrays."""
    return highest - lowest <= SCORE_RESOLUTION * np.maximum(np.abs(lowest), np.abs(highest))


def relative_scores(
    scores: Floats, sizes: NDArray[np.int64], kind: str, by_n: bool, eps: float
) -> Floats:
    """Return the scores of consecutive groups relative to their group, by a kind of advantage."""
    deviation = _DEVIATIONS.get(kind, _core.DEVIATION_OF_GROUP)
    relative = _core.relative_scores(scores, sizes, deviation, by_n, eps)
    if kind == "rloo":
        return relative * np.repeat(sizes / np.maximum(sizes - 1, 1), sizes)
    return relative
