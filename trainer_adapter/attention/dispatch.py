"""The choice of a backend for a call of `varlen_attention`, and the eager run by it.

Below both callers: the eager front (`varlen.py`) and the operator for compiled models
(`compiled.py`).

Invariants:

- Each backend gives the same values and gradients. A deviating backend is refused by its obstacle
  function.
- Borders on a CUDA device stay unread unless SDPA runs, since reading them makes the host wait.
"""

from __future__ import annotations

import functools
from typing import Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from shmbus.base.arguments import check_choice
from trainer_adapter.attention.arguments import Call
from trainer_adapter.attention.native import call_native, is_for_lengths_to_decide, native_obstacle
from trainer_adapter.attention.plan import IntArray, make_plan
from trainer_adapter.attention.sdpa import attend_by_plan, differentiable_lse, log_sum_exp

Backend = Literal["auto", "native", "sdpa"]
_BACKENDS: Final = get_args(Backend)


def attention_backend(
    q: Tensor,
    k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    backend: Backend = "auto",
) -> Literal["native", "sdpa"]:
    """Return the backend of `varlen_attention` for these arguments.

    ``"auto"`` takes the native kernel if it runs correctly: on CUDA from compute capability 8.0 on,
    in float16 and bfloat16, with torch 2.10 or later (windows and non-default scales from 2.11),
    for supported head dimensions and windows; otherwise SDPA, which always runs.

    Parameters
    ----------
    q : Tensor [T_q, H_q, D]
    k : Tensor [T_k, H_kv, D]
    max_q, max_k, scale, window_size, backend
        As for `varlen_attention`.

    Returns
    -------
    str
        ``"native"`` or ``"sdpa"``.

    Raises
    ------
    ValueError
        For an unknown `backend`, and for a backend that cannot run, with the reason.
    """
    check_choice("backend", backend, _BACKENDS, "'auto' fits every device")
    if backend == "sdpa":
        return "sdpa"
    window = tuple(window_size)
    default_scale = scale is None or scale == q.shape[-1] ** -0.5
    obstacle = native_obstacle(q, k, max_q, max_k, default_scale, window)
    if obstacle is None:
        return "native"
    if backend != "auto":
        raise ValueError(
            f"backend {backend!r} cannot run here: {obstacle}; pass backend='auto' or 'sdpa'"
        )
    return "sdpa"


def is_native_of_any_length(q: Tensor, k: Tensor, call: Call, backend: Backend) -> bool:
    """Return True if the native kernel takes calls of every length, with borders unread."""
    # Then a compiled model uses the kernel's own nodes, and one graph serves every batch.
    return (
        backend in ("auto", "native")
        and not is_for_lengths_to_decide(call.window)
        and not (_is_readable(call.cu_seqlens_q) or _is_readable(call.cu_seqlens_k))
        and native_obstacle(q, k, 0, 0, call.scale == q.shape[-1] ** -0.5, call.window) is None
    )


def run_backend(
    chosen: str, q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend by one backend, eagerly."""
    if chosen == "sdpa":
        return _run_sdpa(q, k, v, call, return_lse)
    for borders, rows, longest, name in call.sides(q, k):
        if _is_readable(borders):
            _checked_lengths(borders, len(rows), longest, name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call_native(q, k, v, call)[0]

    out, lse = call_native(q, k, v, call)
    return (out, differentiable_lse(q, k, lse, call.scale, attend)) if return_lse else out


def _is_readable(borders: Tensor) -> bool:
    """Return True for borders on the host; for borders on the device the host would wait."""
    return borders.device.type == "cpu"


def _run_sdpa(
    q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    lengths = [
        _checked_lengths(borders, len(rows), longest, name).tobytes()
        for borders, rows, longest, name in call.sides(q, k)
    ]
    plan = make_plan(*lengths, call.window, q.shape[1] * q.shape[2], q.device.type)
    attend = functools.partial(attend_by_plan, plan=plan, scale=call.scale)
    out = attend(q, k, v)
    if not return_lse:
        return out
    lse = log_sum_exp(q.detach(), k.detach(), plan, call.scale)
    return out, differentiable_lse(q, k, lse, call.scale, attend)


def _checked_lengths(borders: Tensor, tokens: int, longest: int, name: str) -> IntArray:
    """Bring the borders to the host, check them, and return the lengths [S]."""
    # The host waits for the device once a batch, not in every layer: the lengths are cached on the
    # tensor until a write to it. On the host an array may share the memory, and writes uncounted.
    kept: tuple[int, int, IntArray] | None = getattr(borders, "_shmbus_lengths", None)
    version = -1 if borders.is_inference() or _is_readable(borders) else borders._version
    if kept is None or kept[:2] != (version, tokens) or version < 0:
        edges = borders.detach().to("cpu", torch.int64).numpy()
        lengths: IntArray = np.diff(edges)
        if edges[0] != 0 or edges[-1] != tokens or (lengths < 0).any():
            raise ValueError(
                f"{name}: expected it to rise from 0 to {tokens}, the number of tokens, got "
                f"{edges[0]} to {edges[-1]}, smallest step {lengths.min(initial=0)}; "
                "build it as the cumulated lengths after a 0"
            )
        kept = (version, tokens, lengths)
        borders._shmbus_lengths = kept  # type: ignore[attr-defined]
    if kept[2].max(initial=0) > longest:
        raise ValueError(
            f"{name}: expected at most {longest} tokens a sequence, as max_{name[-1]} says, got "
            f"{kept[2].max()}; pass the longest length"
        )
    return kept[2]
