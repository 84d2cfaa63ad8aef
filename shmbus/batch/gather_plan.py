"""Where the fields of leased trajectories lie, for copies by other means than `gather`.

Invariants:

- Addresses are valid while the trajectories are leased: nothing here holds their space.
- This refuses the trajectories that `gather` refuses, with the same errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus.batch.baseline import Baseline
from shmbus.batch.field_presence import check_presence
from shmbus.batch.gather import FieldNames
from shmbus_ext import _core

__all__ = [
    "CHUNK_WORDS",
    "KINDS",
    "GatherTable",
    "find_not_finite",
    "mapping_of",
    "mentioning",
    "plan_gather",
]

#: Words of a chunk of a GatherTable.
CHUNK_WORDS: Final[int] = _core.CHUNK_WORDS

#: The dtype of each number that a table gives for one.
KINDS: Final[tuple[np.dtype[Any], ...]] = tuple(np.dtype(name) for name in _core.ELEMENT_KINDS)


class GatherTable(msgspec.Struct, frozen=True):
    """A table that a kernel gathers S trajectories of G groups by, in one block of bytes.

    Attributes
    ----------
    nbytes : int
        Of the block.
    tokens, longest : int
        T of all trajectories, and the most of one.
    found_at : int
        Where int32 [2] are that the kernel may write; 0 before.
    borders_at, versions_at, sizes_at, scores_at : int
        Where the parts begin that go to the batch as they are: int32 [S + 1], int64 [S],
        int64 [G] and float32 [S].
    chunks_at : int
        Where those end, and the chunks begin.
    launches : list
        Of chunks that lie behind each other, of trajectories with the same fields: the first chunk,
        how many, and position in `KINDS` of the dtypes of tokens, loss mask, logprobs and
        advantages, -1 for what is not there.
    instance_ids : list[str]
        S of them.
    known : bytes
        What is known on the host: int64 [4, S], of each sample its score (the bits of a float64),
        policy version, newest policy version, and tokens; and then int64 [G], the samples of each
        group.
    mentions : list[int]
        Positions of the trajectories whose meta contains one of the words that were asked for.
    scores_fit : bool
        Whether a rule that was given could be followed: all scores are numbers up to
        `shmbus.batch.baseline.MAX_SCORE_MAGNITUDE`. Else the advantages in the table are arbitrary.
    has_rows : bool
        Whether a trajectory was put with rows: each is a sequence of its own, of which the table
        knows nothing.
    has_spans : bool
        Whether a trajectory is of several policy versions; else the newest of each is its oldest.
    has_logprobs : bool
        Whether all trajectories have logprobs; if not, none has.
    """

    nbytes: int
    tokens: int
    longest: int
    found_at: int
    borders_at: int
    versions_at: int
    sizes_at: int
    scores_at: int
    chunks_at: int
    launches: list[tuple[int, int, tuple[int, int, int, int]]]
    instance_ids: list[str]
    known: bytes
    mentions: list[int]
    scores_fit: bool
    has_rows: bool
    has_spans: bool
    has_logprobs: bool


def plan_gather(
    groups: Sequence[_core.GroupBase],
    names: FieldNames | None,
    memory: NDArray[np.uint8],
    *,
    shift: int,
    chunk_tokens: int,
    advantages: NDArray[np.float32] | Baseline,
    flags: NDArray[np.uint8] | None = None,
    words: tuple[bytes, ...] = (),
) -> GatherTable:
    """Tell a kernel where the fields of trajectories lie, and where they go in a packed batch.

    Parameters
    ----------
    groups : sequence of Group
        Leased, of one Consumer; of S trajectories, at least one.
    names : FieldNames, optional
        How the fields are called.
    memory : uint8 [n], contiguous
        Gets the table; anything, if it has less than the table's `nbytes`. Its parts begin on
        multiples of 64. The last are the chunks, int64 [C, CHUNK_WORDS]: the addresses of tokens,
        loss mask, logprobs and advantages (each a multiple of 64 at a trajectory's first token; 0
        for what is not there); where the chunk begins in the batch; as int32, the first of its
        tokens in the trajectory, and how many; the trajectory's flags, and, as float32, its
        advantage; and which fields it has.
    shift : int
        Added to all addresses: what the device's are off from this process's.
    chunk_tokens : int
        Most tokens of a chunk.
    advantages : float32 [S], or Baseline
        The rule by which they follow from the scores of each group.
    flags : uint8 [S], optional
        All 0 without.
    words : tuple of bytes
        Looked for in the encoded meta of each trajectory.

    Returns
    -------
    GatherTable

    Raises
    ------
    ValueError
        As for `shmbus.batch.gather.measure`; for no trajectory; for those of several Consumers; for
        arrays of another size or dtype.
    """
    names = names or FieldNames()
    planned = _core.plan_gather(
        tuple(groups),
        names.as_tuple(),
        memory,
        shift,
        chunk_tokens,
        advantages,
        flags,
        words,
    )
    has, lacks = planned[16:]
    return GatherTable(*planned[:16], check_presence(groups, names, has, lacks))


def mapping_of(trajectory: _core.Trajectory) -> tuple[int, int, object]:
    """Return address and bytes of the mapping that a trajectory is packed from.

    Its arrays point into another mapping of the same bytes, which is read-only.

    Parameters
    ----------
    trajectory : Trajectory
        Any of its consumer's: they share one mapping.

    Returns
    -------
    tuple of (int, int, object)
        Where the mapping begins in this process, how long it is, and what keeps it: the same object
        for all trajectories of a consumer.
    """
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


def mentioning(trajectories: list[_core.Trajectory], words: tuple[bytes, ...]) -> list[int]:
    """Find the trajectories whose meta contains one of some words, without decoding any.

    Parameters
    ----------
    trajectories : list[Trajectory]
        Leased.
    words : tuple of bytes
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
    return _core.mentioning(trajectories, words)
