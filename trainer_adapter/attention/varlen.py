"""Attention over a packed batch, by the native kernel where it can run and by SDPA elsewhere.

A packed batch is one row of tokens, its sequences end to end. Three backends give the same results:
`torch.nn.attention.varlen`, flash-attn where it is installed (`_attention_flash.py`), and
`scaled_dot_product_attention` (SDPA) by a plan: one call for one sequence, or for several of like
shape padded to one (`_attention_plan.py`, `_attention_sdpa.py`).

Invariants:

- Each sequence gets what it would get alone, forward and gradient: no row meets a key of another
  sequence, whatever that key holds.
- Rows and keys are aligned at the last of each (bottom-right). A row that may see nothing gets 0,
  its log-sum-exp is minus infinity, and no gradient comes from it. Such rows never reach SDPA,
  whose kernels disagree on them.
- Beyond operands and result, memory grows with single sequences, never with the packed length
  squared.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from trainer_adapter.attention.arguments import (
    as_autocast,
    check_borders,
    check_operands,
    checked_max,
    checked_scale,
    checked_window,
)
from trainer_adapter.attention.compiled import varlen_operator
from trainer_adapter.attention.flash import call_flash, flash_obstacle
from trainer_adapter.attention.plan import UNLIMITED, IntArray, Window, make_plan
from trainer_adapter.attention.sdpa import attend_by_plan, differentiable_lse, log_sum_exp

__all__ = [
    "attention_backend",
    "register_with_transformers",
    "transformers_inputs",
    "varlen_attention",
]

Backend = Literal["auto", "native", "flash", "sdpa"]

NATIVE_DTYPES: Final = (torch.float16, torch.bfloat16)
NATIVE_MAX_HEAD_DIM: Final = 256
"""The kernel's own limit; besides, it wants multiples of 8."""
NATIVE_MAX_HEAD_DIM_ANYWHERE: Final = 192
"""Beyond this, the kernel's backward needs the shared memory of compute capability 8.0 or 9.0."""


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
        Under autocast all three are cast to its dtype first, from whatever they have.
    cu_seqlens_q, cu_seqlens_k : Tensor [S + 1], int32 or int64
        Borders of the S sequences, from 0 to T. Sequences may be empty.
    max_q, max_k : int
        Tokens of the longest sequence, or more.
    scale : float, optional
        Factor of the scores; ``D ** -0.5`` by default.
    window_size : (int, int)
        Row i sees the keys from ``i + n_k - n_q - left`` to ``i + n_k - n_q + right``; -1 is no
        limit. ``(-1, 0)`` is causal, aligned bottom-right where lengths differ.
    enable_gqa : bool
        Allow H_kv < H_q, where H_q is a multiple of it.
    return_lse : bool
        Also return the log-sum-exp of the scaled scores.
    backend : {"auto", "native", "flash", "sdpa"}
        See `attention_backend`.

    Returns
    -------
    out : Tensor [T_q, H_q, D], dtype of `q`, or of autocast
        0 in rows that may see nothing.
    lse : Tensor [H_q, T_q], float32, or float64 for float64 input
        Only with `return_lse`; differentiable; -inf in rows that may see nothing.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit together, and for ``"native"`` where it cannot run. The
        *values* of `cu_seqlens` are checked where they are on the CPU or SDPA runs; elsewhere a
        check would make the host wait for the device.

    Notes
    -----
    The meaning is that of FlashAttention-2 (Dao 2023, arXiv:2307.08691), version 2.1 and later.

    Under `torch.compile` there is no graph break; by SDPA, backward then runs forward once more.
    """
    check_operands(q, k, v, enable_gqa)
    q, k, v = as_autocast(q, k, v)
    call = _Call(
        cu_seqlens_q,
        cu_seqlens_k,
        checked_max(max_q, "max_q"),
        checked_max(max_k, "max_k"),
        checked_scale(scale, q.shape[-1]),
        checked_window(window_size),
    )
    check_borders(cu_seqlens_q, cu_seqlens_k)
    chosen = attention_backend(
        q, k, call.max_q, call.max_k, scale=scale, window_size=call.window, backend=backend
    )
    if torch.compiler.is_compiling() and chosen != "native":
        out, lse = varlen_operator(
            q, k, v, cu_seqlens_q, cu_seqlens_k, call.max_q, call.max_k, call.scale, *call.window,
            return_lse, chosen,
        )  # fmt: skip
        return (out, lse) if return_lse else out
    return _RUN[chosen](q, k, v, call, return_lse)


def attention_backend(
    q: Tensor,
    k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    backend: Backend = "auto",
) -> Literal["native", "flash", "sdpa"]:
    """Tell which backend `varlen_attention` takes for these arguments.

    ``"auto"`` takes the native kernel where it can run and is right: on CUDA from compute
    capability 8.0 on, in float16 and bfloat16, with a torch that has it (2.10; windows and scales
    of one's own from 2.11) and for the head dimension and window at hand. Else flash-attn, where
    that is installed and can; else SDPA, which can always.

    Parameters
    ----------
    q, k, max_q, max_k, scale, window_size, backend
        As for `varlen_attention`.

    Returns
    -------
    str
        ``"native"``, ``"flash"`` or ``"sdpa"``.

    Raises
    ------
    ValueError
        For another `backend`, and for one that cannot run; the message says why.
    """
    if backend == "sdpa":
        return "sdpa"
    if backend not in ("auto", "native", "flash"):
        raise ValueError(
            f"backend: expected 'auto', 'native', 'flash' or 'sdpa', got {backend!r}; "
            "'auto' fits every device"
        )
    window = tuple(window_size)
    obstacle = None
    if backend != "flash":
        default_scale = scale is None or scale == q.shape[-1] ** -0.5
        obstacle = _native_obstacle(q, k, max_q, max_k, default_scale, window)
        if obstacle is None:
            return "native"
    if backend != "native":
        obstacle = flash_obstacle(q, k, max_q, max_k, window)
        if obstacle is None:
            return "flash"
    if backend != "auto":
        raise ValueError(
            f"backend {backend!r} cannot run here: {obstacle}; pass backend='auto' or 'sdpa'"
        )
    return "sdpa"


def register_with_transformers(name: str = "shmbus_varlen", *, backend: Backend = "auto") -> str:
    """Add `varlen_attention` to the attention functions of Hugging Face's transformers.

    Then a stock model trains on packed batches::

        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=register_with_transformers()
        )
        logits = model(**transformers_inputs(batch)).logits[0]

    Parameters
    ----------
    name : str
        What ``attn_implementation`` calls it.
    backend : {"auto", "native", "flash", "sdpa"}
        As for `varlen_attention`.

    Returns
    -------
    str
        `name`.

    Raises
    ------
    ImportError
        There is no transformers 4.53 or later here.

    Notes
    -----
    The borders come from ``cu_seq_lens_q`` and its like, as transformers' own flash attention takes
    them; without them from ``position_ids``, in one row that begins anew at each 0; without those
    from a mask of padding; and else each row is a sequence. Causal attention, sliding windows and
    a cache of keys are supported; dropout, soft caps and attention sinks are refused.
    """
    from trainer_adapter.attention.transformers import register

    return register(name, backend)


def transformers_inputs(batch: Any) -> dict[str, Any]:
    """Return what a transformers model takes for a packed batch.

    Parameters
    ----------
    batch : Batch or MicroBatch
        Packed.

    Returns
    -------
    dict
        Keyword arguments for the model's call; ``logits[0]`` of its output is [T, vocabulary].

    Raises
    ------
    ValueError
        The batch is padded.
    """
    if batch.layout != "packed":
        raise ValueError(f"batch: expected layout 'packed', got {batch.layout!r}; pack it so")
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
        "use_cache": False,
    }


# --- arguments


@dataclass(frozen=True)
class _Call:
    """What a call says beside its operands."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    scale: float
    window: Window

    def borders_on(self, device: torch.device) -> list[Tensor]:
        """Borders as the kernels want them."""
        return [
            x.to(device, torch.int32).contiguous() for x in (self.cu_seqlens_q, self.cu_seqlens_k)
        ]

    def sides(self, q: Tensor, k: Tensor) -> list[tuple[Tensor, Tensor, int, str]]:
        """Borders, packed rows, longest length and name of the borders, for queries and keys."""
        return [
            (self.cu_seqlens_q, q, self.max_q, "cu_seqlens_q"),
            (self.cu_seqlens_k, k, self.max_k, "cu_seqlens_k"),
        ]


