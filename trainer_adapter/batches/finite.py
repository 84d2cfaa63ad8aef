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


class SampleError(ValueError):
    """A sample unfit for a batch; drop only its group."""

    def __init__(self, message: str, sample: int) -> None:
        super().__init__(message)
        self.sample = sample


class NotFiniteError(SampleError):
    """A sample with a nan, an infinity or a positive logprob at a trained token."""


def wrong_value(
    arrays: PackedBatch, trajectories: list[shmbus.Trajectory], names: FieldNames
) -> SampleError:
    """Make the error for the first invalid mask, logprob or advantage."""
    found = wrong_mask(trajectories, names)
    if found is not None:
        return found
    wrong = np.flatnonzero(~is_logprob(arrays.logprobs))
    name, values = names.logprobs, arrays.logprobs
    if not len(wrong):
        wrong = np.flatnonzero(~np.isfinite(arrays.advantages))
        name, values = names.advantages, arrays.advantages
    token = int(wrong[0])
    return not_finite(name, token, float(values[token]), arrays.cu_seqlens, trajectories)


def wrong_mask(trajectories: list[shmbus.Trajectory], names: FieldNames) -> SampleError | None:
    """Make the error for the first mask with a value other than 0 and 1, if any."""
    for sample, t in enumerate(trajectories):
        mask = None if names.loss_mask is None else t.get(names.loss_mask)
        if mask is None:
            continue
        values = mask.view(np.uint8) if mask.dtype == np.bool_ else mask
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            return SampleError(
                f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field "
                f"{names.loss_mask!r}: expected 0 or 1 for each token, got {values[wrong[0]]} at "
                f"token {wrong[0]}; put 1 for sampled tokens, 0 for the rest",
                sample,
            )
    return None


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
