"""Groups into batches: packed rows without padding, or padded ones.

Invariants:

- A batch holds whole groups, in the order given, each with its samples ordered by index.
- Logprobs are aligned to their own token, and 0 where the loss mask is False.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

import shmbus
from shmbus.batch import gather as bus_gather
from trainer_adapter._arguments import (
    check_choices,
    check_device,
    check_fields,
    check_pack_threads,
)
from trainer_adapter.advantages import Kind, advantages_for_groups, baseline_of, check_kind
from trainer_adapter.batches.batch import Batch, BatchFacts, Layout, copy_to_device, pad_batch
from trainer_adapter.batches.extra_fields import (
    ExtraField,
    ExtraFields,
    GivenExtraFields,
    MeasuredExtras,
)
from trainer_adapter.batches.finite import require_finite
from trainer_adapter.batches.memory import BatchMemory
from trainer_adapter.batches.rows import RowSplit, split_rows
from trainer_adapter.batches.sample_flags import Truncated, apply_flags, sample_flags
from trainer_adapter.scored_group import groups_of

__all__ = ["ExtraField", "FieldNames", "HostPacker", "pack"]

FieldNames = bus_gather.FieldNames


class HostPacker:
    """Packs leased groups into batches by the processor, with options that are checked once."""

    def __init__(
        self,
        *,
        advantages: Kind = "grpo",
        layout: Layout = "packed",
        device: torch.device | str = "cpu",
        fields: FieldNames | None = None,
        truncated: Truncated = "keep",
        extra_fields: GivenExtraFields | ExtraFields | None = None,
        memory: BatchMemory | None = None,
        pack_threads: int = 1,
    ) -> None:
        check_choices(layout=layout, truncated=truncated)
        check_kind("advantages", advantages)
        check_fields(fields)
        check_pack_threads(pack_threads)
        self._device = check_device(device)
        self._memory = memory
        self._kind = advantages
        self._baseline = baseline_of(advantages)
        self._layout: Layout = layout
        self._names = fields or FieldNames()
        self._truncated: Truncated = truncated
        self._extra_fields = ExtraFields.of(extra_fields)
        self._threads = bus_gather.GatherThreads(pack_threads) if pack_threads > 1 else None

    def pack(self, groups: list[shmbus.Group], memory: BatchMemory | None = None) -> Batch:
        """Gather leased groups into one batch."""
        if memory is None:
            memory = self._memory
        elif not isinstance(memory, BatchMemory):
            raise TypeError(f"memory: expected a BatchMemory, got {type(memory).__name__}")
        baseline, names = self._baseline, self._names
        packed = None
        if baseline is not None and self._extra_fields is None:
            blocks = [] if memory is None else memory.blocks
            packed = bus_gather.gather(groups, names, blocks, baseline, (), self._threads)
            if isinstance(packed, int):
                block = _block(packed, memory)
                packed = bus_gather.gather(groups, names, block, baseline, (), self._threads)
        # Also where C found something to refuse: here it is said what.
        extras = NO_EXTRAS
        extra: dict[str, Any] = {}
        if packed is None:
            packed, extras, extra = self._gather_in_steps(groups, memory)
        assert isinstance(packed, bus_gather.PackedBatch), "the block is large enough"
        if packed.has_metas:
            flags = sample_flags(packed.trajectories, self._truncated)
            if flags is not None:
                apply_flags(flags, packed)
        if not packed.finite:
            # The flags may have left the values that are not finite out of the loss.
            require_finite(packed, packed.trajectories, names)
        facts = BatchFacts(packed.samples, packed.sizes, packed.total)
        from_numpy = torch.from_numpy
        batch = Batch.of_facts(
            facts,
            tokens=from_numpy(packed.tokens),
            position_ids=from_numpy(packed.position_ids),
            cu_seqlens=from_numpy(packed.cu_seqlens),
            max_seqlen=packed.longest,
            loss_mask=from_numpy(packed.loss_mask),
            logprobs=from_numpy(packed.logprobs) if packed.has_logprobs else None,
            advantages=from_numpy(packed.advantages),
            instance_ids=packed.instance_ids,
            groups=groups,
            **extra,
        )
        if packed.has_rows:
            split = RowSplit.of(packed.trajectories, facts.lengths, names.tokens)
            split_rows(batch, split, extras.row_sources())
        if self._layout == "padded":
            pad_batch(batch)
        return batch if self._device.type == "cpu" else copy_to_device(batch, self._device)

    def _gather_in_steps(
        self, groups: list[shmbus.Group], memory: BatchMemory | None
    ) -> tuple[bus_gather.PackedBatch | int | None, MeasuredExtras, dict[str, Any]]:
        """Gather what takes Python in between: callables, several groups' scores, extra fields."""
        names = self._names
        measured = bus_gather.measure(groups, names)
        trajectories, sizes, lengths = measured.trajectories, measured.sizes, measured.lengths
        compared = advantages_for_groups(
            bus_gather.describe(trajectories)[0],
            sizes,
            self._kind,
            groups=lambda: groups_of(trajectories, lengths, sizes.tolist()),
        )
        wanted = self._extra_fields
        extras = NO_EXTRAS if wanted is None else wanted.measure(trajectories, lengths)
        size = bus_gather.packed_bytes(sum(lengths), len(lengths))
        block = _block(size + extras.nbytes, memory)
        extra_block = block[size : size + extras.nbytes]
        packed = bus_gather.gather(
            groups, names, block, compared, extras.packed_into(extra_block), self._threads
        )
        values = ({}, {}, {}) if wanted is None else extras.values(torch.from_numpy(extra_block))
        parts = ("extra", "extra_offsets", "extra_kinds")
        return packed, extras, dict(zip(parts, values, strict=True))

    def close(self) -> None:
        """End its threads; it may be called twice, and in a child of a fork."""
        if self._threads is not None:
            self._threads.close()


NO_EXTRAS: Final = MeasuredExtras([], {}, 0)


def _block(size: int, memory: BatchMemory | None) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8) if memory is None else memory.take(size)


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
    pack_threads: int = 1,
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
    pack_threads : int
        Threads that copy, the caller's among them. They start and end with the call; a `HostPacker`
        keeps them.

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
    OSError
        So many threads cannot be started.

    Notes
    -----
    A sample that was put with ``rows=`` is a sequence for each row, with the sample's advantage.

    A sample whose meta has ``set_advantage_to_zero: True`` gets advantages of 0, even if it sent
    its own; its score still counts for its group.
    """
    chosen = [groups] if isinstance(groups, shmbus.Group) else list(groups)
    if not chosen:
        raise ValueError("pack: expected at least one group, got none")
    packer = HostPacker(
        advantages=advantages,
        layout=layout,
        device=device,
        fields=fields,
        truncated=truncated,
        extra_fields=extra_fields,
        pack_threads=pack_threads,
    )
    try:
        return packer.pack(chosen, memory)
    finally:
        packer.close()
