"""From records to batches: many trajectories gathered into arrays that the caller owns.

One pass over the ring in C, with the interpreter lock released; every length, dtype and bound is
checked before the first byte is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus.batch.extra_fields import PackedExtra
from shmbus.batch.field_names import FieldNames
from shmbus.batch.field_presence import check_presence
from shmbus_ext import _core

__all__ = ["FieldNames", "Measured", "PackedArrays", "describe", "gather", "measure", "members"]

Array: TypeAlias = NDArray[Any]


class PackedArrays(msgspec.Struct, frozen=True):
    """Where a packed batch of T tokens and S sequences goes; each contiguous.

    Attributes
    ----------
    tokens, position_ids : int64 [T]
    loss_mask : bool [T]
    logprobs, advantages : float32 [T]
    cu_seqlens : int32 [S + 1]
    """

    tokens: Array
    position_ids: Array
    loss_mask: Array
    logprobs: Array
    advantages: Array
    cu_seqlens: Array

    @classmethod
    def inside(cls, memory: NDArray[np.uint8], total: int, sequences: int) -> PackedArrays:
        """Lay the arrays out in one block of bytes, each on a cache line.

        Parameters
        ----------
        memory : uint8 [n]
            At least `packed_bytes` of them, writable; the arrays keep it alive.
        total : int
            Tokens.
        sequences : int
            Sequences that they are of.

        Returns
        -------
        PackedArrays
            Views of the memory, whose content is what it was.
        """
        return cls(*_core.lay_out(memory, total, sequences))


def packed_bytes(total: int, sequences: int) -> int:
    """Return how many bytes `PackedArrays.inside` needs.

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
    """Groups, after all the checks that `gather` makes.

    Attributes
    ----------
    trajectories : list[Trajectory]
        S of them, group after group.
    sizes : int64 [G]
        How many are of each group.
    lengths : list[int]
        Tokens of each trajectory.
    has_logprobs : bool
        Whether all have logprobs; if not, none has.
    field_names : list of tuple of str
        Names of all fields, for each kind of record that was met.
    """

    trajectories: list[_core.Trajectory]
    sizes: NDArray[np.int64]
    lengths: list[int]
    has_logprobs: bool
    field_names: list[tuple[str, ...]]

    @property
    def has_rows(self) -> bool:
        """Whether a trajectory was put with rows, each of which is a sequence of its own."""
        return any([_core.ROW_LENGTHS in names for names in self.field_names])


def measure(groups: Sequence[_core.GroupBase], names: FieldNames | None = None) -> Measured:
    """Count the tokens of groups, after all the checks that `gather` makes.

    Parameters
    ----------
    groups : sequence of Group
        Leased, of one Consumer.
    names : FieldNames, optional
        How the fields are called.

    Returns
    -------
    Measured

    Raises
    ------
    ValueError
        A field is missing, also in one sample of a group only, of another dtype or dimension, or
        its length differs from the tokens'; the message names the trajectory, its producer and the
        field.
    MixedLogprobsError
        Some of the groups have logprobs, and others do not.
    TypeError
        One is no group.
    """
    names = names or FieldNames()
    trajectories, sizes = members(groups)
    lengths, has, lacks, field_names = _core.measure(trajectories, names.as_tuple())
    has_logprobs = check_presence(groups, names, has, lacks)
    return Measured(trajectories, sizes, lengths, has_logprobs, field_names)


def members(
    groups: Sequence[_core.GroupBase],
) -> tuple[list[_core.Trajectory], NDArray[np.int64]]:
    """Lay the trajectories of groups out one behind the other.

    Parameters
    ----------
    groups : sequence of Group

    Returns
    -------
    trajectories : list[Trajectory]
    sizes : int64 [G]
        How many are of each group.

    Raises
    ------
    TypeError
        One is no group.
    """
    return _core.members(list(groups))


def describe(
    trajectories: list[_core.Trajectory],
) -> tuple[NDArray[np.float64], NDArray[np.int64], list[str], NDArray[np.int64]]:
    """Collect score, policy versions and instance id of each trajectory.

    Parameters
    ----------
    trajectories : list[Trajectory]

    Returns
    -------
    scores : float64 [S]
    policy_versions : int64 [S]
        The oldest, where there were several.
    instance_ids : list[str]
    newest_policy_versions : int64 [S]
    """
    return _core.describe(trajectories)


def gather(
    trajectories: list[_core.Trajectory],
    out: PackedArrays,
    sequence_advantages: NDArray[np.float32],
    names: FieldNames | None = None,
    extras: tuple[PackedExtra, ...] = (),
) -> bool:
    """Copy trajectories one behind the other into a packed batch.

    Parameters
    ----------
    trajectories : list[Trajectory]
        Leased, of one Consumer; S of them, T tokens in all.
    out : PackedArrays
        Filled completely. Logprobs are 0 where the loss mask is False.
    sequence_advantages : float32 [S]
        For each token of a trajectory that brings no advantages of its own.
    names : FieldNames, optional
        How the fields are called.
    extras : tuple of PackedExtra
        Further fields, in the same pass.

    Returns
    -------
    bool
        Whether all logprobs and advantages in `out` are finite.

    Raises
    ------
    ValueError
        As for `measure`, for each trajectory alone; an array of `out` has the wrong size or dtype.
    """
    return _core.pack(
        trajectories,
        (names or FieldNames()).as_tuple(),
        out.tokens,
        out.position_ids,
        out.loss_mask,
        out.logprobs,
        out.advantages,
        out.cu_seqlens,
        sequence_advantages,
        extras,
    )
