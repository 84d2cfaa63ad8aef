"""From records to batches: groups measured once, and their samples copied into arrays.

One pass of C measures; one pass copies, with the interpreter lock released. Every length, dtype and
bound is checked before the first byte is copied, and each value while copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus_ext import _core
from shmbus_ext._core import mentioning as mentioning

__all__ = ["FieldNames", "PackedBatch", "gather", "measure"]

Array: TypeAlias = NDArray[Any]
#: Largest score by magnitude: the difference of two scores is still finite in float32.
MAX_SCORE: Final[float] = _core.MAX_SCORE
#: Rounding may bring a logprob above 0, though not this far.
MAX_LOGPROB: Final[float] = _core.MAX_LOGPROB
#: Bits of a sample's flags: no token trained; advantages of 0.
MASKED: Final[int] = _core.SAMPLE_MASKED
ZEROED: Final[int] = _core.SAMPLE_ZEROED
#: Kinds of extra fields: a row a token; any number of rows; one row, the whole array.
TOKEN: Final[int] = _core.EXTRA_TOKEN
RAGGED: Final[int] = _core.EXTRA_RAGGED
SEQUENCE: Final[int] = _core.EXTRA_SEQUENCE
#: Limit of the threads of a copy.
MOST_THREADS: Final[int] = _core.MOST_THREADS
PackPlan: TypeAlias = _core.PackPlan
"""The samples of a batch, measured once for every copy; made by `measure`."""


class FieldNames(msgspec.Struct, frozen=True, kw_only=True):
    """The producers' names of a batch's fields; None for an unused field.

    Attributes
    ----------
    tokens : str
        Token ids: integers, [n]. Required in every trajectory.
    loss_mask : str | None
        Sampled tokens: boolean or numeric, [n]; all tokens in a group without the field.
    logprobs : str | None
        The producer's logprobs of these tokens: float32 or float64, [n]; missing from a batch of
        groups without them.
    advantages : str | None
        The producer's own token-level advantages: float32 or float64, [n]; they win.

    Notes
    -----
    Either every sample of a group contains a field, or no sample; else the group is malformed.
    """

    tokens: str = "tokens"
    loss_mask: str | None = "loss_mask"
    logprobs: str | None = "logprobs"
    advantages: str | None = "advantages"

    def as_tuple(self) -> tuple[str, str | None, str | None, str | None]:
        """Return the names in the core's order."""
        return self.tokens, self.loss_mask, self.logprobs, self.advantages


class ExtraSpec(NamedTuple):
    """A request for an extra field; without a dtype the first record decides the form of a row."""

    name: str
    kind: int
    optional: bool = False
    dtype: np.dtype[Any] | None = None
    sizes: tuple[int, ...] = ()


class PackedBatch(NamedTuple):
    """A packed batch: T tokens of S samples, in arrays that hold the batch's memory.

    Attributes
    ----------
    tokens, position_ids : int64 [T]
    loss_mask : bool [T]
    logprobs, advantages : float32 [T]
        Logprobs are 0 outside of the loss mask, or if missing.
    cu_seqlens : int32 [S + 1]
    clean : bool
        True if masks hold 0 and 1, logprobs and advantages are finite, and logprobs at most 0.
    """

    tokens: Array
    position_ids: Array
    loss_mask: Array
    logprobs: Array
    advantages: Array
    cu_seqlens: Array
    clean: bool


class MixedLogprobsError(ValueError):
    """Some groups of a batch contain logprobs, and some groups lack them."""

    def __init__(self, message: str, lacking: list[int]) -> None:
        super().__init__(message)
        self.lacking = lacking


def measure(
    groups: Sequence[_core.GroupBase],
    names: FieldNames | None = None,
    extras: tuple[ExtraSpec, ...] = (),
) -> PackPlan:
    """Find and measure the samples of groups, after all checks of their fields.

    Parameters
    ----------
    groups : sequence of Group
        Leased.
    names : FieldNames, optional
        Names of the fields.
    extras : tuple of ExtraSpec
        Further fields.

    Returns
    -------
    PackPlan
        ``sizes``, int64 [G]: samples of each group. ``samples``, int64 [4, S]: each sample's score
        as the bits of a float64, its oldest and newest policy version, and its tokens.
        ``nbytes``: memory for `gather`.

    Raises
    ------
    ValueError
        A field is missing, or of a wrong dtype, shape or length; only a part of a group has a
        field, or only some groups have logprobs (`MixedLogprobsError`).
    TypeError
        An item is no group.
    """
    names = names or FieldNames()
    plan = _core.PackPlan(list(groups), names.as_tuple(), extras)
    # Samples of equal fields cost nothing here.
    mixed = plan.has & plan.lacks
    if mixed:
        for group in groups:
            _check_siblings(group.trajectories, names)
        if mixed & _core.HAS_LOGPROBS:
            raise _mixed(groups, str(names.logprobs))
    return plan


def gather(
    plan: PackPlan,
    memory: NDArray[np.uint8],
    advantages: NDArray[np.float32],
    flags: NDArray[np.uint8] | None = None,
    outs: tuple[NDArray[np.uint8], ...] = (),
    threads: int = 1,
) -> PackedBatch:
    """Copy the samples of a plan one behind the other into a packed batch.

    Parameters
    ----------
    plan : PackPlan
        Of leased groups.
    memory : uint8 [n]
        Destination of the batch, at least ``plan.nbytes``.
    advantages : float32 [S]
        For samples without advantages of their own.
    flags : uint8 [S], optional
        `MASKED` and `ZEROED` samples.
    outs : tuple of uint8 [bytes]
        Destination of each extra field.
    threads : int
        Threads of the copy, with the caller's.

    Returns
    -------
    PackedBatch

    Raises
    ------
    BusClosedError
        A trajectory is no longer leased.
    ValueError
        An array has the wrong size or dtype; the batch has more tokens than int32 can index.
    """
    return PackedBatch(*plan.gather(memory, advantages, flags, outs, threads))


def _check_siblings(samples: list[_core.Trajectory], names: FieldNames) -> None:
    for name in names.as_tuple()[1:]:
        having = [name in sample for sample in samples]
        if any(having) and not all(having):
            one, other = samples[having.index(False)], samples[having.index(True)]
            raise ValueError(
                f"trajectory {one.instance_id!r}[{one.index}] of producer {one.producer_id}: field "
                f"{name!r}: expected in every sample of a group or in none, got none, while "
                f"[{other.index}] of producer {other.producer_id} has it; put it with each sample"
            )


def _mixed(groups: Sequence[_core.GroupBase], name: str) -> MixedLogprobsError:
    having = [name in group.trajectories[0] for group in groups]
    first, other = groups[having.index(False)].trajectories[0], groups[having.index(True)]
    return MixedLogprobsError(
        f"group {first.instance_id!r} of producer {first.producer_id}: field {name!r}: expected in "
        f"every group of a batch or in none, got none, while group {other.instance_id!r} has it; "
        "put it in all groups, pack them apart, or read none by fields=FieldNames(logprobs=None)",
        [position for position, there in enumerate(having) if not there],
    )