def _lengths(borders: Tensor, tokens: int, longest: int, name: str) -> IntArray:
    """Bring the borders to the host, check them, and return the lengths [S].

    The host waits for the device once a batch, not in every layer: what was found is kept with
    the tensor, until it is written to.
    """
    kept: tuple[int, int, IntArray] | None = getattr(borders, "_shmbus_lengths", None)
    version = -1 if borders.is_inference() else borders._version
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


# --- the native backend


class _NativeEntry(NamedTuple):
    function: Callable[..., Any]
    lse_request: Any
    parameters: frozenset[str]


def _find_native() -> _NativeEntry | None:
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:
        return None
    parameters = frozenset(inspect.signature(varlen_attn).parameters)
    return _NativeEntry(varlen_attn, AuxRequest(lse=True), parameters)


_find_native_once = functools.cache(_find_native)


def _native_entry() -> _NativeEntry | None:
    """Return torch's function, and what its version of the signature takes."""
    # torch.compile looks through a cache, with a warning.
    return _find_native() if torch.compiler.is_compiling() else _find_native_once()


def _native_obstacle(
    q: Tensor, k: Tensor, max_q: int, max_k: int, default_scale: bool, window: tuple[int, ...]
) -> str | None:
    """Say what keeps the native kernel from running, or from being right; None if nothing does."""
    if not q.is_cuda or torch.version.hip is not None:
        return f"it needs a CUDA device, got {q.device} with torch {torch.__version__}"
    entry = _native_entry()
    if entry is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen, 2.10 has"
    if q.dtype not in NATIVE_DTYPES:
        return f"it needs float16 or bfloat16, got {q.dtype}"
    capability = torch.cuda.get_device_capability(q.device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    head_dim = q.shape[-1]
    if head_dim % 8 or head_dim > NATIVE_MAX_HEAD_DIM:
        return f"it needs a head dimension that is a multiple of 8 up to 256, got {head_dim}"
    if head_dim > NATIVE_MAX_HEAD_DIM_ANYWHERE and capability not in ((8, 0), (9, 0)):
        return f"on this GPU it needs a head dimension up to 192, got {head_dim}"
    if q.numel() == 0 or k.numel() == 0:
        return "it needs at least one query and one key token"
    if "window_size" not in entry.parameters and window not in ((-1, -1), (-1, 0)):
        return f"windows need torch 2.11, this is {torch.__version__}"
    if "scale" not in entry.parameters and not default_scale:
        return f"a scale of one's own needs torch 2.11, this is {torch.__version__}"
    # The kernel takes a right limit from max_k on for none, and puts max_k where only the left
    # is limited; measured from a row far above its first key, neither is the same thing.
    left, right = window
    if max_q > max_k and (right >= max_k or (left != UNLIMITED and right == UNLIMITED)):
        return f"window {window} with max_q {max_q} above max_k {max_k} is not what it computes"
    return None


def _run_native(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    return _run_kernel(_call_native, q, k, v, call, return_lse)


def _run_flash(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    return _run_kernel(_call_flash, q, k, v, call, return_lse)


def _run_kernel(
    run: Callable[[Tensor, Tensor, Tensor, _Call], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: _Call,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    for borders, rows, longest, name in call.sides(q, k):
        # Borders on the device stay unread, since the host would have to wait for them.
        if borders.device.type == "cpu":
            _lengths(borders, len(rows), longest, name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(q, k, v, call)[0]

    out, lse = run(q, k, v, call)
    return (out, differentiable_lse(q, k, lse, call.scale, attend)) if return_lse else out


def _call_flash(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    longest = (call.max_q, call.max_k)
    return call_flash(q, k, v, call.borders_on(q.device), longest, call.scale, call.window)


def _call_native(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp [H_q, T_q] cut off from the graph."""
    entry = _native_entry()
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
    # For rows that see nothing, FlashAttention-2 gives plus infinity and 3 gives minus.
    lse = lse.detach()
    return out, lse.masked_fill(lse == math.inf, -math.inf)


# --- the SDPA backend


def _run_sdpa(
    q: Tensor, k: Tensor, v: Tensor, call: _Call, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    lengths = [
        _lengths(borders, len(rows), longest, name).tobytes()
        for borders, rows, longest, name in call.sides(q, k)
    ]
    plan = make_plan(*lengths, call.window, q.shape[1] * q.shape[2], q.device.type)
    attend = functools.partial(attend_by_plan, plan=plan, scale=call.scale)
    out = attend(q, k, v)
    if not return_lse:
        return out
    lse = log_sum_exp(q.detach(), k.detach(), plan, call.scale)
    return out, differentiable_lse(q, k, lse, call.scale, attend)


_RUN: Final = {"native": _run_native, "flash": _run_flash, "sdpa": _run_sdpa}
