"""Tokens between a packed row and the buckets of a plan, forward and backward.

Invariants:

- Where the tokens of a bucket lie together in the packed row, its operands are views of that.
- Nothing is gathered into one tensor and split, or collected in one and moved: each token is copied
  once on the way in, if at all, and once on the way out.
- Padding is zeros on the way in, and goes nowhere on the way out.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer_adapter._attention_plan import IntArray, Moves

__all__ = ["collect", "gather_packed", "spread"]


class _Rows(NamedTuple):
    """Moves as a device wants them."""

    of_slots: list[Tensor]  # a bucket each: packed row of each slot, 0 for padding
    padding: list[Tensor | None]  # a bucket each: the slots of padding, if there are any
    to_rows: list[Tensor]  # a bucket each: packed row of each slot, T for padding
    absent: Tensor | None  # packed rows in no bucket, if there are any
    places: Tensor  # slot of each packed row among those of all buckets, 0 where absent


# A model asks for the same moves in each of its layers, so they go to the device once.
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

    borders = np.cumsum([0, *moves.sizes])
    slots, missing = moves.slots, moves.slots < 0
    parts = [slice(low, high) for low, high in itertools.pairwise(borders)]
    of_slots = sent(np.where(missing, 0, slots))
    to_rows = sent(np.where(missing, len(moves.places), slots))
    return _Rows(
        [of_slots[part] for part in parts],
        [sent_if_any(np.flatnonzero(missing[part])) for part in parts],
        [to_rows[part] for part in parts],
        sent_if_any(np.flatnonzero(moves.places < 0)),
        sent(np.maximum(moves.places, 0)),
    )


def spread(x: Tensor, moves: Moves) -> list[Tensor]:
    """Bring packed rows [T, ...] into one [slots, ...] a bucket."""
    # Operators of torch's own where nothing moves: their graph is lighter.
    if moves.starts == (0,) and moves.sizes == (len(x),):
        return [x]
    parts: tuple[Tensor, ...] = _Spread.apply(x, moves)  # type: ignore[no-untyped-call]
    return list(parts)


def collect(parts: list[Tensor], moves: Moves) -> Tensor:
    """Bring one [slots, ...] a bucket back into packed rows [T, ...]; 0 in rows of no bucket."""
    if moves.starts == (0,) and moves.sizes == (len(moves.places),):
        return parts[0]
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
    parts = []
    for bucket, (start, size) in enumerate(zip(moves.starts, moves.sizes, strict=True)):
        if start >= 0:
            parts.append(x[start : start + size])
            continue
        taken = x.index_select(0, rows.of_slots[bucket])
        padding = rows.padding[bucket]
        if padding is not None:
            taken.index_fill_(0, padding, 0.0)
        parts.append(taken)
    return parts


def gather_packed(parts: list[Tensor], moves: Moves, fill: float) -> Tensor:
    """Bring one [slots, ...] a bucket into packed rows, `fill` in rows of no bucket; no graph."""
    # A CPU takes rows faster than it puts them, even with one pass more to get them together.
    way = _taken if parts[0].device.type == "cpu" else _put
    packed = way(parts, moves)
    absent = _rows_on(moves, packed.device).absent
    return packed if absent is None else packed.index_fill_(0, absent, fill)


def _taken(parts: list[Tensor], moves: Moves) -> Tensor:
    slots = torch.cat(parts)
    return slots if moves.identity else slots.index_select(0, _rows_on(moves, slots.device).places)


def _put(parts: list[Tensor], moves: Moves) -> Tensor:
    # One row more, where all padding goes.
    packed = parts[0].new_empty((len(moves.places) + 1, *parts[0].shape[1:]))
    all_rows = _rows_on(moves, packed.device).to_rows
    for part, start, to_rows in zip(parts, moves.starts, all_rows, strict=True):
        if start >= 0:
            packed[start : start + len(part)] = part
        else:
            _wide(packed).index_copy_(0, to_rows, _wide(part))
    return packed[:-1]


def _wide(x: Tensor) -> Tensor:
    """View rows as words of 8 bytes where they are such: the kernel moves one element a thread."""
    flat = x.reshape(len(x), -1)
    return flat.view(torch.int64) if flat.shape[1] * x.element_size() % 8 == 0 else flat
