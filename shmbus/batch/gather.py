"""From records to batches: many trajectories gathered into arrays owned by the caller.

A single pass over the ring in C, with the interpreter lock released; every length, dtype and bound
is checked before the first byte is copied.
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
        Logprobs are 0 outside of the loss mask, or if missing.
    cu_seqlens : int32 [S + 1]
    samples : int64 [4, S]
        Each sample's score, as the bits of a float64, its policy version, the newest version, and
        its tokens.
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
        True with logprobs in all samples, False with logprobs in no sample.
    has_rows : bool
        True if a sample was put with rows; every row then forms a sequence of its own.
    has_metas : bool
        True if a sample carries a meta.
    finite : bool
        True if all logprobs and advantages are finite.
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
    """Groups, after all checks of `gather`."""

    trajectories: list[_core.Trajectory]
    sizes: NDArray[np.int64]
    lengths: list[int]
    has_logprobs: bool
    field_names: list[tuple[str, ...]]
    scores_fit: bool

    @property
    def has_rows(self) -> bool:
        """True if a trajectory was put with rows; every row then forms a sequence of its own."""
        return any([_core.ROW_LENGTHS in names for names in self.field_names])


def measure(groups: Sequence[_core.GroupBase], names: FieldNames | None = None) -> Measured:
    """Count the tokens of groups, after all checks of `gather`."""
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
        Leased, of a single Consumer; a list, not another sequence.
    names : FieldNames
        Names of the fields.
    memory : uint8 [n], or a list of such
        Destination of the batch, at least `packed_bytes`; or blocks, from which the call takes a
        block large enough and referred to only by the list.
    advantages : float32 [S]
        For samples without advantages of their own.
    extras : tuple of PackedExtra
        Further fields, in the same pass.
    threads : GatherThreads, optional
        They copy together with the caller.

    Returns
    -------
    PackedBatch, int or None
        The needed bytes, if no block of the list is free and large enough. None without a copy,
        since a sample lacks a field of a sibling, or some groups lack logprobs: `measure` names
        them.

    Raises
    ------
    ValueError
        As for `measure`, for each trajectory alone; an array has the wrong size or dtype.
    TypeError
        An item is no group.
    """
    found = _core.pack(groups, names.as_tuple(), memory, advantages, extras, threads)
    return PackedBatch(*found) if isinstance(found, tuple) else found
