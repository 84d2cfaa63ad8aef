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

from shmbus.batch.field_presence import check_presence
from shmbus.batch.gather import FieldNames
from shmbus_ext import _core
from shmbus_ext._core import find_not_finite, mapping_of, mentioning

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
    """A table that a kernel gathers S trajectories of G groups by, in one block of bytes."""

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
    advantages: NDArray[np.float32],
    flags: NDArray[np.uint8] | None = None,
    words: tuple[bytes, ...] = (),
) -> GatherTable:
    """Tell a kernel where the fields of trajectories lie, and where they go in a packed batch."""
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
    has, lacks = planned[15:]
    return GatherTable(*planned[:15], check_presence(groups, names, has, lacks))
