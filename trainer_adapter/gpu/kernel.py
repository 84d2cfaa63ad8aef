"""The kernel from records in registered host memory to a packed batch on the device.

Needs Triton, so imported just before its run.

Invariants:

- A program reads one chunk of one sequence, and writes the same chunk of every output, exclusively.
  The programs after the chunks copy words to the batch unchanged.
- The values equal the host's gather: integers widened, logprobs 0 where the mask is False, a
  producer's own advantages before the group's.
- The table is read from host memory, and wrong values are reported there: a batch is one
  launch, with no copy before or after it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from shmbus.batch.gather import MASKED, MAX_LOGPROB, ZEROED
from shmbus.batch.kernel_table import CHUNK_WORDS, COPY_WORDS, KINDS

CHUNK_TOKENS: Final = 2048
"""Tokens of a program."""

WARPS: Final = 16
"""Warps of a program. With `CHUNK_TOKENS`, a thread reads four tokens of a field: one vector of 16
bytes. On an H200, 50 of 55 GB/s; with twice as many tokens a thread, 36; with four times, 25."""

#: In numpy's kinds; a bool takes a byte.
TYPES: Final = {
    "b1": tl.int8, "i1": tl.int8, "u1": tl.uint8, "i2": tl.int16, "u2": tl.uint16,
    "i4": tl.int32, "u4": tl.uint32, "i8": tl.int64, "u8": tl.uint64,
    "f4": tl.float32, "f8": tl.float64,
}  # fmt: skip

#: Types behind the pointers of `pack_records`, in its order: in the table, and in the batch.
OF_TABLE: Final = (torch.int64, torch.int32, torch.int32)
OF_BATCH: Final = (
    torch.int32, torch.int64, torch.int64, torch.bool, torch.float32, torch.float32,
)  # fmt: skip

# The compiled kernel for fields of these kinds on a device. Triton's own cache inspects each
# argument at each launch, most of a launch's cost.
_compiled: dict[tuple[tuple[int, ...], int | None], Any] = {}


def launch(
    kinds: tuple[int, int, int, int],
    chunks: int,
    words: int,
    table: Tensor,
    table_at: Sequence[int],
    batch: Tensor,
    batch_at: Sequence[int],
) -> None:
    """Start the kernel on the current stream, for chunks of sequences with the same fields."""
    blocks = chunks - words // -CHUNK_TOKENS
    key = (kinds, batch.device.index)
    found = _compiled.get(key)
    if found is not None:
        # Plain addresses: for a tensor, the launcher would ask the driver about its memory.
        table_from, batch_from = table.data_ptr(), batch.data_ptr()
        addresses = (
            *[table_from + at for at in table_at],
            *[batch_from + at for at in batch_at],
        )
        found[(blocks, 1, 1)](*addresses, chunks, words, *_constants(kinds))
        return
    rest = (chunks, words, *_constants(kinds))
    pointers = [
        block[at : at + 8].view(dtype)
        for block, places, dtypes in ((table, table_at, OF_TABLE), (batch, batch_at, OF_BATCH))
        for at, dtype in zip(places, dtypes, strict=True)
    ]
    compiled = pack_records[(blocks, 1, 1)](*pointers, *rest, num_warps=WARPS)
    # The interpreter compiles nothing.
    if compiled is not None:
        _compiled[key] = compiled


@functools.cache
def _constants(kinds: tuple[int, int, int, int]) -> tuple[Any, ...]:
    """Return the kernel's constants for these fields; a missing field gets an arbitrary type."""
    types = [TYPES[KINDS[kind].str[1:]] if kind >= 0 else tl.int8 for kind in kinds]
    there = [kind >= 0 for kind in kinds[1:]]
    return (*types, *there, CHUNK_WORDS, CHUNK_TOKENS, MAX_LOGPROB, MASKED, ZEROED)


#: Words for copying rows, by their bytes; and the number of words per step of a program.
COPY_TYPES: Final = {
    1: (tl.int8, torch.uint8),
    2: (tl.int16, torch.int16),
    4: (tl.int32, torch.int32),
    8: (tl.int64, torch.int64),
}
COPY_LANES: Final = 2048


def launch_copy(table: Tensor, table_at: int, chunks: int, width: int, there: Tensor) -> None:
    """Start the copy of one extra field on the current stream."""
    plan = table[table_at : table_at + 8].view(torch.int64)
    kernel_type, dtype = COPY_TYPES[width]
    copy_rows[(chunks,)](
        plan, there.view(dtype), kernel_type, COPY_WORDS, COPY_LANES, num_warps=WARPS
    )


