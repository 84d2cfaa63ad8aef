"""Groups into batches: packed rows without padding, or padded ones.

Invariants:

- A batch holds whole groups, in the order given, each with its samples ordered by index.
- Logprobs are aligned to their own token, and 0 where the loss mask is False.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import torch

import shmbus
from shmbus.batch import gather as bus_gather
from trainer_adapter._arguments import check_choices, check_device, check_fields
from trainer_adapter.advantages import Kind, advantages_for_groups, check_kind
from trainer_adapter.batches.batch import Batch, Layout, copy_to_device, pad_batch
from trainer_adapter.batches.extra_fields import (
    ExtraField,
    ExtraFields,
    GivenExtraFields,
    MeasuredExtras,
)
from trainer_adapter.batches.facts import BatchFacts
from trainer_adapter.batches.finite import require_finite
from trainer_adapter.batches.memory import BatchMemory
from trainer_adapter.batches.rows import RowSplit, split_rows
from trainer_adapter.batches.sample_flags import Truncated, apply_flags, sample_flags
from trainer_adapter.scored_group import groups_of

__all__ = ["ExtraField", "FieldNames", "pack"]

FieldNames = bus_gather.FieldNames

NO_EXTRAS: Final = MeasuredExtras([], {}, 0)


def pack(
    groups: Iterable[shmbus.Group] | shmbus.Group,
    *,
    advantages: Kind = "grpo",
    layout: Layout = "packed",
    device: torch.device | str = "cpu",
    fields: FieldNames | None = None,
    memory: BatchMemory | None = None,
    truncated: Truncated = "keep",
    extra_fields: GivenExtraFields | ExtraFields | None = None,
) -> Batch:
    """Gather leased groups into one batch.

    Parameters
    ----------
    groups : shmbus.Group or iterable of them
        Leased, of one Consumer.
    advantages : "grpo" | "dr_grpo" | "rloo" | "batch" | "batch_std" | "none" or callable
        As for `group_advantages`; token-level advantages that a producer sent win.
    layout : "packed" | "padded"
        All sequences in one row, with `Batch.cu_seqlens` for their borders; or a row for each,
        padded to the longest.
    device : torch.device or str
        Where the batch's tensors are.
    fields : FieldNames, optional
        How producers call the arrays.
    memory : BatchMemory, optional
        The pool for the batch's memory; new memory without it.
    truncated : "keep" | "mask"
        "mask" leaves truncated samples, by their ``meta["finish_reason"]``, out of the loss; their
        scores still count for their groups.
    extra_fields : dict of str to kind or ExtraField, optional
        Further fields for `Batch.extra`: "token", "ragged", "sequence" or "meta", as `ExtraField`
        explains them.

    Returns
    -------
    Batch

    Raises
    ------
    TypeError, ValueError
        Arguments that do not fit; no group; a trajectory without tokens, without a field that
        another sample of its group has, with fields that do not fit together, or with logprobs or
        advantages that are not finite where the loss mask is True; logprobs in some groups only; an
        extra field that is missing, or of another dtype or shape than in the others.

    Notes
    -----
    A sample that was put with ``rows=`` is a sequence for each row, with the sample's advantage.

    A sample whose meta has ``set_advantage_to_zero: True`` gets advantages of 0, even if it sent
    its own; its score still counts for its group.
    """
    chosen = [groups] if isinstance(groups, shmbus.Group) else list(groups)
    if not chosen:
        raise ValueError("pack: expected at least one group, got none")
    check_choices(layout=layout, truncated=truncated)
    check_kind("advantages", advantages)
    check_fields(fields)
    target = check_device(device)
    names = fields or FieldNames()
    measured = bus_gather.measure(chosen, names)
    trajectories, sizes, lengths, *_ = measured
    scores, policy_versions, instance_ids, newest = bus_gather.describe(trajectories)
    wanted, total = ExtraFields.of(extra_fields), sum(lengths)
    extras = NO_EXTRAS if wanted is None else wanted.measure(trajectories, lengths)
    size = bus_gather.packed_bytes(total, len(lengths))
    whole = size + extras.nbytes
    block = np.empty(whole, np.uint8) if memory is None else memory.take(whole)
    extra_block = block[size:whole]
    arrays = bus_gather.PackedArrays.inside(block, total, len(lengths))
    per_sequence = advantages_for_groups(
        scores,
        sizes,
        advantages,
        groups=lambda: groups_of(trajectories, lengths, sizes.tolist()),
    )
    columns = extras.packed_into(extra_block)
    finite = bus_gather.gather(trajectories, arrays, per_sequence, names, columns)
    if (flags := sample_flags(trajectories, truncated)) is not None:
        apply_flags(flags, arrays)
    if not finite:
        # The flags may have left the values that are not finite out of the loss.
        require_finite(arrays, trajectories, names)
    extra, extra_offsets, extra_kinds = (
        ({}, {}, {}) if wanted is None else extras.values(torch.from_numpy(extra_block))
    )
    batch = Batch(
        tokens=torch.from_numpy(arrays.tokens),
        position_ids=torch.from_numpy(arrays.position_ids),
        cu_seqlens=torch.from_numpy(arrays.cu_seqlens),
        max_seqlen=max(lengths),
        loss_mask=torch.from_numpy(arrays.loss_mask),
        logprobs=torch.from_numpy(arrays.logprobs) if measured.has_logprobs else None,
        advantages=torch.from_numpy(arrays.advantages),
        scores=torch.from_numpy(scores.astype(np.float32)),
        instance_ids=instance_ids,
        policy_versions=torch.from_numpy(policy_versions),
        newest_policy_versions=torch.from_numpy(newest),
        group_sizes=torch.from_numpy(sizes),
        groups=chosen,
        extra=extra,
        extra_offsets=extra_offsets,
        extra_kinds=extra_kinds,
        sample_of=torch.from_numpy(np.arange(len(lengths), dtype=np.int32)),
        facts=BatchFacts(scores, policy_versions, lengths, total, sizes),
    )
    if measured.has_rows:
        split_rows(batch, RowSplit.of(trajectories, lengths, names.tokens), extras.row_sources())
    if layout == "padded":
        pad_batch(batch)
    return batch if target.type == "cpu" else copy_to_device(batch, target)
