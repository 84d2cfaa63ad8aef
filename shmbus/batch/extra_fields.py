"""Further fields of many trajectories, of any dtype and row shape, copied as they are.

Invariants:

- All rows of one field in one call have one dtype and one shape.
- What is measured here is what `shmbus.batch.gather.gather` takes, with the same errors.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbus_ext import _core

__all__ = [
    "COPY_WORDS",
    "RAGGED",
    "SEQUENCE",
    "TOKEN",
    "ExtraRows",
    "ExtraSpec",
    "PackedExtra",
    "measure_extras",
    "plan_extras",
]

TOKEN: Final[int] = _core.EXTRA_TOKEN
"""A row a token."""
RAGGED: Final[int] = _core.EXTRA_RAGGED
"""Any number of rows a trajectory."""
SEQUENCE: Final[int] = _core.EXTRA_SEQUENCE
"""One row a trajectory: the whole array."""
COPY_WORDS: Final[int] = _core.COPY_WORDS
"""Words of int64 of a chunk of `plan_extras`."""


class ExtraSpec(NamedTuple):
    """What is asked of one field.

    Attributes
    ----------
    name : str
        In the records.
    kind : int
        `TOKEN`, `RAGGED` or `SEQUENCE`.
    optional : bool
        Whether a trajectory may lack it; its rows are 0 then.
    dtype : numpy.dtype or None
        Which one it has to be; None takes that of the first record.
    sizes : tuple of int
        The shape of a row, if the dtype is given.
    """

    name: str
    kind: int
    optional: bool = False
    dtype: np.dtype[Any] | None = None
    sizes: tuple[int, ...] = ()


class ExtraRows(NamedTuple):
    """What was found of one field.

    Attributes
    ----------
    dtype : numpy.dtype or None
        None where no trajectory has it, and none was asked for.
    sizes : tuple of int
        The shape of a row.
    rows : int64 [S]
        Of each trajectory; -1 where it lacks the field.
    """

    dtype: np.dtype[Any] | None
    sizes: tuple[int, ...]
    rows: NDArray[np.int64]


class PackedExtra(NamedTuple):
    """An `ExtraSpec` that states its dtype, and where the field goes.

    Attributes
    ----------
    name, kind, optional, dtype, sizes
        As in the spec.
    out : uint8 [n]
        Gets the bytes of all rows, in the trajectories' order.
    """

    name: str
    kind: int
    optional: bool
    dtype: np.dtype[Any] | None
    sizes: tuple[int, ...]
    out: NDArray[np.uint8]


def measure_extras(
    trajectories: list[_core.Trajectory], lengths: list[int], specs: tuple[ExtraSpec, ...]
) -> list[ExtraRows]:
    """Count the rows of further fields, after all the checks that `gather` makes.

    Parameters
    ----------
    trajectories : list[Trajectory]
        Leased; S of them.
    lengths : list[int]
        Tokens of each.
    specs : tuple of ExtraSpec

    Returns
    -------
    list[ExtraRows]
        One a spec.

    Raises
    ------
    ValueError
        A field is missing and not optional, has no dimension that counts its rows, has other rows
        than the first record or the spec, or not a row a token; the message names the trajectory,
        its producer and the field.
    """
    return [ExtraRows(*found) for found in _core.measure_extras(trajectories, lengths, specs)]


def plan_extras(
    trajectories: list[_core.Trajectory],
    lengths: list[int],
    specs: tuple[ExtraSpec, ...],
    places: tuple[tuple[int, int], ...],
    memory: NDArray[np.int64],
    *,
    shift: int,
    chunk_bytes: int,
) -> tuple[int, list[tuple[int, int]]]:
    """Tell a kernel how to copy further fields into one block of memory.

    Parameters
    ----------
    trajectories, lengths, specs
        As for `measure_extras`; each spec states its dtype.
    places : tuple of (int, int)
        Of each field: the byte of the block at which it begins, and the bytes of the words in which
        it is copied, which divide both that and its row.
    memory : int64 [n, flat]
        Gets the chunks, `COPY_WORDS` each: the address of the first word, its place in the block
        in words, and how many words. Chunks that find no room are counted.
    shift : int
        Added to all addresses: what the device's are off from this process's.
    chunk_bytes : int
        Most bytes of a chunk.

    Returns
    -------
    chunks : int
        In all, whether or not they found room.
    launches : list of (int, int)
        Of each field: its first chunk, and how many.

    Raises
    ------
    ValueError
        As for `measure_extras`; a word that does not divide a row.
    """
    return _core.plan_extras(trajectories, lengths, specs, places, memory, shift, chunk_bytes)
