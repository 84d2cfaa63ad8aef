"""The difference of each score from its group's baseline, for all groups of a batch in one call.

Invariants:

- Float64 inside. Equal scores, and one alone, give exactly 0; no nan or infinity comes out.
- Groups never touch.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbus_ext import _core

__all__ = ["DEVIATION", "LEAVE_ONE_OUT", "MEAN", "Baseline"]

MEAN: Final[int] = _core.BASELINE_MEAN
"""The score minus the mean of its group."""
LEAVE_ONE_OUT: Final[int] = _core.BASELINE_LEAVE_ONE_OUT
"""The score minus the mean of the others."""
DEVIATION: Final[int] = _core.BASELINE_DEVIATION
"""The score minus the mean, in units of the standard deviation and `Baseline.eps`."""
MAX_SCORE_MAGNITUDE: Final[float] = _core.BASELINE_MAX_SCORE
"""Largest score by magnitude: the difference of two is still finite in float32."""


class Baseline(NamedTuple):
    """What each score of a group is compared with.

    Attributes
    ----------
    kind : int
        `MEAN`, `LEAVE_ONE_OUT` or `DEVIATION`.
    bessel : bool
        Whether the standard deviation divides the squares by n - 1, and not by n.
    eps : float
        Added to the standard deviation.
    """

    kind: int
    bessel: bool = True
    eps: float = 0.0


def relative_scores(
    scores: NDArray[np.float64], sizes: NDArray[np.int64], rule: Baseline
) -> NDArray[np.float64] | None:
    """Compare each score with those of its group."""
    return _core.relative_scores(scores, sizes, rule)
