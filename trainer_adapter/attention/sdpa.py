"""The SDPA backend of `varlen_attention`: runs a plan, bucket by bucket, on any device.

Invariants:

- Buckets use the layout of SDPA's operands: [sequences, heads, slots, head dimension].
- If the tokens of a bucket are contiguous in the packed row, its operands are views of the row.
- Each token is copied to its bucket at most once, and back once; as many as possible in one kernel,
  since short calls wait for the host to launch kernels.
- Padding is zeros in a bucket, and is not copied back.
- A mask holds at most `MASK_ELEMENTS`, or `MIN_BLOCK_ROWS` rows of one sequence's keys.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_adapter.attention.plan import (
    MASK_ELEMENTS,
    UNLIMITED,
    Bucket,
    IntArray,
    Moves,
    Plan,
    Window,
    block_rows,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_by_plan(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
    """Attend by a plan."""
    if not plan.buckets:
        # Connected to the operands, to give them gradients of 0.
        return q.new_zeros(q.shape) + (q[:0].sum() + k[:0].sum() + v[:0].sum())
    outs = [
        _attend_bucket(*operands, plan.window, scale)
        for operands in zip(
            plan.buckets,
            spread(q, plan.queries),
            spread(k, plan.keys),
            spread(v, plan.keys),
            strict=True,
        )
    ]
    return collect(outs, plan.queries)


def _attend_bucket(
    bucket: Bucket, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float
) -> Tensor:
    """Attend in one bucket: q [B, H_q, R, D], k and v [B, H_kv, K, D], result like q."""
    shared = q.shape[1] // k.shape[1]
    if shared == 1:
        return _attend(bucket, q, k, v, window, scale)
    if len(q) > 1:
        keys, values = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        return _attend(bucket, q, keys, values, window, scale)
    # Key heads become the batch dimension, each a view for its query heads. SDPA's own enable_gqa
    # may not use the fused kernels, and then needs rows x keys memory.
    rows = q.squeeze(0).unflatten(0, (-1, shared))  # type: ignore[no-untyped-call]
    keys, values = (x.squeeze(0).unsqueeze(1).expand(-1, shared, -1, -1) for x in (k, v))
    return _attend(bucket, rows, keys, values, window, scale).flatten(0, 1).unsqueeze(0)


def _attend(
    bucket: Bucket, q: Tensor, k: Tensor, v: Tensor, window: Window, scale: float
) -> Tensor:
    """Attend in one bucket, in the layout of SDPA: q [B, H, R, D], k and v [B, H, K, D]."""
    attention = functools.partial(_sdpa, scale=scale)
    if bucket.kind == "causal":
        return attention(q, k, v, is_causal=True)
    if bucket.kind == "full":
        if (bucket.key_counts == bucket.keys).all():
            return attention(q, k, v)
        counts = torch.from_numpy(bucket.key_counts).to(q.device)
        mask = torch.arange(bucket.keys, device=q.device) < counts[:, None, None, None]
        if q.device.type == "cpu" and q.dtype == torch.float32:
            # Under a mask the CPU's kernel rounds scaled scores differently forward and backward.
            # Short sequences, with weights near 1, show it in the gradient of their values.
            return F.scaled_dot_product_attention(q * scale, k, v, attn_mask=mask, scale=1.0)
        return attention(q, k, v, attn_mask=mask)
    alone = len(bucket.row_counts) == 1
    step = block_rows(bucket.keys, window) if alone else bucket.rows
    outs = []
    for first in range(0, bucket.rows, step):
        last = min(first + step, bucket.rows)
        low, high = _key_range(bucket, first, last, window) if alone else (0, bucket.keys)
        mask = _visible(bucket, (first, last), (low, high), window, q.device).unsqueeze(1)
        outs.append(
            attention(q[:, :, first:last], k[:, :, low:high], v[:, :, low:high], attn_mask=mask)
        )
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Attend by torch; the gradient of the result comes in the result's own layout."""
    # cuDNN keeps one backward plan for the shapes and strides of a call, regardless of the
    # gradient's: after a gradient of another layout, like a log-sum-exp's, it would read out of
    # place (seen with torch 2.11 on an H200).
    out = F.scaled_dot_product_attention(q, k, v, **given)
    if out.requires_grad and out.device.type == "cuda":
        out.register_hook(  # type: ignore[no-untyped-call]
            functools.partial(_in_layout, strides=out.stride())
        )
    return out


def _in_layout(grad: Tensor, strides: tuple[int, ...]) -> Tensor:
    if grad.stride() == strides:
        return grad
    return grad.new_empty_strided(grad.shape, strides).copy_(grad)


def _key_range(bucket: Bucket, first: int, last: int, window: Window) -> tuple[int, int]:
    """Find the keys that rows from `first` to before `last` see, of a sequence alone."""
    left, right = window
    diagonal = int(bucket.diagonals[0])
    low = 0 if left == UNLIMITED else max(0, first + diagonal - left)
    high = bucket.keys if right == UNLIMITED else min(bucket.keys, last + diagonal + right)
    return low, high


