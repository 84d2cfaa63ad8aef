"""Names moved or changed by foreign packages, with one meaning for every version.

- `unpad_input`, `pad_input`: padded to packed and back, like `flash_attn.bert_padding`, and without
  flash-attn. There `unpad_input` returned four values up to 2.6.3 and five from 2.7.0; here always
  five. For any torch from 2.6 on.
- `HuggingFaceStorageReader`: absent in torch 2.6; private in 2.7; public with a `token` in 2.8, and
  without it from 2.9 on. Written for torch 2.6 to 2.15.

docs/compat.md lists the tested versions.

Invariants:

- `pad_input` undoes `unpad_input`; padding becomes zeros.
- Both are differentiable in the hidden states, and padding gets no gradient.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

import torch
from torch import Tensor

from trainer_adapter._masked import check_tensors

__all__ = ["HuggingFaceStorageReader", "pad_input", "unpad_input"]


class _Take(torch.autograd.Function):
    """Rows by an index without repeats: the gradient is an assignment, not a sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.count = rows.shape[0]
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return _placed(grad, indices, ctx.count), None


class _Place(torch.autograd.Function):
    """The inverse of `_Take`: rows put back to their origin, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(indices)
        return _placed(rows, indices, count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return grad.index_select(0, indices), None, None


def _placed(rows: Tensor, indices: Tensor, count: int) -> Tensor:
    placed = rows.new_zeros((count, *rows.shape[1:]))
    placed[indices] = rows
    return placed


def unpad_input(
    hidden: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens marked by a mask.

    Parameters
    ----------
    hidden : Tensor [B, L, ...]
    attention_mask : Tensor [B, L], bool or integer
        Nonzero for tokens.
    unused_mask : Tensor [B, L], bool or integer, optional
        Nonzero for places to pack without a token yet.

    Returns
    -------
    packed : Tensor [T, ...]
        The marked places, row after row.
    indices : Tensor [T], int64
        Their positions in the B * L places, for `pad_input`.
    cu_seqlens : Tensor [B + 1], int32
        Borders of the rows in `packed`.
    max_seqlen : int
        Places of the longest row.
    seqused : Tensor [B], int32
        Tokens of each row, unused places not counted.

    Raises
    ------
    TypeError
        For a non-tensor, and for a mask neither bool nor integer.
    ValueError
        For mismatched shapes.

    Notes
    -----
    Signature and results equal flash-attn 2.7, https://github.com/Dao-AILab/flash-attention. The
    host waits for the device once, to learn T and `max_seqlen`.
    """
    check_tensors(hidden=hidden, attention_mask=attention_mask)
    tokens = _checked_mask(attention_mask, hidden, "attention_mask")
    packed_places = tokens
    if unused_mask is not None:
        check_tensors(unused_mask=unused_mask)
        packed_places = tokens | _checked_mask(unused_mask, hidden, "unused_mask")
    lengths = packed_places.sum(dim=1, dtype=torch.int32)
    seqused = tokens.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths, dim=0, dtype=torch.int32, out=cu_seqlens[1:])
    indices = packed_places.flatten().nonzero().flatten()
    packed: Tensor = _Take.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), indices
    )
    max_seqlen = int(lengths.max()) if len(lengths) else 0
    return packed, indices, cu_seqlens, max_seqlen, seqused


def pad_input(hidden: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed tokens back to their places in a padded batch.

    Parameters
    ----------
    hidden : Tensor [T, ...]
        Packed tokens.
    indices : Tensor [T], int64
        Their positions in the ``batch * seqlen`` places, none twice; from `unpad_input`.
    batch, seqlen : int
        Rows, and places in each.

    Returns
    -------
    Tensor [batch, seqlen, ...]
        Zeros in places without a token.

    Raises
    ------
    TypeError
        For a non-tensor, for non-integer indices, and for sizes of another type than int.
    ValueError
        For unequal numbers of indices and tokens, and for a negative size.
    IndexError
        For an index beyond ``batch * seqlen``.

    Notes
    -----
    Signature and result equal flash-attn, https://github.com/Dao-AILab/flash-attention.
    """
    check_tensors(hidden=hidden, indices=indices)
    batch, seqlen = _checked_size("batch", batch), _checked_size("seqlen", seqlen)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"indices: expected int64, got {indices.dtype}; pass what unpad_input returned"
        )
    if indices.dim() != 1 or hidden.dim() == 0 or len(indices) != len(hidden):
        raise ValueError(
            f"indices: expected an index per row of hidden {tuple(hidden.shape)}, got shape "
            f"{tuple(indices.shape)}; pass what unpad_input returned"
        )
    placed: Tensor = _Place.apply(  # type: ignore[no-untyped-call]
        hidden, indices.long(), batch * seqlen
    )
    return placed.unflatten(0, (batch, seqlen))  # type: ignore[no-untyped-call,no-any-return]


def _checked_size(name: str, value: Any) -> Any:
    """Return a size, possibly still unknown under torch.compile."""
    whole = isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")
    if isinstance(value, bool) or not whole:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name}: expected 0 or more, got {value}")
    return value


def _checked_mask(mask: Tensor, hidden: Tensor, name: str) -> Tensor:
    """Return the mask as bool [B, L]."""
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(
            f"{name}: expected bool or integers, got {mask.dtype}; "
            "an additive mask is not a mask of tokens"
        )
    if mask.dim() != 2 or hidden.shape[:2] != mask.shape:
        raise ValueError(
            f"{name}: expected shape [batch, seqlen] = {tuple(hidden.shape[:2])} as in hidden, "
            f"got {tuple(mask.shape)}; give each place of hidden one entry"
        )
    return mask.to(hidden.device) != 0


# Places of the reader in torch's versions: the newest place first.
_READERS: Final = (
    ("torch.distributed.checkpoint.hf_storage", "HuggingFaceStorageReader"),
    ("torch.distributed.checkpoint", "HuggingFaceStorageReader"),
    ("torch.distributed.checkpoint._hf_storage", "_HuggingFaceStorageReader"),
)


def HuggingFaceStorageReader(path: str, *, token: str | None = None, **options: Any) -> Any:
    """Make torch's reader of safetensors checkpoints, for `torch.distributed.checkpoint.load`.

    Parameters
    ----------
    path : str
        Folder with the checkpoint, or its fsspec URL.
    token : str, optional
        For torch 2.7 and 2.8; passed to the hub.
    **options
        Further arguments of this torch's class, for instance ``thread_count`` in 2.13.

    Returns
    -------
    torch.distributed.checkpoint.StorageReader

    Raises
    ------
    ImportError
        This torch lacks the reader (2.6), or the reader's package (huggingface_hub, for 2.7); the
        message names the next step.
    TypeError
        A token or an option unsupported by this torch's class.
    """
    found: Any = None
    problem = ""
    for module, name in _READERS:
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            problem = f" ({error})"
        if found is not None:
            break
    if found is None:
        raise ImportError(
            f"HuggingFaceStorageReader: expected torch 2.7 or later, got {torch.__version__}"
            f"{problem}; load the files with safetensors.torch.load_file instead"
        )
    if token is not None:
        options["token"] = token
    unknown = options.keys() - inspect.signature(found).parameters.keys()
    if unknown:
        raise TypeError(
            f"HuggingFaceStorageReader: torch {torch.__version__} takes no "
            f"{', '.join(sorted(unknown))}; for the hub's token set HF_TOKEN"
        )
    try:
        return found(path, **options)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"HuggingFaceStorageReader: torch {torch.__version__} has one, which needs "
            f"{error.name}; install that, or load the files with safetensors.torch.load_file"
        ) from error
