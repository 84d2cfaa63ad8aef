"""Tables of a plan for a kernel that copies a batch itself.

Invariant: addresses are valid while the trajectories are leased: nothing here holds their space.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus.batch.gather import PackPlan
from shmbus_ext import _core
from shmbus_ext._core import mapping_of as mapping_of

#: Words of int64 of a chunk of a KernelTable, and of a chunk of `PackPlan.copy_table`.
CHUNK_WORDS: Final[int] = _core.CHUNK_WORDS
COPY_WORDS: Final[int] = _core.COPY_WORDS

#: Dtypes by their number in a table.
KINDS: Final[tuple[np.dtype[Any], ...]] = tuple(np.dtype(name) for name in _core.ELEMENT_KINDS)


class KernelTable(msgspec.Struct, frozen=True):
    """Places within a kernel's table of S trajectories of G groups, a single block of bytes."""

    found_at: int
    borders_at: int
    versions_at: int
    sizes_at: int
    scores_at: int
    chunks_at: int
    launches: list[tuple[int, int, tuple[int, int, int, int]]]


def kernel_table(
    plan: PackPlan,
    memory: NDArray[np.uint8],
    *,
    shift: int,
    chunk_tokens: int,
    advantages: NDArray[np.float32],
    flags: NDArray[np.uint8] | None = None,
) -> KernelTable:
    """Describe the fields of trajectories and their places in a packed batch, for a kernel."""
    return KernelTable(*plan.table(memory, shift, chunk_tokens, advantages, flags))
