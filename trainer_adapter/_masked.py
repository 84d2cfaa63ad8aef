"""Arithmetic under a loss mask, for losses and corrections: checks, ratios, sums of sequences.

Invariants:

- Filler, where the mask is False, is replaced by 0 before any arithmetic with a possible nan in
  result or gradient.
- At least float32 inside, for any dtype of the operands.
- The host never waits for the device.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LOG_RATIO_LIMIT: Final = 20.0
"""Log ratios are cut at this size before they are exponentiated: exp(20) is 5e8, far beyond any
clip, while an infinite ratio times an advantage of 0 would be nan."""


def by_sequence(
    kept: Tensor, loss_mask: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sum values and count tokens of each sequence."""
    if kept.dim() == 2:
        return kept.sum(dim=1), loss_mask.sum(dim=1)
    sequence, bins = sequence_of_tokens(kept, cu_seqlens)
    sums = kept.new_zeros(bins).index_add(0, sequence, kept)
    counts = kept.new_zeros(bins).index_add(0, sequence, loss_mask.to(kept.dtype))
    return sums[:-1], counts[:-1]


def sequence_of_tokens(row: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, int]:
    """Return each token's sequence in a packed row, and the number of sequences plus one."""
    # The last number counts the tokens behind the last border, outside of every sequence.
    if cu_seqlens is None:
        raise ValueError(
            "cu_seqlens: expected the borders of the sequences, since packed rows are taken by "
            "sequence, got None; pass batch.cu_seqlens"
        )
    got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
    if got not in (torch.int32, torch.int64):
        raise TypeError(
            f"cu_seqlens: expected an int32 or int64 tensor, got {got}; pass batch.cu_seqlens"
        )
    if cu_seqlens.dim() != 1 or len(cu_seqlens) == 0:
        raise ValueError(
            f"cu_seqlens: expected shape [sequences + 1], got {tuple(cu_seqlens.shape)}; "
            "pass batch.cu_seqlens"
        )
    positions = torch.arange(len(row), device=row.device)
    return torch.bucketize(positions, cu_seqlens[1:].to(positions), right=True), len(cu_seqlens)


def sent(name: str, logprobs: Tensor | None) -> Tensor:
    """Refuse the None of a batch from producers without logprobs."""
    if logprobs is None:
        raise ValueError(
            f"{name}: expected logprobs of the tokens, got None, since the groups of this batch "
            "came without any; have producers put logprobs=, or name their field by "
            "fields=FieldNames(logprobs=...), or compute them before the step"
        )
    return logprobs


def check_tensors(**given: object) -> None:
    """Raise TypeError for the first argument that is no tensor."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name}: expected a torch.Tensor, got {type(value).__name__}; use torch.as_tensor"
            )


def check_operands(loss_mask: Tensor, **operands: Tensor) -> None:
    check_tensors(loss_mask=loss_mask, **operands)
    if loss_mask.dtype != torch.bool:
        raise TypeError(
            f"loss_mask: expected torch.bool, got {loss_mask.dtype}; convert with .bool()"
        )
    for name, operand in operands.items():
        if not operand.is_floating_point():
            raise TypeError(
                f"{name}: expected a floating dtype, got {operand.dtype}; convert with .float()"
            )
        if operand.shape != loss_mask.shape or operand.dim() not in (1, 2):
            raise ValueError(
                f"{name}: expected [T] or [S, L] as loss_mask, which is {tuple(loss_mask.shape)}, "
                f"got {tuple(operand.shape)}; one entry a token, aligned to its own token"
            )


def real(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Put 0 in place of filler, in float32 at least."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return torch.where(loss_mask, wide, 0)


def log_ratio(above: Tensor, below: Tensor, loss_mask: Tensor) -> Tensor:
    return real(above, loss_mask) - real(below, loss_mask)


def bounded_ratio(above: Tensor, below: Tensor, loss_mask: Tensor) -> Tensor:
    cut = log_ratio(above, below, loss_mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return cut.exp()
