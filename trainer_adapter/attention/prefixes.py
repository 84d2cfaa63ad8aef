"""Attention over the rows of a `PrefixTree`: each row sees the preceding rows of its own sequences.

On a CUDA device one call of FlexAttention, with a block mask made from the tree alone. Elsewhere
each segment is a sequence of `varlen_attention`, with the keys of its whole path.

Invariants:

- Each row gets the result, and the sum of the gradients, of a separate run of every sequence.
- No mask of rows times rows is made: blocks are found from the borders of their rows.
- Gradients of rows visible to several segments are added up in float32.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shmbus.base.arguments import check_choice
from trainer_adapter.attention.arguments import as_autocast, check_operands, checked_scale
from trainer_adapter.attention.dispatch import Backend
from trainer_adapter.attention.varlen import varlen_attention
from trainer_adapter.batches.prefix_tree import PrefixTree, gathered

logger = logging.getLogger(__name__)

#: Rows of a block of FlexAttention's masks.
BLOCK: Final = 128
#: FlexAttention's kernels; they lack float64.
_FLEX_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_BACKENDS: Final = ("auto", "flex", "native", "sdpa")

PrefixBackend = Literal["auto", "flex", "native", "sdpa"]


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: PrefixTree,
    *,
    scale: float | None = None,
    window: int = -1,
    enable_gqa: bool = False,
    backend: PrefixBackend = "auto",
) -> Tensor:
    """Attend, causally, within each sequence of a batch with shared prefixes stored once.

    Parameters
    ----------
    q : Tensor [R, H_q, D], floating
    k, v : Tensor [R, H_kv, D], same dtype and device as `q`
        Under autocast the operands are cast to its dtype first.
    tree : PrefixTree
        Of R rows: `Batch.prefix_tree`, or a micro-batch's tree.
    scale : float, optional
        Factor of the scores; ``D ** -0.5`` by default.
    window : int
        Number of visible tokens before a row; -1 without a limit.
    enable_gqa : bool
        Allow H_kv < H_q, for multiples of H_kv.
    backend : {"auto", "flex", "native", "sdpa"}
        "flex": `torch.nn.attention.flex_attention`, compiled, of a CUDA device with Triton. The
        remaining backends gather the keys of each path for `varlen_attention`.

    Returns
    -------
    Tensor [R, H_q, D]

    Raises
    ------
    TypeError, ValueError
        For mismatched arguments, and for a backend that cannot run here.

    Notes
    -----
    Breaks the graph under `torch.compile`.
    """
    check_choice("backend", backend, _BACKENDS, "'auto' fits every device")
    if not isinstance(tree, PrefixTree):
        raise TypeError(
            f"tree: expected a PrefixTree, got {type(tree).__name__}; pass batch.prefix_tree"
        )
    check_operands(q, k, v, enable_gqa)
    for name, operand in (("q", q), ("k", k)):
        if len(operand) != tree.num_rows:
            raise ValueError(
                f"{name}: expected {tree.num_rows} tokens, the tree's rows, got {len(operand)}; "
                "compute them of tree.tokens"
            )
    q, k, v = as_autocast(q, k, v)
    obstacle = _flex_obstacle(q)
    if backend == "flex" and obstacle:
        raise ValueError(f"backend 'flex' cannot run here: {obstacle}; pass backend='auto'")
    if backend == "flex" or (backend == "auto" and not obstacle and not _refused):
        try:
            return _flex(q, k, v, tree, checked_scale(scale, q.shape[-1]), window)
        except _compile_errors() as error:
            if backend == "flex":
                raise
            # A property of this torch, GPU or compiler, so the next call would fail too.
            _refused.append(str(error))
            logger.warning(
                "FlexAttention cannot be compiled here, so the keys of each path are gathered, "
                "which takes more memory: %.300s", error,
            )  # fmt: skip
    return _by_paths(q, k, v, tree, scale, window, backend)


#: Reason of FlexAttention's failed compilation in this process, after a try.
_refused: Final[list[str]] = []


def _compile_errors() -> tuple[type[BaseException], ...]:
    from torch._dynamo.exc import TorchDynamoException

    try:
        from torch._inductor.exc import InductorError
    except ImportError:
        return (TorchDynamoException,)
    return TorchDynamoException, InductorError


def _flex_obstacle(q: Tensor) -> str:
    """Return the reason if FlexAttention cannot run, else an empty text."""
    if not q.is_cuda:
        return f"it needs a CUDA device, got {q.device}"
    if q.dtype not in _FLEX_DTYPES:
        return f"it needs float16, bfloat16 or float32, got {q.dtype}"
    if q.shape[-1] < 16 or q.shape[-1] & (q.shape[-1] - 1):
        return f"it needs a head dimension that is a power of two from 16 on, got {q.shape[-1]}"
    return _flex_lacks()


@functools.cache
def _flex_lacks() -> str:
    try:
        import triton  # noqa: F401
        from torch.nn.attention.flex_attention import flex_attention  # noqa: F401
    except ImportError as error:
        return f"it needs torch.nn.attention.flex_attention and Triton ({error})"
    return ""


# --- by FlexAttention


def _flex(q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree, scale: float, window: int) -> Tensor:
    apart: Any = torch.compiler.disable(_by_flex)  # type: ignore[no-untyped-call]
    found: Tensor = apart(q, k, v, tree, scale, window)
    return found


def _by_flex(
    q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree, scale: float, window: int
) -> Tensor:
    key = window, q.device
    mask = tree.kept.get(key)
    if mask is None:
        mask = tree.kept[key] = block_mask(tree, window, q.device)
    # [1, H, R, D]
    rows, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out: Tensor = _compiled_flex()(
        rows, keys, values, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Lengths differ from batch to batch: one kernel serves every length.
    return torch.compile(flex_attention, dynamic=True)


def block_mask(tree: PrefixTree, window: int, device: torch.device) -> Any:
    """Make FlexAttention's mask: the visible blocks of keys per block of rows, and the rule."""
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = visible_blocks(tree, window)
    ends, positions = (x.to(device) for x in (tree.ends, tree.position_ids))

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = (key <= row) & (row < ends[key])
        return seen if window < 0 else seen & (positions[row] - positions[key] <= window)

    def sent(blocks: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
        counts = blocks.sum(axis=1, dtype=np.int32)
        order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
        return tuple(torch.from_numpy(x[None, None]).to(device) for x in (counts, order))  # type: ignore[return-value]

    return BlockMask.from_kv_blocks(
        *sent(partial), *sent(full), BLOCK_SIZE=BLOCK, mask_mod=sees,
        seq_lengths=(tree.num_rows, tree.num_rows),
    )  # fmt: skip


def visible_blocks(tree: PrefixTree, window: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the blocks of keys visible to a block of rows in part, and as a whole."""
    segments = tree.segments
    ends, positions = segments.ends, segments.positions
    starts = np.arange(0, len(ends), BLOCK)
    first, last = starts, np.minimum(starts + BLOCK, len(ends)) - 1
    most, least = np.maximum.reduceat(ends, starts), np.minimum.reduceat(ends, starts)
    # A block of rows, [:, None], lies behind a block of keys, [None, :], or coincides.
    behind = first[:, None] > last[None, :]
    some = behind & (first[:, None] < most[None, :])
    full = behind & (last[:, None] < least[None, :])
    if window >= 0:
        high, low = (op.reduceat(positions, starts) for op in (np.maximum, np.minimum))
        some &= low[:, None] - high[None, :] <= window
        full &= high[:, None] - low[None, :] <= window
    full &= last[None, :] - first[None, :] == BLOCK - 1
    np.fill_diagonal(some, True)
    return some & ~full, full


# --- by paths


def _by_paths(
    q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree, scale: float | None, window: int,
    backend: Backend,
) -> Tensor:  # fmt: skip
    """Attend by segments: the rows of each, with the keys of its path, aligned at the last."""
    paths, borders_q, borders_k, max_q, max_k = _paths_on(tree, q.device)
    if len(paths) != len(k):
        k, v = (gathered(x, paths) for x in (k, v))
    return varlen_attention(
        q, k, v, borders_q, borders_k, max_q, max_k,
        scale=scale, window_size=(window, 0), enable_gqa=True, backend=backend,
    )  # fmt: skip


def _paths_on(tree: PrefixTree, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Return the rows of every path, and borders and longest lengths for `varlen_attention`."""
    found = tree.kept.get(("paths", device))
    if found is None:
        segments = tree.segments
        paths, borders = segments.paths
        rows, of_q, of_k = (
            torch.from_numpy(x).to(device)
            for x in (paths, segments.borders.astype(np.int32), borders.astype(np.int32))
        )
        longest = (int(each.max(initial=0)) for each in (segments.lengths, np.diff(borders)))
        found = tree.kept["paths", device] = (rows, of_q, of_k, *longest)
    return cast("tuple[Tensor, Tensor, Tensor, int, int]", found)
