"""A batch cut into micro-batches of whole sequences, for gradient accumulation.

Invariants:

- Every sequence is in exactly one micro-batch; its tokens, advantages and further values are
  unchanged.
- Losses divided by the whole batch's counts add up to the loss of the whole batch.
- Groups, and the rows of a sample, may be split, since their advantages were computed before. The
  whole batch is acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shmbus.base.arguments import check_count
from trainer_adapter.balance import balance, by_budget
from trainer_adapter.batches.batch import Batch, Layout
from trainer_adapter.batches.prefix_tree import PrefixTree, Segments
from trainer_adapter.batches.tensors import TensorHolder, indexable
from trainer_adapter.losses import samples_sum

__all__ = ["MicroBatch", "micro_batches"]


@dataclass(eq=False, repr=False)
class MicroBatch(TensorHolder):
    """Some sequences of a batch; T tokens in S sequences, the longest of L tokens.

    Attributes
    ----------
    tokens, position_ids, loss_mask, logprobs, advantages, cu_seqlens, max_seqlen, scores,
    policy_versions, newest_policy_versions, sample_of, instance_ids, layout, prefix_tree,
    extra, extra_offsets, extra_kinds
        As in `Batch`, of these sequences.
    group_sizes : int64, on the host
        Sequences here per group, in order, without empty groups.
    sequence_indices : int64 [S], on the host
        Positions in the batch.
    batch_loss_tokens : Tensor []
        Trained tokens of the whole batch: the denominator of "token" normalisation.
    batch_sequences : Tensor []
        Sequences of the whole batch with a trained token: the denominator of "sequence"
        normalisation.
    batch_samples : Tensor []
        Samples of the whole batch with a trained token: the denominator of "sample" normalisation.
    sample_tokens : Tensor [S]
        Trained tokens, in the whole batch, of each sequence's sample.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_mask: Tensor
    logprobs: Tensor | None
    advantages: Tensor
    scores: Tensor
    instance_ids: list[str]
    policy_versions: Tensor
    newest_policy_versions: Tensor
    sample_of: Tensor
    group_sizes: Tensor
    sequence_indices: Tensor
    batch_loss_tokens: Tensor
    batch_sequences: Tensor
    batch_samples: Tensor
    sample_tokens: Tensor
    layout: Layout
    extra: dict[str, Any] = field(default_factory=dict)
    extra_offsets: dict[str, Tensor] = field(default_factory=dict)
    extra_kinds: dict[str, str] = field(default_factory=dict)
    prefix_tree: PrefixTree | None = None

    def asdict(self) -> dict[str, Any]:
        """Return tensors and values by their names; tensors are not copied.

        Returns
        -------
        dict
        """
        return dict(vars(self))

    def __repr__(self) -> str:
        return (
            f"<MicroBatch: {self.num_sequences} sequences, longest {self.max_seqlen} tokens, "
            f"{self.layout} on {self.tokens.device}>"
        )


def micro_batches(
    batch: Batch, *, max_tokens: int | None = None, count: int | None = None
) -> list[MicroBatch]:
    """Cut a batch into micro-batches with about equal numbers of tokens.

    Parameters
    ----------
    batch : Batch
    max_tokens : int, optional
        Most tokens of a micro-batch, for the fewest micro-batches; in a padded batch, sequences
        times the longest of them; with a prefix tree, its rows. Groups stay together if they fit.
    count : int, optional
        Instead: the exact number, with at least one sequence in every micro-batch.

    Returns
    -------
    list[MicroBatch]
        With their sequences in the batch's order.

    Raises
    ------
    TypeError, ValueError
        Both or neither given; a value not an int of 1 or more; a sequence above `max_tokens`
        tokens; fewer sequences than `count`.

    Notes
    -----
    To get the gradient of the whole batch's loss, divide each micro-batch's loss by the whole
    batch's denominator, and add up the gradients::

        for part in micro_batches(batch, max_tokens=16_384):
            loss = policy_loss(..., denominator=part.batch_loss_tokens).loss
            loss.backward()
    """
    if (max_tokens is None) == (count is None):
        raise ValueError(
            f"micro_batches: expected one of max_tokens and count, got {max_tokens} and {count}"
        )
    if max_tokens is None:
        check_count("count", count)
    else:
        check_count("max_tokens", max_tokens)
    lengths = batch.lengths
    if max_tokens is not None and max(lengths) > max_tokens:
        longest = lengths.index(max(lengths))
        raise ValueError(
            f"max_tokens: expected at least {lengths[longest]}, the tokens of sequence {longest} "
            f"({batch.instance_ids[longest]!r}), got {max_tokens}; raise it"
        )
    if count is not None and count > len(lengths):
        raise ValueError(
            f"count: expected at most {len(lengths)}, one sequence for each, got {count}; lower it"
        )
    if batch.prefix_tree is not None:
        parts = _prefix_parts(batch, batch.prefix_tree.segments, max_tokens, count)
    elif count is not None:
        parts = balance(lengths, count)
    elif batch.layout == "padded":
        assert max_tokens is not None
        parts = _padded_parts(lengths, max_tokens)
    else:
        assert max_tokens is not None
        parts = by_budget(lengths, max_tokens)
    counts = _trained_tokens(batch)
    sample_tokens = samples_sum(counts, batch.sample_of)
    whole = {
        "batch_loss_tokens": batch.loss_mask.sum(),
        "batch_sequences": (counts > 0).sum(),
        # Each sequence counts by its share of its sample.
        "batch_samples": (counts / sample_tokens.clamp(min=1)).sum().round(),
    }
    lengths_of = np.asarray(lengths, np.int64)
    starts = np.cumsum(lengths_of) - lengths_of
    sizes = batch.group_sizes.cpu().numpy()
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    return [
        _take(batch, np.array(part), lengths_of, starts, group_of, sample_tokens, whole)
        for part in parts
    ]


