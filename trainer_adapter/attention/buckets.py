"""Copies of tokens from a packed row to the buckets of a plan and back, forward and backward.

Invariants:

- Buckets have the layout of SDPA's operands: [sequences, heads, slots, head dimension].
- Where the tokens of a bucket are contiguous in the packed row, its operands are views of the row.
- Each token is copied to its bucket at most once, and back once; as many as possible in one kernel,
  since short calls wait for the host to launch kernels.
- Padding is zeros in a bucket, and is not copied back.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_adapter.attention.plan import IntArray, Moves

__all__ = ["collect", "gather_packed", "spread"]


class _Rows(NamedTuple):
    """Moves as index tensors on a device; slots are those of all buckets that move, in order."""

    of_slots: Tensor  # packed row of each slot, 0 for padding
    padding: Tensor | None  # the slots of padding, if there are any
    to_rows: list[Tensor]  # a bucket each: packed row of each slot, T for padding
    absent: Tensor | None  # packed rows in no bucket, if there are any
    places: Tensor  # slot of each packed row among those of all buckets, 0 where absent


# All layers of a model use the same moves, so they are copied to the device once.
_rows: weakref.WeakKeyDictionary[Moves, dict[torch.device, _Rows]] = weakref.WeakKeyDictionary()


def _rows_on(moves: Moves, device: torch.device) -> _Rows:
    of_moves = _rows.setdefault(moves, {})
    found = of_moves.get(device)
    if found is None:
        found = of_moves[device] = _made_on(moves, device)
    return found


def _made_on(moves: Moves, device: torch.device) -> _Rows:
    def sent(rows: IntArray) -> Tensor:
        return torch.from_numpy(rows).to(device)

    def sent_if_any(rows: IntArray) -> Tensor | None:
        return sent(rows) if len(rows) else None

    moving = np.repeat([start < 0 for start in moves.starts], moves.sizes)
    slots = moves.slots[moving]
    missing = slots < 0
    sizes = [size for size, start in zip(moves.sizes, moves.starts, strict=True) if start < 0]
    return _Rows(
        sent(np.where(missing, 0, slots)),
        sent_if_any(np.flatnonzero(missing)),
        list(torch.split(sent(np.where(missing, len(moves.places), slots)), sizes)),
        sent_if_any(np.flatnonzero(moves.places < 0)),
        sent(np.maximum(moves.places, 0)),
    )


def spread(x: Tensor, moves: Moves) -> list[Tensor]:
    """Copy packed rows to the buckets."""
    # torch's own operators where nothing moves: their graph is lighter.
    if moves.starts == (0,) and moves.sizes == (len(x),):
        return [x.unflatten(0, (moves.counts[0], -1)).transpose(1, 2)]  # type: ignore[no-untyped-call]
    parts: tuple[Tensor, ...] = _Spread.apply(x, moves)  # type: ignore[no-untyped-call]
    return list(parts)


def collect(parts: list[Tensor], moves: Moves) -> Tensor:
    """Copy buckets back to packed rows."""
    if moves.starts == (0,) and moves.sizes == (len(moves.places),):
        return _by_slots(parts[0])
    packed: Tensor = _Collect.apply(moves, *parts)  # type: ignore[no-untyped-call]
    return packed


class _Spread(torch.autograd.Function):
    """Its gradient is `_Collect`'s value: neither adds up, since each row has one slot at most."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves) -> tuple[Tensor, ...]:
        ctx.moves = moves
        return tuple(_spread(x, moves))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Collect.apply(ctx.moves, *grads), None  # type: ignore[no-untyped-call]


class _Collect(torch.autograd.Function):
    """Its gradient is `_Spread`'s value, which makes that of padding 0."""

    @staticmethod
    def forward(ctx: Any, moves: Moves, *parts: Tensor) -> Tensor:
        ctx.moves = moves
        return gather_packed(list(parts), moves, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts: tuple[Tensor, ...] = _Spread.apply(grad, ctx.moves)  # type: ignore[no-untyped-call]
        return None, *parts


def _spread(x: Tensor, moves: Moves) -> list[Tensor]:
    rows = _rows_on(moves, x.device)
    moved = x
    if len(rows.of_slots):
        taken = _wide(x).index_select(0, rows.of_slots)
        if rows.padding is not None:
            taken.index_fill_(0, rows.padding, 0)
        moved = taken.view(x.dtype)
    parts, done = [], 0
    for start, size, count in zip(moves.starts, moves.sizes, moves.counts, strict=True):
        if start >= 0:
            parts.append(_bucket(x, start, size // count, count))
        else:
            parts.append(_bucket(moved, done, size // count, count))
            done += size
    return parts


def _bucket(x: Tensor, first: int, length: int, count: int) -> Tensor:
    """See rows from `first` on as [count, H, length, D]: in one step, since there are many."""
    to_row, to_head, to_value = x.stride()
    return x.as_strided(
        (count, x.shape[1], length, x.shape[2]),
        (length * to_row, to_head, to_row, to_value),
        x.storage_offset() + first * to_row,
    )


def _by_slots(part: Tensor) -> Tensor:
    """See [B, H, n, D] as [B * n, H, D]."""
    return part.transpose(1, 2).flatten(0, 1)


def gather_packed(parts: list[Tensor], moves: Moves, fill: float) -> Tensor:
    """As `collect`, without a graph, and with `fill` in rows of no bucket."""
    slots = [_by_slots(part) for part in parts]
    if moves.identity:
        return torch.cat(slots)
    # A CPU gathers rows faster than it scatters them, even with one more pass to concatenate them.
    way = _taken if parts[0].device.type == "cpu" else _put
    packed = way(slots, moves)
    absent = _rows_on(moves, packed.device).absent
    return packed if absent is None else packed.index_fill_(0, absent, fill)


def _taken(slots: list[Tensor], moves: Moves) -> Tensor:
    together = torch.cat(slots)
    return together.index_select(0, _rows_on(moves, together.device).places)


def _put(slots: list[Tensor], moves: Moves) -> Tensor:
    # One more row, as the target of all padding.
    packed = slots[0].new_empty((len(moves.places) + 1, *slots[0].shape[1:]))
    placed = list(zip(slots, moves.starts, strict=True))
    staying = [(part, start) for part, start in placed if start >= 0]
    if staying:
        targets = [packed[start : start + len(part)] for part, start in staying]
        torch._foreach_copy_(targets, [part for part, _ in staying])
    moved = [part for part, start in placed if start < 0]
    for part, to_rows in zip(moved, _rows_on(moves, packed.device).to_rows, strict=True):
        _wide(packed).index_copy_(0, to_rows, _wide(part.contiguous()))
    return packed[:-1]


def _wide(x: Tensor) -> Tensor:
    """View rows as words of 8 bytes if possible: kernels move one element a thread."""
    a_word = 8 // x.element_size()
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    fits = x.stride(-1) == 1 and not any(step % a_word for step in steps)
    return x.view(torch.int64) if fits else x
