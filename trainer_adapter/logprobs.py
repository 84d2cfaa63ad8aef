"""Logprobs of a batch's tokens from a model's logits, for packed and prefix layouts.

Invariants:

- Each logprob is aligned to its own token, and 0 for an untrained token.
- Float32 at least inside; beside the logits, memory is bounded by chunks of rows.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["logit_rows", "token_logprobs"]

#: Logits widened to float32 at a time.
CHUNK_LOGITS: Final = 1 << 26


def logit_rows(batch: Any) -> Tensor:
    """Return the rows whose logits a loss of a batch needs: those before trained tokens.

    Parameters
    ----------
    batch : Batch or MicroBatch
        Packed, or of the prefix layout.

    Returns
    -------
    int64 [K]
        Ascending, for the ``logits_to_keep`` of a Hugging Face model. The host waits for the
        device once.

    Raises
    ------
    ValueError
        The batch is padded.
    """
    before = _predictors(batch)
    needed: Tensor = torch.unique(before[batch.loss_mask & (before >= 0)])
    return needed


def token_logprobs(
    logits: Tensor,
    batch: Any,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    support: str | None = None,
) -> Tensor:
    """Compute the logprobs of a batch's trained tokens.

    Parameters
    ----------
    logits : Tensor [R, V] or [K, V], floating
        Of the model's rows: rows of the tokens, or of the prefix tree; or of `rows` alone.
    batch : Batch or MicroBatch
        Packed, or of the prefix layout.
    rows : int64 [K], optional
        From `logit_rows`, if the logits cover these rows alone.
    temperature : float
        Of the sampling: logits are divided by it.
    support : str, optional
        The extra field of kind "support" with each token's candidate ids: the softmax then covers
        these ids only, like vLLM's ``processed_logprobs``.

    Returns
    -------
    Tensor [T], float32, or float64 for float64
        Aligned to the tokens; 0 for untrained tokens, and for the first token of a sequence.

    Raises
    ------
    ValueError
        A padded batch, a wrong number of rows of logits, a batch without this extra field, or a
        temperature of 0, below or without end.
    """
    before = _predictors(batch)
    count = _row_count(batch) if rows is None else len(rows)
    if logits.dim() != 2 or len(logits) != count:
        raise ValueError(
            f"logits: expected [{count}, vocabulary], one row for each of "
            f"{'the rows of the model' if rows is None else 'rows='}, got {tuple(logits.shape)}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature: expected a finite number above 0, got {temperature}; greedy sampling "
            "has no logprobs of its own: leave the 1.0"
        )
    wanted = batch.loss_mask & (before >= 0)
    if count == 0:
        # Nothing is trained: no row carries logits, and the graph passes through no row.
        wide = torch.promote_types(logits.dtype, torch.float32)
        none: Tensor = torch.zeros(len(before), dtype=wide, device=logits.device)
        return none + logits.sum(dtype=wide)
    at = (
        before.clamp(min=0)
        if rows is None
        else torch.searchsorted(rows, before).clamp(max=count - 1)
    )
    tokens = torch.where(wanted, batch.tokens, 0)
    sampled = None if support is None else _support(batch, support, at, wanted)
    found: Tensor = _Logprobs.apply(  # type: ignore[no-untyped-call]
        logits, at, tokens, temperature, sampled
    )
    return torch.where(wanted, found, 0)


def _predictors(batch: Any) -> Tensor:
    """Return for each token the row with its logits, -1 for no row: int64 [T]."""
    if batch.layout == "padded":
        raise ValueError("batch: expected layout 'packed' or 'prefix', got 'padded'; pack it so")
    tree = batch.prefix_tree
    if tree is not None:
        predictors: Tensor = tree.of_tokens(tree.predictors)
        return predictors
    before = torch.arange(-1, len(batch.tokens) - 1, device=batch.tokens.device)
    return torch.where(batch.position_ids == 0, -1, before)


def _row_count(batch: Any) -> int:
    return len(batch.tokens) if batch.prefix_tree is None else batch.prefix_tree.num_rows


class _Support(NamedTuple):
    """M candidate ids of places, and the places with ids among the T."""

    places: Tensor  # int64 [M]
    ids: Tensor  # int64 [M]
    limited: Tensor  # bool [T]


def _support(batch: Any, name: str, at: Tensor, wanted: Tensor) -> _Support:
    if batch.extra_kinds.get(name) != "support":
        raise ValueError(
            f"support: expected an extra field of kind 'support', got {name!r}; ask for it by "
            f"extra_fields={{{name!r}: 'support'}}"
        )
    ids, counts = batch.extra[name], batch.extra_offsets[name].diff()
    places = torch.repeat_interleave(counts, output_size=len(ids))
    return _Support(places, ids.long(), (counts > 0) & wanted)


class _Logprobs(torch.autograd.Function):
    """The logprob of one token a place, [T]; backward computes the softmax again, by chunks."""

    # A row may have several places: the tokens after a shared prefix. So gradients are summed
    # before rounding to the dtype of the logits.

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        at: Tensor,
        tokens: Tensor,
        temperature: float,
        support: _Support | None,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.empty(len(logits), dtype=wide, device=logits.device)
        for part in _chunks(logits):
            total[part] = (logits[part].to(wide) / temperature).logsumexp(dim=-1)
        of_places = total[at]
        if support is not None:
            among = logits[at[support.places], support.ids].to(wide) / temperature
            most = of_places.scatter_reduce(0, support.places, among, "amax", include_self=False)
            sums = torch.zeros_like(most)
            sums.index_add_(0, support.places, (among - most[support.places]).exp())
            of_places = torch.where(support.limited, most + sums.log(), of_places)
        ctx.save_for_backward(logits, at, tokens, total, of_places)
        ctx.temperature, ctx.support = temperature, support
        return logits[at, tokens].to(wide) / temperature - of_places

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, at, tokens, total, of_places = ctx.saved_tensors
        grad, support = grad / ctx.temperature, ctx.support
        rows, columns, values = at, tokens, grad
        by_row = grad
        if support is not None:
            of_ids = logits[at[support.places], support.ids].to(total.dtype) / ctx.temperature
            share = (of_ids - of_places[support.places]).exp() * grad[support.places]
            share = torch.where(support.limited[support.places], share, 0)
            rows = torch.cat([at, at[support.places]])
            columns, values = torch.cat([tokens, support.ids]), torch.cat([grad, -share])
            by_row = torch.where(support.limited, 0, grad)
        of_rows = torch.zeros_like(total).index_add_(0, at, by_row)
        to_logits = torch.empty_like(logits)
        for part in _chunks(logits):
            softmax = (logits[part].to(total.dtype) / ctx.temperature - total[part, None]).exp_()
            softmax.mul_(-of_rows[part, None])
            # Without a wait for this chunk's members: foreign rows add 0 to its first row.
            inside = (rows >= part.start) & (rows < part.stop)
            own = torch.where(inside, rows - part.start, 0)
            softmax.index_put_((own, columns), torch.where(inside, values, 0), accumulate=True)
            to_logits[part] = softmax
        return to_logits, None, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, CHUNK_LOGITS // max(1, logits.shape[-1]))
    return [slice(first, first + step) for first in range(0, len(logits), step)]
