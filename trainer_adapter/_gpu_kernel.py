"""The kernel that turns records in registered host memory into a packed batch on the device.

Needs Triton, so only `gpu.py` imports this, and only when it is about to run it.

Invariants:

- A program reads one chunk of one sequence, and writes the same chunk of every output; nobody
  else writes there.
- The values are those of the host's gather: integers widened, logprobs 0 where the mask is False,
  a producer's own advantages before those of its group.
- What is not finite is found here too, in the same pass: the lowest such token goes to `broken`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

__all__ = ["CHUNK_TOKENS", "WARPS", "pack_records"]

CHUNK_TOKENS: Final = 1024
"""Tokens of a program."""

WARPS: Final = 8
"""Warps of a program. With `CHUNK_TOKENS`, a thread reads four tokens of a field: one vector of 16
bytes. On an H200, 50 of 55 GB/s; with twice as many tokens a thread, 36; with four times, 25."""


@triton.jit
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
