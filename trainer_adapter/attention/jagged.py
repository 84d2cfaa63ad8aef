"""Short sequences of a packed row by the kernels that SDPA has for jagged tensors, on a GPU.

Buckets of short sequences cost more to fill and to empty than to attend in: each operand is copied
to them, and each gradient back. A jagged tensor is the packed row itself with its borders. The
kernels are called as `torch.nested` calls them, without its tensors, which take the host 4 ms a
step, forward and backward.

Invariants:

- Nothing is moved or padded: operands and result are the packed rows.
- It is taken only where the kernels are known by their parameters, and can run.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from trainer_adapter.attention.plan import MOVE_KEYS, Plan, Window

__all__ = ["attend_jagged", "is_less_work_jagged", "may_be_jagged"]

#: Part of the work by which the kernels for jagged tensors are slower than those for padded ones:
#: of 64 long sequences the latter take 0.80 of the time on an H200, copies included.
_SLOWER: Final = 0.2
#: Of which dtypes the fused kernels are, and whether FlashAttention is among them.
_FLASH_HAS: Final = {torch.float16: True, torch.bfloat16: True, torch.float32: False}
#: The kernels' own: a multiple of this, up to that.
_HEAD_DIM_STEP: Final = 8
_MOST_HEAD_DIM: Final = 256
#: Names of their parameters as of torch 2.11 and 2.13, as far as they are given here.
_FLASH_PARAMETERS: Final = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
    "return_debug_mask", "scale",
)  # fmt: skip
_EFFICIENT_PARAMETERS: Final = (
    "query", "key", "value", "bias", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
    "dropout_p", "custom_mask_type", "compute_log_sumexp", "scale",
)  # fmt: skip
#: How the other kernel calls a causal mask that is aligned at the first row and key.
_CAUSAL_MASK: Final = 1
#: Windows that SDPA has without a mask, and whether that is the causal one.
_CAUSAL: Final[dict[Window, bool]] = {(-1, -1): False, (-1, 0): True}


def is_less_work_jagged(plan: Plan) -> bool:
    """Whether the copies of a plan cost a GPU more than kernels for jagged tensors do."""
    return plan.moved * MOVE_KEYS["cuda"] > _SLOWER * plan.work


def may_be_jagged(q: Tensor, k: Tensor, lengths_q: bytes, lengths_k: bytes, window: Window) -> bool:
    """Whether SDPA has a fused kernel for these operands as jagged tensors."""
    if not q.is_cuda or torch.version.hip is not None:
        return False
    head_dim = q.shape[-1]
    return (
        lengths_q == lengths_k
        and window in _CAUSAL
        and head_dim % _HEAD_DIM_STEP == 0
        and head_dim <= _MOST_HEAD_DIM
        and q.dtype in _FLASH_HAS
        and (_takes_flash(q) or _takes_efficient())
    )


def _takes_flash(q: Tensor) -> bool:
    """Whether FlashAttention can run, and nobody forbids it (`sdpa_kernel` may)."""
    allowed: Any = torch.backends.cuda
    return (
        _FLASH_HAS[q.dtype]
        and bool(allowed.flash_sdp_enabled())
        and _is_known("_flash_attention_forward", _FLASH_PARAMETERS)
        and _has_flash(q.device)
    )


def _takes_efficient() -> bool:
    """Whether nobody forbids the memory-efficient kernel."""
    allowed: Any = torch.backends.cuda
    return bool(allowed.mem_efficient_sdp_enabled()) and _is_known(
        "_efficient_attention_forward", _EFFICIENT_PARAMETERS
    )


@functools.cache
def _is_known(name: str, parameters: tuple[str, ...]) -> bool:
    """Whether this torch has an operator, with these parameters first."""
    operator: Any = getattr(torch.ops.aten, name, None)
    if operator is None or "default" not in operator.overloads():
        return False
    found = [each.name for each in operator.default._schema.arguments]
    return found[: len(parameters)] == list(parameters)


def attend_jagged(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: bytes, window: Window, scale: float
) -> Tensor:
    """Attend within each sequence."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    q, k, v = (x.contiguous() for x in (q, k, v))
    borders, longest = _borders_on(lengths, q.device)
    out: Tensor
    if _takes_flash(q):
        out, *_ = torch.ops.aten._flash_attention_forward.default(
            q, k, v, borders, borders, longest, longest, 0.0, _CAUSAL[window], False, scale=scale
        )
        return out
    mask = _CAUSAL_MASK if _CAUSAL[window] else 0
    rows, keys, values = (x.unsqueeze(0) for x in (q, k, v))
    out, *_ = torch.ops.aten._efficient_attention_forward.default(
        rows, keys, values, None, borders, borders, longest, longest, 0.0, mask,
        _needs_gradient(q, k, v), scale=scale,
    )  # fmt: skip
    return out.squeeze(0)


def _needs_gradient(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


@functools.lru_cache(maxsize=8)
def _borders_on(lengths: bytes, device: torch.device) -> tuple[Tensor, int]:
    """Return the borders of the sequences that are not empty, and the longest length."""
    counts = np.frombuffer(lengths, np.int64)
    counts = counts[counts > 0]
    with torch.inference_mode(False):  # else no call of another mode could keep it for backward
        borders = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])).int().to(device)
    return borders, int(counts.max())


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether torch's FlashAttention runs on a device."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