def _padded_parts(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Put sequences of like length together, as many as fit with the longest of them."""
    parts: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[position]
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens:
            parts[-1].append(position)
        else:
            parts.append([position])
            longest = length
    return [sorted(part) for part in parts]


def _prefix_parts(
    batch: Batch, segments: Segments, max_tokens: int | None, count: int | None
) -> list[list[int]]:
    """Join groups, and cut oversized groups: a cut recomputes shared prefixes."""
    items: list[list[int]] = []
    rows: list[int] = []
    last = 0
    for size in batch.group_sizes.tolist():
        first, last = last, last + size
        seen: set[int] = set()
        for at in range(first, last):
            path = segments.path(int(segments.leaves[at]))
            own = int(segments.lengths[[one for one in path if one not in seen]].sum())
            whole = int(segments.lengths[path].sum())
            if at == first or (max_tokens is not None and rows[-1] + own > max_tokens):
                items.append([])
                rows.append(0)
                seen, own = set(), whole
            items[-1].append(at)
            rows[-1] += own
            seen.update(path)
    if count is not None and count > len(items):
        items = [[at] for item in items for at in item]
        rows = [int(segments.lengths[segments.path(int(leaf))].sum()) for leaf in segments.leaves]
    shared = balance(rows, count) if count is not None else by_budget(rows, max_tokens or 0)
    return [sorted(at for item in part for at in items[item]) for part in shared]


def _trained_tokens(batch: Batch) -> Tensor:
    if batch.layout == "padded":
        return batch.loss_mask.sum(dim=1)
    # Counts at the borders, without a wait for the device.
    ends = torch.cumsum(torch.nn.functional.pad(batch.loss_mask, (1, 0)), dim=0)
    return ends[batch.cu_seqlens.long()].diff()


def _take(
    batch: Batch,
    part: NDArray[np.int64],
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    group_of: NDArray[np.int64],
    sample_tokens: Tensor,
    whole: dict[str, Tensor],
) -> MicroBatch:
    """Take some sequences; `lengths`, `starts` and `group_of` cover the whole batch."""
    own = lengths[part]
    borders = np.zeros(len(part) + 1, np.int32)
    np.cumsum(own, out=borders[1:])
    longest = int(own.max())
    places = _places(starts[part], own)
    device = batch.tokens.device
    indices = torch.from_numpy(part)
    sequences = indices.to(device)

    if batch.layout == "padded":

        def rows(values: Tensor) -> Tensor:
            return select(values, sequences)[:, :longest]
    else:
        tokens = torch.from_numpy(places).to(device)

        def rows(values: Tensor) -> Tensor:
            return select(values, tokens)

    groups, own_sizes = np.unique(group_of[part], return_counts=True)
    extra, offsets = _extra(batch, part, sequences, rows, places, groups)
    return MicroBatch(
        tokens=rows(batch.tokens),
        position_ids=rows(batch.position_ids),
        cu_seqlens=torch.from_numpy(borders).to(device),
        max_seqlen=longest,
        loss_mask=rows(batch.loss_mask),
        logprobs=None if batch.logprobs is None else rows(batch.logprobs),
        advantages=rows(batch.advantages),
        scores=batch.scores.index_select(0, sequences),
        instance_ids=[batch.instance_ids[position] for position in part],
        policy_versions=batch.policy_versions.index_select(0, sequences),
        newest_policy_versions=batch.newest_policy_versions.index_select(0, sequences),
        sample_of=batch.sample_of.index_select(0, sequences),
        group_sizes=torch.from_numpy(own_sizes),
        sequence_indices=indices,
        sample_tokens=sample_tokens.index_select(0, sequences),
        **whole,
        layout=batch.layout,
        extra=extra,
        extra_offsets=offsets,
        extra_kinds=dict(batch.extra_kinds),
        prefix_tree=None if batch.prefix_tree is None else batch.prefix_tree.select(part.tolist()),
    )


def select(values: Tensor, positions: Tensor) -> Tensor:
    """Return rows by their positions, of any dtype that torch stores."""
    return indexable(values).index_select(0, positions).view(values.dtype)


def _places(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of consecutive runs of rows."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _extra(
    batch: Batch,
    part: NDArray[np.int64],
    sequences: Tensor,
    rows: Callable[[Tensor], Tensor],
    tokens: NDArray[np.int64],
    groups: NDArray[np.int64],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the extra fields of some sequences, and the borders of their rows."""
    extra: dict[str, Any] = {}
    offsets: dict[str, Tensor] = {}
    for name, kind in batch.extra_kinds.items():
        values = batch.extra[name]
        if kind == "meta":
            extra[name] = [values[position] for position in part]
        elif kind == "sequence":
            extra[name] = select(values, sequences)
        elif kind == "token":
            extra[name] = rows(values)
        else:
            borders = batch.extra_offsets[name].cpu().numpy()
            # Of tokens, groups, or sequences.
            owners = {"support": tokens, "group": groups}.get(kind, part)
            counts = borders[owners + 1] - borders[owners]
            own = torch.from_numpy(_places(borders[owners], counts)).to(values.device)
            extra[name] = select(values, own)
            offsets[name] = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
            offsets[name] = offsets[name].to(values.device)
    return extra, offsets
