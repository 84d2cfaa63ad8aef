"""Kernel that writes changed elements of many device tensors in place, in one launch.

The kernel needs Triton and is therefore imported just before its launch.

Invariant: a program writes elements of one copy, each element once.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

#: 64-bit numbers of a program in the table: first change, changes; elements of a row of the piece,
#: elements between two rows, and before the first; first element of the source; for each of three
#: dimensions its step in the source, its size, its step in the target; the target's address, the
#: digest's number, the base's address or 0.
ENTRY: Final = 18
WARPS: Final = 4


def launch(
    table: torch.Tensor,
    elements: torch.Tensor,
    values: torch.Tensor,
    digests: torch.Tensor,
    *,
    lanes: int,
    width: int,
    write: bool,
    salt: int,
    every: int,
) -> None:
    """Write changes, or digest the present elements, on the current stream."""
    word = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}[width]
    grid = (len(table), 1, 1)
    scatter_changes[grid](
        table, elements, values, digests, salt, every, word, width, write, ENTRY, lanes,
        num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def scatter_changes(
    table,  # int64 [programs, ENTRY]
    elements,  # int32 [changes], of the piece
    values,  # of WORD [changes]
    digests,  # int64 [runs]
    salt,  # int64
    every,  # the base is compared at every N-th element
    WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    WRITE: tl.constexpr,
    ENTRY_WORDS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write some changes of a copy, or digest the old elements."""
    entry = table + tl.program_id(0).to(tl.int64) * ENTRY_WORDS
    first = tl.load(entry)
    lane = tl.arange(0, LANES)
    some = lane < tl.load(entry + 1)
    place = tl.load(elements + first + lane, mask=some, other=0).to(tl.int64)
    row = place // tl.load(entry + 2)
    at = place + row * tl.load(entry + 3) + tl.load(entry + 4)
    left = at - tl.load(entry + 5)
    inside = some & (left >= 0)
    to = tl.zeros_like(left)
    for dim in tl.static_range(3):
        step = tl.load(entry + 6 + 3 * dim)
        index = left // step
        inside = inside & (index < tl.load(entry + 7 + 3 * dim))
        to += index * tl.load(entry + 8 + 3 * dim)
        left -= index * step
    inside = inside & (left == 0)
    target = tl.load(entry + 15).to(tl.pointer_type(WORD))
    if WRITE:
        new = tl.load(values + first + lane, mask=inside, other=0)
        tl.store(target + to, new, mask=inside)
    else:
        base = tl.load(entry + 17)
        factor = 2 * place + 1
        if base != 0:
            # A part without a digest is compared with the base itself.
            inside = inside & (place % every == 0)
            there = base.to(tl.pointer_type(WORD))
            was = tl.load(there + at, mask=inside, other=0).to(tl.int64)
        else:
            was = tl.zeros_like(place) - salt
        old = tl.load(target + to, mask=inside, other=0).to(tl.int64)
        mixed = tl.where(inside, (old - was) * factor, 0)
        tl.atomic_add(digests + tl.load(entry + 16), tl.sum(mixed, axis=0))
