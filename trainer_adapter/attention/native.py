"""torch's own kernel, `torch.nn.attention.varlen`, as a backend of `varlen_attention`.

Written for torch 2.10 (the first with the kernel) to 2.15; windows and scales need 2.11.

Invariant: `native_obstacle` refuses a call if the kernel cannot run it, or would give a different
result from the remaining backends.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from trainer_adapter.attention.arguments import Call
from trainer_adapter.attention.plan import UNLIMITED

MAX_HEAD_DIM: Final = 256
"""The limit of FlashAttention's kernels, which also need a multiple of 8."""
NATIVE_MAX_HEAD_DIM_ANYWHERE: Final = 192
"""Beyond this, the kernel's backward needs the shared memory of compute capability 8.0 or 9.0."""


class NativeEntry(NamedTuple):
    """torch's function, the request for its log-sum-exp, and the names of its parameters."""

    function: Callable[..., Any]
    lse_request: Any
    parameters: frozenset[str]


def _find_native() -> NativeEntry | None:
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    parameters = frozenset(inspect.signature(varlen_attn).parameters)
    return NativeEntry(varlen_attn, AuxRequest(lse=True), parameters)


_find_native_once = functools.cache(_find_native)


def native_entry() -> NativeEntry | None:
    """Return torch's function with its parameters, if this torch provides it."""
    # torch.compile traces through functools.cache, with a warning.
    return _find_native() if torch.compiler.is_compiling() else _find_native_once()


def native_obstacle(
    q: Tensor, k: Tensor, max_q: int, max_k: int, default_scale: bool, window: tuple[int, ...]
) -> str | None:
    """Return the reason if the native kernel cannot run this call, or would be wrong; else None."""
    if not q.is_cuda or torch.version.hip is not None:
        return f"it needs a CUDA device, got {q.device} with torch {torch.__version__}"
    entry = native_entry()
    if entry is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen, 2.10 has"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"it needs float16 or bfloat16, got {q.dtype}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    head_dim = q.shape[-1]
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"it needs a head dimension that is a multiple of 8 up to 256, got {head_dim}"
    if q.numel() == 0 or k.numel() == 0:
        return "it needs at least one query and one key token"
    if head_dim > NATIVE_MAX_HEAD_DIM_ANYWHERE and capability not in ((8, 0), (9, 0)):
        return f"on this GPU it needs a head dimension up to 192, got {head_dim}"
    if "window_size" not in entry.parameters and window not in ((-1, -1), (-1, 0)):
        return f"windows need torch 2.11, this is {torch.__version__}"
    if "scale" not in entry.parameters and not default_scale:
        return f"a scale of one's own needs torch 2.11, this is {torch.__version__}"
    if is_for_lengths_to_decide(window) and max_q > max_k and not 0 < window[1] < max_k:
        return f"window {window} with max_q {max_q} above max_k {max_k} is not what it computes"
    return None


def is_for_lengths_to_decide(window: tuple[int, ...]) -> bool:
    """Return True if the native kernel's fitness for a window depends on the longest lengths."""
    # The kernel reads a right limit of max_k or more as no limit, and sets max_k for a left limit
    # alone. For a row far above its first key, both change their meaning.
    left, right = window
    return right > 0 or (left != UNLIMITED and right == UNLIMITED)


def call_native(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Run the kernel."""
    entry = native_entry()
    assert entry is not None, "attention_backend chose what this torch lacks"
    options: dict[str, Any] = {}
    if "scale" in entry.parameters:
        options["scale"] = call.scale
    if "window_size" in entry.parameters:
        options["window_size"] = call.window
    else:
        options["is_causal"] = call.window == (-1, 0)
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in entry.parameters:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    borders = call.borders_on(q.device)
    out, lse = entry.function(
        q, k, v, *borders, call.max_q, call.max_k, return_aux=entry.lse_request, **options
    )
    # For rows without visible keys, FlashAttention-2 gives plus infinity and 3 gives minus.
    lse = lse.detach()
    return out, lse.masked_fill(lse == math.inf, -math.inf)
