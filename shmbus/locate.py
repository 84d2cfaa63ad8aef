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

__all__ = [
    "KINDS",
    "ROW_WORDS",
    "GatherTable",
    "find_not_finite",
    "mapping_of",
    "mentioning",
    "plan_gather",
]

#: Words of a row of a GatherTable.
ROW_WORDS: Final[int] = _core.ROW_WORDS

#: The dtype of each number that a table gives for one.
KINDS: Final[tuple[np.dtype[Any], ...]] = tuple(np.dtype(name) for name in _core.ELEMENT_KINDS)


class GatherTable(msgspec.Struct, frozen=True):
    """A table that a kernel gathers S trajectories by, T tokens in all, in one block of bytes.

    Attributes
    ----------
    nbytes : int
        Of the block.
    tokens, longest : int
        T, and the most of one trajectory.
    chunks_at, borders_at : int
        Where in the block the parts begin that follow the rows. A multiple of 64, as `nbytes` is.
    launches : list
        Of chunks that lie behind each other, of trajectories with the same fields: the first chunk,
        how many, and position in `KINDS` of the dtypes of tokens, loss mask, logprobs and
        advantages, -1 for what is not there.
    """

    nbytes: int
    tokens: int
    longest: int
    chunks_at: int
    borders_at: int
    launches: list[tuple[int, int, tuple[int, int, int, int]]]


def plan_gather(
    trajectories: list[_core.Trajectory],
    names: FieldNames | None,
    memory: NDArray[np.uint8],
    *,
    shift: int,
    chunk_tokens: int,
) -> GatherTable:
    """Tell a kernel where the fields of trajectories lie, and where they go in a packed batch.

    Parameters
    ----------
    trajectories : list[Trajectory]
        Leased, of one Consumer; at least one.
    names : FieldNames, optional
        How the fields are called.
    memory : uint8 [n], contiguous
        Gets the table; nothing, if it has less than the table's `nbytes`. Rows, int64
        [S, ROW_WORDS], each with the addresses of tokens, loss mask, logprobs and advantages (each
        a multiple of 64; 0 for what is not there), the tokens, where they begin in the batch, and
        two words of zeros for the caller. Chunks, int32 [C, 2], each a trajectory's position and a
        token of it. The batch's borders, int32 [S + 1].
    shift : int
        Added to all addresses: what the device's are off from this process's.
    chunk_tokens : int
        Most tokens of a chunk.

    Returns
    -------
    GatherTable

    Raises
    ------
    ValueError
        As for `shmbus.gather.gather`; for no trajectory; for those of several Consumers.
    """
    planned = _core.plan_gather(
        trajectories, (names or FieldNames()).as_tuple(), memory, shift, chunk_tokens
    )
    return GatherTable(*planned)


def mapping_of(trajectory: _core.Trajectory) -> tuple[int, int]:
    """Return address and bytes of the mapping that a trajectory lies in."""
    return _core.mapping_of(trajectory)


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
