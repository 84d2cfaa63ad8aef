"""The arguments of `varlen_attention`: their checks, and the cast of operands under autocast.

Invariant: nothing here reads a tensor's data, so the host never waits for the device.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Final, SupportsIndex, cast

import torch
from torch import Tensor

from trainer_adapter._masked import check_tensors
from trainer_adapter.attention.plan import UNLIMITED, Window

#: Tokens of the longest sequence, and of the widest window: what an int32 of a border holds.
MOST_TOKENS: Final = 2**31 - 1


@dataclass(frozen=True)
class Call:
    """The arguments of a call, without its operands."""

    #: Tensor [S + 1], int32 or int64
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    scale: float
    window: Window

    def borders_on(self, device: torch.device) -> list[Tensor]:
        """Return both borders as the kernels need them: int32, contiguous, on the device."""
        return [
            x.to(device, torch.int32).contiguous() for x in (self.cu_seqlens_q, self.cu_seqlens_k)
        ]

    def sides(self, q: Tensor, k: Tensor) -> list[tuple[Tensor, Tensor, int, str]]:
        """Return borders, packed rows, longest length and the borders' name, of either side."""
        return [
            (self.cu_seqlens_q, q, self.max_q, "cu_seqlens_q"),
            (self.cu_seqlens_k, k, self.max_k, "cu_seqlens_k"),
        ]


def check_operands(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Raise TypeError or ValueError for mismatched operands."""
    check_tensors(q=q, k=k, v=v)
    is_cast = _autocast_dtype(q) is not None
    for name, operand in (("q", q), ("k", k), ("v", v)):
        if operand.dim() != 3:
            raise ValueError(
                f"{name}: expected a packed [tokens, heads, head_dim], got shape "
                f"{tuple(operand.shape)}; drop the batch dimension"
            )
        fits = operand.dtype == q.dtype or (
            is_cast and torch.float64 not in (q.dtype, operand.dtype)
        )
        if not operand.is_floating_point() or not fits:
            raise TypeError(
                f"{name}: expected one floating dtype for q, k and v, got {operand.dtype} beside "
                f"{q.dtype} in q; convert with .to"
            )
        if operand.device != q.device:
            raise ValueError(
                f"{name}: expected it on {q.device} as q is, got {operand.device}; move it there"
            )
    if k.shape != v.shape:
        raise ValueError(
            f"k and v: expected one shape, got {tuple(k.shape)} and {tuple(v.shape)}; "
            "both hold one row a key token"
        )
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    if k.shape[2] != head_dim or head_dim == 0:
        raise ValueError(
            f"k: expected head dimension {head_dim} as in q, and more than 0, got {k.shape[2]}; "
            "project both to one"
        )
    if kv_heads == 0 or heads % kv_heads or heads == 0:
        raise ValueError(
            f"q and k: expected a multiple of k's heads in q, got {heads} and {kv_heads}; "
            "check how the heads were split"
        )
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"q and k: expected as many heads in both, got {heads} and {kv_heads}; "
            "pass enable_gqa=True for grouped queries"
        )


def as_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast like autocast; here, for equal results of every backend, compiled or eager."""
    dtype = _autocast_dtype(q)
    if dtype is None or q.dtype == torch.float64:
        return q, k, v
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _autocast_dtype(q: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast, None while off."""
    if q.device.type not in ("cpu", "cuda"):
        return None
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def checked_scale(scale: float | None, head_dim: int) -> float:
    """Return the scale as a float, ``head_dim ** -0.5`` for None."""
    if scale is None:
        default: float = float(head_dim) ** -0.5
        return default
    try:
        given = float(scale + 0)  # a text fails here
    except (TypeError, ValueError):
        raise TypeError(
            f"scale: expected a number, got {type(scale).__name__}; None is head_dim ** -0.5"
        ) from None
    except OverflowError:
        given = math.inf  # an int beyond every float
    if not math.isfinite(given):
        raise ValueError(f"scale: expected a finite number, got {given}; None is head_dim ** -0.5")
    return given


def checked_window(window_size: tuple[int, int]) -> Window:
    """Return the window as two integers."""
    try:
        left, right = map(operator.index, window_size)
    except (TypeError, ValueError):
        raise TypeError(
            f"window_size: expected two integers (left, right), got {window_size!r}; "
            "(-1, 0) is causal"
        ) from None
    if min(left, right) < UNLIMITED or max(left, right) > MOST_TOKENS:
        raise ValueError(
            f"window_size: expected numbers from -1 to {MOST_TOKENS}, got {(left, right)}; -1 is "
            "no limit"
        )
    return left, right


def checked_max(value: SupportsIndex, name: str) -> int:
    """Return a longest length as an integer."""
    try:
        # Keep a length left open by torch.compile: `index` would make a graph for each.
        is_open = isinstance(value, torch.SymInt)
        length: Any = value if is_open or isinstance(value, int) else operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}: expected an integer, got {type(value).__name__}; "
            "pass the longest length in tokens"
        ) from None
    if not 0 <= length <= MOST_TOKENS:
        raise ValueError(
            f"{name}: expected 0 to {MOST_TOKENS} tokens, got {length}; pass the longest length"
        )
    return cast("int", length)


def check_borders(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise TypeError or ValueError for the wrong dtype or shape; values are checked when read."""
    for name, borders in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        got = getattr(borders, "dtype", type(borders).__name__)
        if got not in (torch.int32, torch.int64):
            raise TypeError(
                f"{name}: expected an int32 or int64 tensor, got {got}; convert it with .int()"
            )
        if borders.dim() != 1 or borders.shape[0] == 0:
            raise ValueError(
                f"{name}: expected shape [sequences + 1], got {tuple(borders.shape)}; "
                "it begins with 0"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k: expected as many sequences in both, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}; give an empty sequence equal "
            "borders"
        )
