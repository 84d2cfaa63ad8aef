"""Places of leased trajectories' fields, for copies by other means than `gather`.

Invariants:

- Addresses are valid while the trajectories are leased: nothing here holds their space.
- The trajectories refused by `gather` are refused here, with the same errors.
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

#: Dtypes by their number in a table.
KINDS: Final[tuple[np.dtype[Any], ...]] = tuple(np.dtype(name) for name in _core.ELEMENT_KINDS)


class GatherTable(msgspec.Struct, frozen=True):
    """A kernel's table for gathering S trajectories of G groups, in a single block of bytes."""

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
    """Describe the fields of trajectories and their places in a packed batch, for a kernel."""
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
