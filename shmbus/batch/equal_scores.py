"""Scores equal up to rounding: a group of such scores teaches nothing.

The same reward, computed in another order or in float32, differs in its last bits. Divided by the
standard deviation of its group, such a difference would become an advantage of size 1.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

__all__ = ["SCORE_RESOLUTION", "are_equal"]

SCORE_RESOLUTION: Final = 2.0**-20
"""Differences below this share of the larger score are rounding: 8 units of float32's last place,
for a reward that is the sum of a few float32 numbers."""


def are_equal(lowest: Any, highest: Any) -> Any:
    """Tell if scores between these two are equal up to rounding; for numbers or arrays."""
    return highest - lowest <= SCORE_RESOLUTION * np.maximum(np.abs(lowest), np.abs(highest))
