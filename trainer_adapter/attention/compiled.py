"""`varlen_attention` as one operator of torch, without a graph break in compiled models.

SDPA's path depends on the values of the borders, and the choice of a backend on the longest
lengths: no tracer can follow the first, and makes a graph for each outcome of the second. As an
operator both are opaque: the graph holds one node for forward and one for backward.

Invariants:

- Values and gradients equal the eager call's.
- Backward computes forward again, from the operands alone: an operator's own graph does not outlive
  its call. Eager calls do not need this second forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer_adapter.attention.arguments import Call
from trainer_adapter.attention.dispatch import attention_backend, run_backend


def _eager(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int,
    max_k: int, scale: float, left: int, right: int, return_lse: bool, backend: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = Call(cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, (left, right))
    chosen = attention_backend(
        q, k, max_q, max_k, scale=scale, window_size=call.window, backend=backend
    )
    result = run_backend(chosen, q, k, v, call, return_lse)
    return (result, _no_lse(q)) if isinstance(result, Tensor) else result


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[1], 0), dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("shmbus::varlen_attention", mutates_args=())
def varlen_operator(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int,
    max_k: int, scale: float, left: int, right: int, return_lse: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend, by the backend of an eager call."""
    with torch.no_grad():
        out, lse = _eager(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, left, right, return_lse,
            backend,
        )  # fmt: skip
    return out.contiguous(), lse.contiguous()


@varlen_operator.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return_lse = rest[9]
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=_no_lse(q).dtype)
    return torch.empty_like(q, memory_format=torch.contiguous_format), (
        lse if return_lse else _no_lse(q)
    )


@torch.library.custom_op("shmbus::varlen_attention_backward", mutates_args=())
def _backward_operator(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_q: int, max_k: int, scale: float, left: int, right: int,
    return_lse: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with _recording():
        operands = q, k, v = [x.detach().requires_grad_() for x in (q, k, v)]
        outs = _eager(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, left, right, return_lse,
            backend,
        )  # fmt: skip
        used = [(outs[0], grad_out), (outs[1], grad_lse)][: 2 if return_lse else 1]
        to_q, to_k, to_v = torch.autograd.grad(
            [out for out, _ in used], operands, [grad for _, grad in used]
        )
    return to_q.contiguous(), to_k.contiguous(), to_v.contiguous()


@_backward_operator.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Record a graph within an operator, where torch's dispatcher leaves autograd out."""
    nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), nothing),
        torch.enable_grad(),
        torch.autocast(device_type="cpu", enabled=False),
        torch.autocast(device_type="cuda", enabled=False)
        if torch.cuda.is_available()
        else contextlib.nullcontext(),
    ):
        yield


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.facts = inputs[5:]


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    grads = _backward_operator(grad_out, grad_lse, *ctx.saved_tensors, *ctx.facts)
    return (*grads, *(None,) * (2 + len(ctx.facts)))


varlen_operator.register_autograd(_backward, setup_context=_setup)
