"""The kernel that turns records in registered host memory into a packed batch on the device.

Needs Triton, so it is imported only where it is about to run.

Invariants:

- A program reads one chunk of one sequence, and writes the same chunk of every output; nobody
  else writes there.
- The values are those of the host's gather: integers widened, logprobs 0 where the mask is False,
  a producer's own advantages before those of its group.
- What is not finite is found here too, in the same pass: the lowest such token goes to `broken`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from shmbus.locate import KINDS, ROW_WORDS

__all__ = ["CHUNK_TOKENS", "launch"]

CHUNK_TOKENS: Final = 1024
"""Tokens of a program."""

WARPS: Final = 8
"""Warps of a program. With `CHUNK_TOKENS`, a thread reads four tokens of a field: one vector of 16
bytes. On an H200, 50 of 55 GB/s; with twice as many tokens a thread, 36; with four times, 25."""

CHUNK_BYTES: Final = 8
"""Of an entry of the table of chunks."""

#: As numpy's kinds; a bool is a byte.
TYPES: Final = {
    "b1": tl.int8, "i1": tl.int8, "u1": tl.uint8, "i2": tl.int16, "u2": tl.uint16,
    "i4": tl.int32, "u4": tl.uint32, "i8": tl.int64, "u8": tl.uint64,
    "f4": tl.float32, "f8": tl.float64,
}  # fmt: skip

# The kernel as it was compiled, for fields of these kinds on a device. Triton finds it too, but
# looks at each argument anew for that: most of what a launch costs.
_compiled: dict[tuple[tuple[int, ...], int | None, bool], Any] = {}


def launch(
    kinds: tuple[int, int, int, int],
    first: int,
    count: int,
    table: Tensor,
    chunks_at: int,
    outputs: Sequence[Tensor],
    nowhere: int,
) -> None:
    """Start the kernel on the current stream, for chunks whose sequences have the same fields.

    Parameters
    ----------
    kinds, first, count
        Of `GatherTable.launches`.
    table, outputs
        Pointers of `pack_records`, in its order; each a multiple of 16 bytes.
    chunks_at : int
        Of the GatherTable.
    nowhere : int
        In `broken`, where nothing is: beyond any token.
    """
    chunks_at += first * CHUNK_BYTES
    arguments = (table, chunks_at, *outputs, *_constants(kinds), nowhere)
    key = (kinds, table.device.index, chunks_at < 2**31)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(count, 1, 1)](*arguments)
        return
    compiled = pack_records[(count,)](*arguments, num_warps=WARPS)
    # The interpreter compiles nothing.
    if compiled is not None:
        _compiled[key] = compiled


@functools.cache
def _constants(kinds: tuple[int, int, int, int]) -> tuple[Any, ...]:
    """Say in the kernel's terms which fields the records have; one that is missing has any type."""
    types = [TYPES[KINDS[kind].str[1:]] if kind >= 0 else tl.int8 for kind in kinds]
    there = [kind >= 0 for kind in kinds[1:]]
    return (*types, *there, ROW_WORDS, CHUNK_TOKENS)


@triton.jit(do_not_specialize=["chunks_at"])
def pack_records(
    table,  # uint8: that of `shmbus.locate.plan_gather`
    chunks_at,  # where the first chunk of this launch is in it
    tokens,  # int64 [T]
    position_ids,  # int64 [T]
    loss_mask,  # bool [T]
    logprobs,  # float32 [T]
    advantages,  # float32 [T]
    broken,  # int64 [2]: first token whose logprob, and whose advantage, is not finite
    TOKENS: tl.constexpr,
    MASK: tl.constexpr,
    LOGPROBS: tl.constexpr,
    ADVANTAGES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    HAS_ADVANTAGES: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    NOWHERE: tl.constexpr,
):
    """Pack one chunk; the upper-case dtypes are those of the records."""
    chunk = (table + chunks_at).to(tl.pointer_type(tl.int32)) + 2 * tl.program_id(0)
    sequence = tl.load(chunk)
    first = tl.multiple_of(tl.load(chunk + 1), 16)
    row = table.to(tl.pointer_type(tl.int64)) + sequence.to(tl.int64) * WORDS
    length = tl.load(row + 4)
    start = tl.load(row + 5)
    flags = tl.load(row + 6)
    gain = tl.load((row + 7).to(tl.pointer_type(tl.float32)))
    here = first + tl.arange(0, CHUNK)
    inside = here < length
    at = start + here
    # All of the record's fields are asked for before the first is used: the way to the host's
    # memory is long. Each begins on a cache line, so whole vectors can be read.
    address = tl.multiple_of(tl.load(row).to(tl.pointer_type(TOKENS)), 16)
    ids = tl.load(address + here, mask=inside, other=0)
    if HAS_MASK:
        mask_address = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(MASK)), 16)
        kept = tl.load(mask_address + here, mask=inside, other=0)
    if HAS_LOGPROBS:
        logprobs_address = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(LOGPROBS)), 16)
        read = tl.load(logprobs_address + here, mask=inside, other=0)
    if HAS_ADVANTAGES:
        own_address = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(ADVANTAGES)), 16)
        own = tl.load(own_address + here, mask=inside, other=0)
    tl.store(tokens + at, ids.to(tl.int64), mask=inside)
    tl.store(position_ids + at, here.to(tl.int64), mask=inside)
    trained = inside & ((flags & 1) == 0)
    if HAS_MASK:
        trained = trained & (kept != 0)
    tl.store(loss_mask + at, trained, mask=inside)
    values = tl.zeros([CHUNK], dtype=tl.float32)
    if HAS_LOGPROBS:
        values = tl.where(trained, read.to(tl.float32), 0.0)
        # Only a nan or an infinity differs from itself taken from itself.
        wrong = tl.min(tl.where(inside & ((values - values) != 0.0), at, NOWHERE))
        if wrong != NOWHERE:
            tl.atomic_min(broken, wrong)
    tl.store(logprobs + at, values, mask=inside)
    gains = tl.zeros([CHUNK], dtype=tl.float32) + gain
    if HAS_ADVANTAGES:
        gains = tl.where((flags & 2) == 0, own.to(tl.float32), 0.0)
        wrong_gain = tl.min(tl.where(inside & ((gains - gains) != 0.0), at, NOWHERE))
        if wrong_gain != NOWHERE:
            tl.atomic_min(broken + 1, wrong_gain)
    tl.store(advantages + at, gains, mask=inside)