def _visible(
    bucket: Bucket, rows: tuple[int, int], keys: tuple[int, int], window: Window, device: Any
) -> Tensor:
    """Compute the visibility of these keys to these rows: bool [B, rows, keys]."""
    left, right = window
    facts = np.stack([bucket.row_counts, bucket.key_counts, bucket.diagonals])
    row_counts, key_counts, diagonals = (
        fact[:, None, None] for fact in torch.from_numpy(facts).to(device).unbind()
    )
    row = torch.arange(*rows, device=device)[:, None]
    key = torch.arange(*keys, device=device)
    distance = key - row - diagonals
    visible = key < key_counts
    if right != UNLIMITED:
        visible = visible & (distance <= right)
    if left != UNLIMITED:
        visible = visible & (distance >= -left)
    # A row of padding sees every key: without a visible key its nan could spoil the gradients.
    return visible | (row >= row_counts)


def log_sum_exp(q: Tensor, k: Tensor, plan: Plan, scale: float) -> Tensor:
    """Compute the log-sum-exp by blocks of rows, without a graph."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if not plan.buckets:
        return q.new_full((q.shape[1], len(q)), -math.inf, dtype=dtype)
    found = []
    # Autocast would compute the products in half precision.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for bucket, *operands in zip(
            plan.buckets, spread(q, plan.queries), spread(k, plan.keys), strict=True
        ):
            rows, keys = (x.to(dtype) for x in operands)
            rows = rows.unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]
            keys = keys.transpose(2, 3).unsqueeze(2)
            a_row = len(rows) * q.shape[1] * bucket.keys
            step = max(1, MASK_ELEMENTS // a_row)
            blocks = []
            for first in range(0, bucket.rows, step):
                last = min(first + step, bucket.rows)
                seen = _visible(bucket, (first, last), (0, bucket.keys), plan.window, q.device)
                scores = torch.matmul(rows[:, :, :, first:last], keys).mul_(scale)
                scores.masked_fill_(~seen[:, None, None], -math.inf)
                blocks.append(scores.logsumexp(dim=-1))
            found.append(torch.cat(blocks, dim=-1).flatten(1, 2).unsqueeze(-1))
    return gather_packed(found, plan.queries, -math.inf).squeeze(-1).t().contiguous()


class _DifferentiableLse(torch.autograd.Function):
    """Give a log-sum-exp its gradient, missing in the backends."""

    # Its gradient to a row's query is the expected key of attention, computed by attention with the
    # keys for values; its gradient to the keys equals the gradient of those values with each row's
    # query as its output gradient. So a backend needs only its own `attend`.

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, lse: Tensor, scale: float, attend: Attend
    ) -> Tensor:
        ctx.save_for_backward(q, k, lse)
        ctx.scale, ctx.attend = scale, attend
        return lse.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q, k, lse = ctx.saved_tensors
        weights = torch.where(lse.isfinite(), grad * ctx.scale, 0).t().unsqueeze(-1)
        with torch.enable_grad():
            values = k.detach().requires_grad_()
            expected = ctx.attend(q.detach(), k.detach(), values)
            (to_keys,) = torch.autograd.grad(expected, values, (weights * q).to(q.dtype))
        return (weights * expected.detach()).to(q.dtype), to_keys, None, None, None


def differentiable_lse(q: Tensor, k: Tensor, lse: Tensor, scale: float, attend: Attend) -> Tensor:
    """Connect a log-sum-exp to its queries and keys, to make it differentiable."""
    connected: Tensor = _DifferentiableLse.apply(  # type: ignore[no-untyped-call]
        q, k, lse, scale, attend
    )
    return connected


# -- tokens to their buckets and back -------------------------------------------------------------


class _Rows(NamedTuple):
    """Moves as index tensors on a device; slots cover every moving bucket, in order."""

    of_slots: Tensor  # packed row of each slot, 0 for padding
    padding: Tensor | None  # padded slots, if any
    to_rows: list[Tensor]  # per bucket: packed row of each slot, T for padding
    absent: Tensor | None  # packed rows in no bucket, if any
    places: Tensor  # slot of each packed row over the buckets, 0 where absent


# The layers of a model use the same moves, so they are copied to the device once.
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
    # Without moves torch's own operators: their graph is lighter.
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
    """Gradient by `_Collect`, without sums: each row fills one slot at most."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves) -> tuple[Tensor, ...]:
        ctx.moves = moves
        return tuple(_spread(x, moves))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Collect.apply(ctx.moves, *grads), None  # type: ignore[no-untyped-call]


class _Collect(torch.autograd.Function):
    """Gradient by `_Spread`, with 0 for padding."""

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
    """View rows from `first` on as [count, H, length, D]: in one step, for many calls."""
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
    # One more row, as the target of the padding.
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
