"""`varlen_attention`: checks the arguments, chooses a backend, and runs it.

A packed batch is one row of tokens, its sequences end to end. Two backends give the same results:
torch's own kernel (`native.py`), and `scaled_dot_product_attention` (SDPA) by a plan: one call for
one sequence, or for several of like shape padded to one (`plan.py`, `sdpa.py`). `dispatch.py`
chooses between them.

Invariants:

- Each sequence gets the result and the gradient of a separate call: no row sees a key of another
  sequence, not even a nan there.
- Rows and keys are aligned at their ends (bottom-right). A row without visible keys gets 0, its
  log-sum-exp is minus infinity, and no gradient flows from it. Such rows never reach SDPA, since
  its kernels disagree on them.
- Beyond operands and result, memory grows with single sequences, never with the packed length
  squared.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from shmbus.base.arguments import check_flag
from trainer_adapter.attention.arguments import (
    Call,
    as_autocast,
    check_borders,
    check_operands,
    checked_max,
    checked_scale,
    checked_window,
)
from trainer_adapter.attention.compiled import varlen_operator
from trainer_adapter.attention.dispatch import (
    Backend,
    attention_backend,
    is_native_of_any_length,
    run_backend,
)


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    backend: Backend = ...,
) -> Tensor: ...
@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = ...,
    window_size: tuple[int, int] = ...,
    enable_gqa: bool = ...,
    return_lse: bool,
    backend: Backend = ...,
) -> Any: ...
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within each sequence of a packed batch.

    Parameters
    ----------
    q : Tensor [T_q, H_q, D], floating
    k, v : Tensor [T_k, H_kv, D], same dtype and device as `q`
        Under autocast the operands are cast to its dtype first.
    cu_seqlens_q, cu_seqlens_k : Tensor [S + 1], int32 or int64
        Borders of the S sequences, from 0 to T. Sequences may be empty.
    max_q, max_k : int
        Tokens of the longest sequence, or more.
    scale : float, optional
        Factor of the scores; ``D ** -0.5`` by default.
    window_size : (int, int)
        Row i sees the keys from ``i + n_k - n_q - left`` to ``i + n_k - n_q + right``; -1 is no
        limit. ``(-1, 0)`` is causal, aligned bottom-right for different lengths.
    enable_gqa : bool
        Allow H_kv < H_q, for multiples of H_kv.
    return_lse : bool
        Also return the log-sum-exp of the scaled scores.
    backend : {"auto", "native", "sdpa"}
        See `attention_backend`.

    Returns
    -------
    out : Tensor [T_q, H_q, D], dtype of `q`, or of autocast
        0 in rows without visible keys.
    lse : Tensor [H_q, T_q], float32, or float64 for float64 input
        Only with `return_lse`; differentiable; -inf in rows without visible keys.

    Raises
    ------
    TypeError, ValueError
        For mismatched arguments, and for ``"native"`` if it cannot run. The *values* of
        `cu_seqlens` are checked on the CPU or if SDPA runs; elsewhere a check would make the host
        wait for the device.

    Notes
    -----
    Semantics of FlashAttention-2 (Dao 2023, arXiv:2307.08691), version 2.1 and later.

    `torch.compile` runs without a graph break, and batches of any lengths share a graph, the
    second: torch leaves a size open after two values, so sizes (tokens, sequences, longest) with a
    first change in different batches cost a graph each. By SDPA, with `return_lse`, with borders on
    the host and with windows to the right, backward then runs forward once more.
    """
    check_flag("enable_gqa", enable_gqa)
    check_flag("return_lse", return_lse)
    check_operands(q, k, v, enable_gqa)
    q, k, v = as_autocast(q, k, v)
    factor = checked_scale(scale, q.shape[-1])
    if factor <= 0:
        # Under a causal mask SDPA gives nan for such a scale.
        q, scale, factor = q * factor, 1.0, 1.0
    call = Call(
        cu_seqlens_q,
        cu_seqlens_k,
        checked_max(max_q, "max_q"),
        checked_max(max_k, "max_k"),
        factor,
        checked_window(window_size),
    )
    check_borders(cu_seqlens_q, cu_seqlens_k)
    if torch.compiler.is_compiling() and (
        return_lse or not is_native_of_any_length(q, k, call, backend)
    ):
        # Decisions by lengths and borders fall at run time: no graph depends on them.
        out, lse = varlen_operator(
            q, k, v, cu_seqlens_q, cu_seqlens_k, call.max_q, call.max_k, call.scale, *call.window,
            return_lse, backend,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    chosen = attention_backend(
        q, k, call.max_q, call.max_k, scale=scale, window_size=call.window, backend=backend
    )
    return run_backend(chosen, q, k, v, call, return_lse)
