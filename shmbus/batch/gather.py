"""From records to batches: many trajectories gathered into arrays that the caller owns.

One pass over the ring in C, with the interpreter lock released; every length, dtype and bound is
checked before the first byte is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shmbus.batch.extra_fields import PackedExtra
from shmbus.batch.field_names import FieldNames
from shmbus.batch.field_presence import check_presence
from shmbus_ext import _core
from shmbus_ext._core import scores as scores

__all__ = ["FieldNames", "PackedBatch", "gather", "packed_bytes"]

Array: TypeAlias = NDArray[Any]
#: Of a score, by magnitude: the difference of two is still finite in float32.
MAX_SCORE: Final[float] = _core.MAX_SCORE
#: Rounding may bring a logprob above 0, though not this far.
MAX_LOGPROB: Final[float] = _core.MAX_LOGPROB
GatherThreads: TypeAlias = _core.GatherThreads
"""Helpers that copy batches together with the caller of `gather`; `close` ends them."""


class PackedBatch(NamedTuple):
    """A packed batch of G groups: T tokens of S samples, in arrays that hold the batch's memory.

    Attributes
    ----------
    tokens, position_ids : int64 [T]
    loss_mask : bool [T]
    logprobs, advantages : float32 [T]
        Logprobs are 0 where the loss mask is False, or where there are none.
    cu_seqlens : int32 [S + 1]
    samples : int64 [4, S]
        Of each sample its score, the bits of a float64, its policy version, the newest one, and its
        tokens.
    sizes : int64 [G]
        Samples of each group.
    instance_ids : list[str]
    trajectories : list[Trajectory]
        The samples.
    total : int
        T.
    longest : int
        Tokens of the longest sample.
    has_logprobs : bool
        Whether all have logprobs; if not, none has.
    has_rows : bool
        Whether one was put with rows, each of which is a sequence of its own.
    has_metas : bool
        Whether one has a meta.
    finite : bool
        Whether all logprobs and advantages are finite.
    """

    tokens: Array
    position_ids: Array
    loss_mask: Array
    logprobs: Array
    advantages: Array
    cu_seqlens: Array
    samples: NDArray[np.int64]
    sizes: NDArray[np.int64]
    instance_ids: list[str]
    trajectories: list[_core.Trajectory]
    total: int
    longest: int
    has_logprobs: bool
    has_rows: bool
    has_metas: bool
    finite: bool


def packed_bytes(total: int, sequences: int) -> int:
    """Return how many bytes of memory `gather` needs.

    Parameters
    ----------
    total : int
        Tokens.
    sequences : int
        Sequences that they are of.

    Returns
    -------
    int
        Bytes, with the padding between the arrays.
    """
    return _core.packed_bytes(total, sequences)


class Measured(NamedTuple):
    """Groups, after all the checks that `gather` makes."""

    trajectories: list[_core.Trajectory]
    sizes: NDArray[np.int64]
    lengths: list[int]
    has_logprobs: bool
    field_names: list[tuple[str, ...]]
    scores_fit: bool

    @property
    def has_rows(self) -> bool:
        """Whether a trajectory was put with rows, each of which is a sequence of its own."""
        return any([_core.ROW_LENGTHS in names for names in self.field_names])


def measure(groups: Sequence[_core.GroupBase], names: FieldNames | None = None) -> Measured:
    """Count the tokens of groups, after all the checks that `gather` makes."""
    names = names or FieldNames()
    trajectories, sizes = members(groups)
    lengths, has, lacks, field_names, fit = _core.measure(trajectories, names.as_tuple())
    has_logprobs = check_presence(groups, names, has, lacks)
    return Measured(trajectories, sizes, lengths, has_logprobs, field_names, fit)


def members(
    groups: Sequence[_core.GroupBase],
) -> tuple[list[_core.Trajectory], NDArray[np.int64]]:
    """Lay the trajectories of groups out one behind the other."""
    return _core.members(list(groups))


def gather(
    groups: Sequence[_core.GroupBase],
    names: FieldNames,
    memory: NDArray[np.uint8] | list[NDArray[np.uint8]],
    advantages: NDArray[np.float32],
    extras: tuple[PackedExtra, ...] = (),
    threads: GatherThreads | None = None,
) -> PackedBatch | int | None:
    """Copy the samples of groups one behind the other into a packed batch.

    Parameters
    ----------
    groups : list of Group
        Leased, of one Consumer. It is a list.
    names : FieldNames
        How the fields are called.
    memory : uint8 [n], or a list of such
        Where the batch goes, at least `packed_bytes`; or blocks, of which one is taken that is
        large enough and to which nothing but the list refers.
    advantages : float32 [S]
        Of each sample that brings no advantages of its own.
    extras : tuple of PackedExtra
        Further fields, in the same pass.
    threads : GatherThreads, optional
        They copy together with the caller.

    Returns
    -------
    PackedBatch, int or None
        The bytes that are needed, where no block of the list is free and large enough. None where
        nothing was copied, since a sample lacks a field that a sibling has, or some groups lack
        logprobs: `measure` says which.

    Raises
    ------
    ValueError
        As for `measure`, for each trajectory alone; an array has the wrong size or dtype.
    TypeError
        One is no group.
    """
    found = _core.pack(groups, names.as_tuple(), memory, advantages, extras, threads)
    return PackedBatch(*found) if isinstance(found, tuple) else found
