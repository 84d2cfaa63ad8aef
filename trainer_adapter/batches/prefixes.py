"""Shared prefixes of a batch, found in its packed tensors after the checks of prompts.

Invariant: a falsely declared shared prefix is an error with sample and field, to drop only its
group; sequences with a difference in an input beside tokens share nothing.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray

import shmbus
from shmbus.batch.gather import FieldNames, PackPlan
from shmbus.data.sample_rows import row_lengths
from trainer_adapter.batches.batch import Batch, replaced
from trainer_adapter.batches.finite import SampleError
from trainer_adapter.batches.prefix_tree import same_tokens, share_prefixes


class PrefixError(SampleError):
    """A sample without the shared beginning of its group."""


def prefix_batch(batch: Batch, plan: PackPlan, names: FieldNames) -> Batch:
    """Return a packed batch on the host with its prefix tree."""
    tokens, borders = batch.tokens.numpy(), batch.cu_seqlens.numpy()
    views = [tokens[a:b] for a, b in itertools.pairwise(borders)]
    trajectories = plan.trajectories
    _check_prompts(batch, views, trajectories, names)
    if plan.has_rows:
        _check_rows(views, trajectories, names)
    sizes = batch.group_sizes.numpy()
    tree = share_prefixes(tokens, np.diff(borders), sizes, _inputs(batch))
    return replaced(batch, prefix_tree=tree, layout="prefix")


def _check_prompts(
    batch: Batch,
    views: list[NDArray[np.int64]],
    trajectories: list[shmbus.Trajectory],
    names: FieldNames,
) -> None:
    """Raise PrefixError for a sample with an unequal prompt (masked tokens at the start)."""
    mask, borders = batch.loss_mask.numpy(), batch.cu_seqlens.tolist()
    sample_of = batch.sample_of.tolist()
    last = 0
    for size in batch.group_sizes.tolist():
        first, last = last, last + size
        shown: tuple[int, int] | None = None
        for at in range(first, last):
            if at > first and sample_of[at] == sample_of[at - 1]:
                continue  # a further row of the sample
            trained = mask[borders[at] : borders[at + 1]]
            if not trained.any():
                continue  # unknown end of the prompt
            prompt = int(trained.argmax())
            if shown is None:
                shown = at, prompt
                continue
            wanted = min(prompt, shown[1])
            same = same_tokens(views[at][:wanted], views[shown[0]][:wanted])
            if same < wanted:
                other = trajectories[sample_of[shown[0]]].index
                raise _error(
                    trajectories, sample_of[at], names,
                    f"the prompt of sample {other} of its group",
                    f"{views[at][same]} at token {same} in place of {views[shown[0]][same]}",
                    "give all samples of a group one prompt, or take layout='packed'",
                )  # fmt: skip


def _check_rows(
    views: list[NDArray[np.int64]], trajectories: list[shmbus.Trajectory], names: FieldNames
) -> None:
    """Raise PrefixError for a row without its declared prefix in a second row of its sample."""
    first = 0
    for sample, t in enumerate(trajectories):
        rows = row_lengths(t)
        count = 1 if rows is None else len(rows)
        own = views[first : first + count]
        for number, wanted in enumerate([] if rows is None else rows[:, 1].tolist()):
            others = [view for at, view in enumerate(own) if at != number]
            same = max((same_tokens(own[number][:wanted], one) for one in others), default=0)
            if same < wanted:
                raise _error(
                    trajectories, sample, names,
                    f"row {number} to share its prefix_length={wanted} with another row",
                    f"{same} tokens that any has", "correct prefix_length, or leave it out",
                )  # fmt: skip
        first += count


def _error(
    trajectories: list[shmbus.Trajectory],
    sample: int,
    names: FieldNames,
    expected: str,
    got: str,
    remedy: str,
) -> PrefixError:
    t = trajectories[sample]
    return PrefixError(
        f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field "
        f"{names.tokens!r}: expected {expected}, got {got}; {remedy}",
        sample,
    )


def _inputs(batch: Batch) -> NDArray[np.int64] | None:
    """Distinguish sequences by "ragged" fields, like images; None without such fields."""
    ragged = [name for name, kind in batch.extra_kinds.items() if kind == "ragged"]
    if not ragged:
        return None

    def parts(at: int) -> list[torch.Tensor]:
        found = []
        for name in ragged:
            borders = batch.extra_offsets[name]
            values = batch.extra[name][int(borders[at]) : int(borders[at + 1])]
            found.append(values.contiguous().view(torch.uint8))
        return found

    kinds = np.arange(batch.num_sequences)
    last = 0
    for size in batch.group_sizes.tolist():
        first, last = last, last + size
        for at in range(first + 1, last):
            own = parts(at)
            for other in dict.fromkeys(kinds[first:at].tolist()):
                if all(map(torch.equal, own, parts(other))):
                    kinds[at] = other
                    break
    return kinds
