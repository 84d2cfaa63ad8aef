"""Single samples without a part in the loss: by their meta, or by their age.

Invariants:

- A sample never leaves its group: it is acknowledged with the group, and its score counts for the
  baseline except under "exclude".
- Only meta with one of the words is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.batch.gather import MASKED, ZEROED, mentioning
from trainer_adapter.scored_group import TRUNCATED_REASONS, meta_value

Truncated = Literal["keep", "mask", "exclude", "drop"]
Stale = Literal["drop", "mask", "exclude"]
#: Tests a sample's age.
IsOld = Callable[[shmbus.Trajectory], bool]

#: Options to keep a sample in its group and out of the loss.
_WITHHELD: Final = ("mask", "exclude")
#: Words in an encoded meta, a possible request.
ZEROING_WORDS: Final = (b"set_advantage_to_zero",)
TRUNCATED_WORDS: Final = tuple(reason.encode() for reason in sorted(TRUNCATED_REASONS))


class Withholding(NamedTuple):
    """Samples without a part in the loss, or in loss and baseline."""

    truncated: Truncated = "keep"
    #: With `is_old`: "mask" or "exclude" for samples beyond the age.
    stale: Stale = "drop"
    is_old: IsOld | None = None

    @property
    def excludes(self) -> bool:
        """True if samples may be left out of the baseline."""
        return "exclude" in (self.truncated, self.stale)

    def excluded(self, trajectories: list[shmbus.Trajectory]) -> NDArray[np.bool_] | None:
        """Return a mask of the samples outside the baseline, or None."""
        found = np.zeros(len(trajectories), np.bool_)
        if self.truncated == "exclude":
            found[_truncated(trajectories)] = True
        if self.stale == "exclude":
            found[self.old(trajectories)] = True
        return found if found.any() else None

    def old(self, trajectories: list[shmbus.Trajectory]) -> list[int]:
        """Return the positions of samples withheld for their age."""
        is_old = self.is_old
        return [] if is_old is None else [at for at, t in enumerate(trajectories) if is_old(t)]


def is_truncated(group: shmbus.Group) -> bool:
    """Return True if ``meta["finish_reason"]`` reports a truncated sample in a leased group."""
    return bool(_truncated(group.trajectories))


def count_truncated(groups: list[shmbus.Group]) -> int:
    """Count the truncated samples of leased groups."""
    return len(_truncated([t for group in groups for t in group.trajectories]))


def sample_flags(
    trajectories: list[shmbus.Trajectory], withholding: Withholding
) -> NDArray[np.uint8] | None:
    """Collect the flags of samples; None without flags."""
    asked = _requesting(trajectories, ZEROING_WORDS, "set_advantage_to_zero", bool)
    cut = _truncated(trajectories) if withholding.truncated in _WITHHELD else []
    cut = cut + withholding.old(trajectories)
    if not asked and not cut:
        return None
    flags = np.zeros(len(trajectories), np.uint8)
    flags[asked] |= ZEROED
    flags[cut] |= MASKED
    return flags


def _truncated(trajectories: list[shmbus.Trajectory]) -> list[int]:
    # By the value: servers that set the key set it in every sample.
    return _requesting(
        trajectories, TRUNCATED_WORDS, "finish_reason", TRUNCATED_REASONS.__contains__
    )


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
