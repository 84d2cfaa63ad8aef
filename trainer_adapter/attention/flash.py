"""The installed flash-attn package as a backend of `varlen_attention`.

Written for flash-attn 2.6 to 2.8 (`flash_attn.flash_attn_varlen_func`): from 2.1 on it aligns
bottom-right, from 2.6 on its log-sum-exp has shape [heads, tokens]. Version 3 is another package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from trainer_adapter.attention.native import kernel_obstacle

__all__ = ["call_flash", "flash_function", "flash_obstacle"]

FLASH_FROM: Final = (2, 6)


@functools.cache
def flash_function() -> tuple[Callable[..., Any] | None, str]:
    """Find the package's function."""
    try:
        import flash_attn
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        return None, f"flash-attn is not installed ({error})"
    version = tuple(int(part) for part in flash_attn.__version__.split(".")[:2])
    if version < FLASH_FROM:
        return None, f"it needs flash-attn 2.6, this is {flash_attn.__version__}"
    return flash_attn_varlen_func, ""


def flash_obstacle(
    q: Tensor, k: Tensor, max_q: int, max_k: int, window: tuple[int, ...]
) -> str | None:
    """Return the reason if flash-attn cannot run this call, or would be wrong; else None."""
    if not q.is_cuda or torch.version.hip is not None:
        return f"it needs a CUDA device, got {q.device}"
    function, reason = flash_function()
    if function is None:
        return reason
    if (obstacle := kernel_obstacle(q, k)) is not None:
        return obstacle
    # As in torch's equal kernel: for a row far above its first key, the limits would change their
    # meaning.
    left, right = window
    if max_q > max_k and (right >= max_k or (left != -1 and right == -1)):
        return f"window {window} with max_q {max_q} above max_k {max_k} is not what it computes"
    return None


def call_flash(
    q: Tensor, k: Tensor, v: Tensor, borders: list[Tensor], longest: tuple[int, int],
    scale: float, window: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run flash-attn."""
    function, reason = flash_function()
    assert function is not None, reason
    out, lse, _ = function(
        q, k, v, *borders, *longest,
        softmax_scale=scale, causal=window == (-1, 0), window_size=window, return_attn_probs=True,
    )  # fmt: skip
    lse = lse.detach()
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)
