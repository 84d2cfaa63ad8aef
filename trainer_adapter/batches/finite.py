"""Samples found invalid while packing, for example with a nan on its way to a loss.

Invariant: the error names the sample, so only its group is dropped.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.batch.gather import MAX_LOGPROB, FieldNames, PackedBatch
from shmbus.batch.gather_plan import find_not_finite

__all__ = [
    "NotFiniteError", "SampleError", "group_of_sample", "is_logprob", "not_finite",
    "require_finite",
]  # fmt: skip


class SampleError(ValueError):
    """A sample unfit for a batch; drop only its group."""

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample


class NotFiniteError(SampleError):
    """A sample with a nan, an infinity or a positive logprob at a trained token."""


def require_finite(
    arrays: PackedBatch, trajectories: list[shmbus.Trajectory], names: FieldNames
) -> None:
    """Raise NotFiniteError for the first invalid logprob or non-finite advantage."""
    wrong = np.flatnonzero(~is_logprob(arrays.logprobs))
    token = int(wrong[0]) if len(wrong) else find_not_finite(arrays.advantages)
    name, values = (
        (names.logprobs, arrays.logprobs) if len(wrong) else (names.advantages, arrays.advantages)
    )
    if token >= 0:
        raise not_finite(name, token, float(values[token]), arrays.cu_seqlens, trajectories)


def is_logprob(values: Any) -> Any:
    """Test numbers, in an array or a tensor, for finite and, except for rounding, at most 0."""
    return (values <= MAX_LOGPROB) & (values > -math.inf)


def not_finite(
    name: str | None,
    token: int,
    value: float,
    borders: Sequence[int] | NDArray[np.int32],
    trajectories: list[shmbus.Trajectory],
) -> NotFiniteError:
    """Make the error for one token of the packed row."""
    sample = bisect.bisect_right(borders, token) - 1
    expected = "logprobs of at most 0" if math.isfinite(value) else "finite numbers"
    trajectory = trajectories[sample]
    return NotFiniteError(
        f"trajectory {trajectory.instance_id!r}[{trajectory.index}] of producer "
        f"{trajectory.producer_id}: field {name!r}: expected {expected}, got {value} at token "
        f"{token - int(borders[sample])}; mask the token, or correct what computes it",
        sample,
    )


def group_of_sample(groups: list[shmbus.Group], sample: int) -> int:
    """Return the position of a sample's group."""
    ends = itertools.accumulate(len(group) for group in groups)
    return next(number for number, end in enumerate(ends) if sample < end)
