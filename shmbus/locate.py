"""Where the fields of leased trajectories lie, for who copies them by other means than `gather`.

Invariants:

- Addresses are good for as long as the trajectories are leased: nothing here holds their space.
- What `gather` would refuse is refused here, with the same errors.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus.gather import FieldNames
from shmbus_ext import _core

__all__ = ["KINDS", "Places", "find_not_finite", "locate", "mentioning"]

#: The dtype of each number that a table gives for one.
KINDS: Final[tuple[np.dtype[Any], ...]] = tuple(np.dtype(name) for name in _core.ELEMENT_KINDS)


class Places(msgspec.Struct, frozen=True):
    """Where the fields of S trajectories lie in one mapping.

    The fields are, in this order: tokens, loss mask, logprobs, advantages.

    Attributes
    ----------
    base : int
        Address of the mapping in this process.
    nbytes : int
        Its length.
    offsets : int64 [S, 4]
        Bytes from `base` to the first element; a multiple of 64; -1 for a field that is not there.
    kinds : int64 [S, 4]
        Position of its dtype in `KINDS`; -1 for a field that is not there.
    lengths : int64 [S]
        Tokens of each trajectory.
    """

    base: int
    nbytes: int
    offsets: NDArray[np.int64]
    kinds: NDArray[np.int64]
    lengths: NDArray[np.int64]


def locate(trajectories: list[_core.Trajectory], names: FieldNames | None = None) -> Places:
    """Tell where the fields of trajectories lie.

    Parameters
    ----------
    trajectories : list[Trajectory]
        Leased, of one Consumer; at least one.
    names : FieldNames, optional
        How the fields are called.

    Returns
    -------
    Places

    Raises
    ------
    ValueError
        As for `shmbus.gather.sequence_lengths`; for no trajectory; for those of several Consumers.
    """
    base, nbytes, table = _core.locate(trajectories, (names or FieldNames()).as_tuple())
    return Places(base, nbytes, table[:, :4], table[:, 4:8], table[:, 8])


def find_not_finite(values: NDArray[np.float32]) -> int:
    """Find the first nan or infinity.

    Parameters
    ----------
    values : float32 [n], contiguous

    Returns
    -------
    int
        Its position, or -1.

    Raises
    ------
    TypeError
        For another dtype or layout.
    """
    return _core.find_not_finite(values)


def mentioning(trajectories: list[_core.Trajectory], word: str) -> list[int]:
    """Find the trajectories whose meta contains a word, without decoding any.

    Parameters
    ----------
    trajectories : list[Trajectory]
        Leased.
    word : str
        Looked for in the encoded meta: as a key, as a value, or within one.

    Returns
    -------
    list[int]
        Their positions, ascending.

    Raises
    ------
    BusClosedError
        One was acknowledged.
    """
    return _core.mentioning(trajectories, word.encode())
