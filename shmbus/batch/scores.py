"""Scores within a group: equal up to rounding, or relative to each other.

The same reward, computed in another order or in float32, differs in its last bits. Divided by the
standard deviation of its group, such a difference would become an advantage of size 1.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from shmbus_ext import _core
from shmbus_ext._core import relative_scores

__all__ = ["RELATIVE_KINDS", "SCORE_RESOLUTION", "are_equal", "relative_scores"]

#: Scores whose difference is below this share of the larger score are equal.
SCORE_RESOLUTION: Final[float] = _core.SCORE_RESOLUTION
#: Kinds of `relative_scores`, by the name of an advantage.
RELATIVE_KINDS: Final[dict[str, int]] = {
    "grpo": _core.BY_DEVIATION,
    "dr_grpo": _core.CENTRED,
    "rloo": _core.TO_OTHERS,
    "batch": _core.BY_DEVIATION,
    "batch_std": _core.BY_ALL_DEVIATION,
}


def are_equal(lowest: Any, highest: Any) -> Any:
    """Tell if scores between these two are equal up to rounding; for numbers or arrays."""
    return highest - lowest <= SCORE_RESOLUTION * np.maximum(np.abs(lowest), np.abs(highest))
