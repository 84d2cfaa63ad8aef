"""Short sequences of a packed row as one jagged tensor, for the fused kernels of SDPA on a GPU.

Buckets of short sequences cost more to fill and to empty than to attend in: each operand is copied
to them, and each gradient back. A jagged tensor is the packed row itself with its borders.

Invariants:

- Nothing is moved or padded: operands and result are the packed rows.
- It is taken only where SDPA has a fused kernel for it, since what is left then needs a mask that
  jagged tensors do not have.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer_adapter.attention.plan import Plan, Window

__all__ = ["attend_jagged", "may_be_jagged", "mostly_moves"]

#: Of which dtypes the fused kernels are, and whether FlashAttention is among them.
_FLASH_HAS: Final = {torch.float16: True, torch.bfloat16: True, torch.float32: False}
#: The kernels' own: a multiple of this, up to that.
_HEAD_DIM_STEP: Final = 8
_MOST_HEAD_DIM: Final = 256
#: Windows that SDPA has without a mask, and whether that is the causal one.
_CAUSAL: Final[dict[Window, bool]] = {(-1, -1): False, (-1, 0): True}


def mostly_moves(plan: Plan) -> bool:
    """Whether more than half of the slots of a plan are copies.

    Parameters
    ----------
    plan : Plan

    Returns
    -------
    bool
    """
    moved = sum(
        size
        for size, start in zip(plan.queries.sizes, plan.queries.starts, strict=True)
        if start < 0
    )
    return 2 * moved > sum(plan.queries.sizes)


def may_be_jagged(q: Tensor, k: Tensor, lengths_q: bytes, lengths_k: bytes, window: Window) -> bool:
    """Whether SDPA has a fused kernel for these operands as jagged tensors.

    Parameters
    ----------
    q : Tensor [T, H_q, D]
    k : Tensor [T, H_kv, D]
    lengths_q, lengths_k : bytes
        Of int64 arrays [S].
    window : (int, int)

    Returns
    -------
    bool
    """
    if not q.is_cuda or torch.version.hip is not None:
        return False
    head_dim = q.shape[-1]
    flash = _FLASH_HAS.get(q.dtype)
    return (
        flash is not None
        and lengths_q == lengths_k
        and window in _CAUSAL
        and head_dim % _HEAD_DIM_STEP == 0
        and head_dim <= _MOST_HEAD_DIM
        # 2.5 has it, and made the backward of the kernels right for views of packed rows.
        and hasattr(torch.nested, "nested_tensor_from_jagged")
        and _is_enabled(flash and _has_flash(q.device))
    )


def _is_enabled(flash: bool) -> bool:
    """Whether a kernel is allowed that takes jagged tensors: `sdpa_kernel` may forbid any."""
    allowed: Any = torch.backends.cuda
    return bool(allowed.mem_efficient_sdp_enabled() or (flash and allowed.flash_sdp_enabled()))


def attend_jagged(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: bytes, window: Window, scale: float
) -> Tensor:
    """Attend within each sequence.

    Parameters
    ----------
    q : Tensor [T, H_q, D]
    k, v : Tensor [T, H_kv, D]
    lengths : bytes
        Of an int64 array [S], of queries and keys.
    window : (int, int)
        For which `may_be_jagged` is true.
    scale : float

    Returns
    -------
    Tensor [T, H_q, D]
    """
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    borders, shortest, longest = _borders_on(lengths, q.device)
    # Of jagged tensors of different borders torch does not know that their shapes are the same.
    rows, keys, values = (
        torch.nested.nested_tensor_from_jagged(
            x.contiguous(), borders, min_seqlen=shortest, max_seqlen=longest
        ).transpose(1, 2)
        for x in (q, k, v)
    )
    out: Any = F.scaled_dot_product_attention(
        rows, keys, values, is_causal=_CAUSAL[window], scale=scale
    )
    packed: Tensor = out.transpose(1, 2).values()
    return packed


@functools.lru_cache(maxsize=8)
def _borders_on(lengths: bytes, device: torch.device) -> tuple[Tensor, int, int]:
    """Return the borders of the sequences that are not empty, the shortest and the longest."""
    counts = np.frombuffer(lengths, np.int64)
    counts = counts[counts > 0]
    with torch.inference_mode(False):  # else no call of another mode could keep it for backward
        borders = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])).to(device)
    return borders, int(counts.min()), int(counts.max())


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch's FlashAttention runs on a device."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
