"""Further fields of many trajectories, of arbitrary dtypes and row shapes, copied unchanged.

Invariants:

- All rows of a field in a call share a dtype and a shape.
- Measuring accepts the same fields as `shmbus.batch.gather.gather`, with the same errors.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbus_ext import _core

TOKEN: Final[int] = _core.EXTRA_TOKEN
"""A row a token."""
RAGGED: Final[int] = _core.EXTRA_RAGGED
"""Any number of rows a trajectory."""
SEQUENCE: Final[int] = _core.EXTRA_SEQUENCE
"""One row a trajectory: the whole array."""
COPY_WORDS: Final[int] = _core.COPY_WORDS
"""Words of int64 of a chunk of `plan_extras`."""


class ExtraSpec(NamedTuple):
    """A request for a field."""

    name: str
    kind: int
    optional: bool = False
    dtype: np.dtype[Any] | None = None
    sizes: tuple[int, ...] = ()


class ExtraRows(NamedTuple):
    """Measured rows of a field."""

    dtype: np.dtype[Any] | None
    sizes: tuple[int, ...]
    rows: NDArray[np.int64]


class PackedExtra(NamedTuple):
    """An `ExtraSpec` with a dtype and a destination."""

    name: str
    kind: int
    optional: bool
    dtype: np.dtype[Any] | None
    sizes: tuple[int, ...]
    out: NDArray[np.uint8]


def measure_extras(
    trajectories: list[_core.Trajectory], lengths: list[int], specs: tuple[ExtraSpec, ...]
) -> list[ExtraRows]:
    """Count the rows of further fields, after all checks of `gather`."""
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
    """Tell a kernel how to copy further fields into one block of memory."""
    return _core.plan_extras(trajectories, lengths, specs, places, memory, shift, chunk_bytes)
