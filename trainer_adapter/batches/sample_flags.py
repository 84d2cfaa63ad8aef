"""Requests of single samples, in their meta: an advantage of zero, or no part in the loss.

Invariants:

- A sample never leaves its group: its score counts for the others' baseline, and it is
  acknowledged with them.
- Only meta that contains one of the words is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.batch.gather import PackedBatch
from shmbus.batch.gather_plan import mentioning
from trainer_adapter.scored_group import TRUNCATED_REASONS, meta_value

__all__ = [
    "Truncated",
    "apply_flags",
    "count_truncated",
    "is_truncated",
    "request_words",
    "sample_flags",
]

Truncated = Literal["keep", "mask", "drop"]

#: Words in an encoded meta that may be a request.
ZEROING_WORDS: Final = (b"set_advantage_to_zero",)
TRUNCATED_WORDS: Final = tuple(reason.encode() for reason in sorted(TRUNCATED_REASONS))

#: Bits of a sample's flags: no token of it is trained; its advantages are 0.
MASKED: Final = 1
ZEROED: Final = 2


def is_truncated(group: shmbus.Group) -> bool:
    """Whether a sample of a leased group was truncated, by its ``meta["finish_reason"]``."""
    trajectories = group.trajectories
    return any(
        meta_value(trajectories[position].meta, "finish_reason") in TRUNCATED_REASONS
        for position in mentioning(trajectories, TRUNCATED_WORDS)
    )


def count_truncated(groups: list[shmbus.Group]) -> int:
    """Return how many samples of leased groups were truncated."""
    trajectories = [t for group in groups for t in group.trajectories]
    return sum(
        meta_value(trajectories[position].meta, "finish_reason") in TRUNCATED_REASONS
        for position in mentioning(trajectories, TRUNCATED_WORDS)
    )


def request_words(truncated: Truncated) -> tuple[bytes, ...]:
    """Return the words of which each flagged sample's meta contains one."""
    return ZEROING_WORDS + TRUNCATED_WORDS if truncated == "mask" else ZEROING_WORDS


def sample_flags(
    trajectories: list[shmbus.Trajectory], truncated: Truncated = "keep"
) -> NDArray[np.uint8] | None:
    """Collect the requests of samples."""
    asked = _requesting(trajectories, ZEROING_WORDS, "set_advantage_to_zero", bool)
    cut = []
    if truncated == "mask":
        # By the value: servers that set the key set it in every sample.
        cut = _requesting(
            trajectories, TRUNCATED_WORDS, "finish_reason", TRUNCATED_REASONS.__contains__
        )
    if not asked and not cut:
        return None
    flags = np.zeros(len(trajectories), np.uint8)
    flags[asked] |= ZEROED
    flags[cut] |= MASKED
    return flags


def apply_flags(flags: NDArray[np.uint8], arrays: PackedBatch) -> None:
    """Apply the flags of `sample_flags` to packed arrays on the host."""
    borders = arrays.cu_seqlens
    for position in np.flatnonzero(flags).tolist():
        tokens = slice(borders[position], borders[position + 1])
        if flags[position] & ZEROED:
            arrays.advantages[tokens] = 0
        if flags[position] & MASKED:
            arrays.loss_mask[tokens] = False
            arrays.logprobs[tokens] = 0


def _requesting(
    trajectories: list[shmbus.Trajectory],
    words: tuple[bytes, ...],
    key: str,
    asks: Callable[[Any], bool],
) -> list[int]:
    return [
        position
        for position in mentioning(trajectories, words)
        if asks(meta_value(trajectories[position].meta, key))
    ]