@triton.jit
def copy_rows(
    chunks,  # int64 [count, ENTRY]: of `PackPlan.copy_table`
    there,
    WORD: tl.constexpr,
    ENTRY: tl.constexpr,
    LANES: tl.constexpr,
):
    """Copy one chunk of rows unchanged, in words that divide them."""
    program = tl.program_id(0)
    chunk = tl.load(chunks + program.to(tl.int64) * ENTRY + tl.arange(0, ENTRY))
    # A record's field begins on a cache line, and a chunk is a multiple of a line.
    source = tl.multiple_of(_word(chunk, 0, ENTRY).to(tl.pointer_type(WORD)), 16)
    at = _word(chunk, 1, ENTRY)
    count = _word(chunk, 2, ENTRY)
    lane = tl.arange(0, LANES)
    first = tl.zeros_like(count)
    while first < count:
        inside = first + lane < count
        words = tl.load(source + first + lane, mask=inside, other=0)
        tl.store(there + at + first + lane, words, mask=inside)
        first += LANES


@triton.jit
def _word(words, position, WORDS: tl.constexpr):
    """Return a word of a chunk loaded as a whole."""
    return tl.sum(tl.where(tl.arange(0, WORDS) == position, words, 0), axis=0)


@triton.jit(do_not_specialize=["count", "fact_words"])
def pack_records(
    chunks,  # int64 [count, WORDS]: of `PackPlan.table`, for this launch
    found,  # int32 [3]: not 0 for a wrong mask, logprob, advantage
    facts,  # int32 [fact_words], to be copied
    facts_there,  # int32 [fact_words]
    tokens,  # int64 [T]
    position_ids,  # int64 [T]
    loss_mask,  # bool [T]
    logprobs,  # float32 [T]
    advantages,  # float32 [T]
    count,
    fact_words,
    TOKENS: tl.constexpr,
    MASK: tl.constexpr,
    LOGPROBS: tl.constexpr,
    ADVANTAGES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    HAS_ADVANTAGES: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    LARGEST_LOGPROB: tl.constexpr,
    MASKED_FLAG: tl.constexpr,
    ZEROED_FLAG: tl.constexpr,
):
    """Pack one chunk; the upper-case dtypes describe the records."""
    program = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    if program >= count:
        word = (program - count) * CHUNK + lane
        there = word < fact_words
        tl.store(facts_there + word, tl.load(facts + word, mask=there, other=0), mask=there)
    else:
        # One load for the whole chunk: host memory has a long latency.
        chunk = tl.load(chunks + program.to(tl.int64) * WORDS + tl.arange(0, WORDS))
        at = _word(chunk, 4, WORDS) + lane
        span = _word(chunk, 5, WORDS)
        here = span.to(tl.int32) + lane
        inside = lane < (span >> 32).to(tl.int32)
        orders = _word(chunk, 6, WORDS)
        masked, zeroed = (orders & MASKED_FLAG) != 0, (orders & ZEROED_FLAG) != 0
        gain = (orders >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        # Every field of the record is loaded before the first use. Each begins on a cache line, for
        # reads of whole vectors.
        address = tl.multiple_of(_word(chunk, 0, WORDS).to(tl.pointer_type(TOKENS)), 16)
        ids = tl.load(address + lane, mask=inside, other=0)
        if HAS_MASK:
            mask_address = tl.multiple_of(_word(chunk, 1, WORDS).to(tl.pointer_type(MASK)), 16)
            kept = tl.load(mask_address + lane, mask=inside, other=0)
        if HAS_LOGPROBS:
            read_address = tl.multiple_of(_word(chunk, 2, WORDS).to(tl.pointer_type(LOGPROBS)), 16)
            read = tl.load(read_address + lane, mask=inside, other=0)
        if HAS_ADVANTAGES:
            own_address = tl.multiple_of(_word(chunk, 3, WORDS).to(tl.pointer_type(ADVANTAGES)), 16)
            own = tl.load(own_address + lane, mask=inside, other=0)
        tl.store(tokens + at, ids.to(tl.int64), mask=inside)
        tl.store(position_ids + at, here.to(tl.int64), mask=inside)
        trained = inside & (masked == 0)
        if HAS_MASK:
            trained = trained & (kept != 0)
            if tl.max((inside & (kept != 0) & (kept != 1)).to(tl.int32)) != 0:
                tl.store(found, 1)
        tl.store(loss_mask + at, trained, mask=inside)
        values = tl.zeros([CHUNK], dtype=tl.float32)
        if HAS_LOGPROBS:
            values = tl.where(trained, read.to(tl.float32), 0.0)
            # x - x is not 0 for a nan and for an infinity only.
            wrong = ((values - values) != 0.0) | (values > LARGEST_LOGPROB)
            if tl.max((inside & wrong).to(tl.int32)) != 0:
                tl.store(found + 1, 1)
        tl.store(logprobs + at, values, mask=inside)
        gains = tl.zeros([CHUNK], dtype=tl.float32) + tl.where(zeroed, 0.0, gain)
        if HAS_ADVANTAGES:
            gains = tl.where(zeroed, 0.0, own.to(tl.float32))
            bad = inside & ((gains - gains) != 0.0)
            if tl.max((bad & trained).to(tl.int32)) != 0:
                tl.store(found + 2, 1)
            gains = tl.where(bad & (trained == 0), 0.0, gains)
        tl.store(advantages + at, gains, mask=inside)
