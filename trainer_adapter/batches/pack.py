"""Groups into batches: packed rows without padding, or padded rows.

Invariants:

- A batch holds whole groups, in the order given, each with its samples ordered by index.
- Logprobs are aligned to their own token, and 0 where the loss mask is False.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.batch import gather as bus_gather
from shmbus.data.sample_rows import row_fields, row_lengths
from trainer_adapter._arguments import (
    check_choices,
    check_device,
    check_fields,
    check_pack_threads,
)
from trainer_adapter.advantages import Kind, advantages_for_groups, check_kind
from trainer_adapter.batches.batch import Batch, BatchFacts, Layout, copy_to_device, pad_batch
from trainer_adapter.batches.columns import add_columns, column_names
from trainer_adapter.batches.extra_fields import (
    ExtraField,
    ExtraFields,
    GivenExtraFields,
    MeasuredExtras,
    of_groups,
)
from trainer_adapter.batches.finite import require_finite
from trainer_adapter.batches.memory import BatchMemory
from trainer_adapter.batches.prefixes import share_in_batch
from trainer_adapter.batches.sample_flags import (
    IsOld,
    Stale,
    Truncated,
    Withholding,
    apply_flags,
    sample_flags,
)
from trainer_adapter.batches.support import join_support
from trainer_adapter.batches.tensors import indexable
from trainer_adapter.scored_group import ScoredGroup, groups_of

__all__ = ["ExtraField", "FieldNames", "HostPacker", "RowSplit", "pack", "split_rows"]

FieldNames = bus_gather.FieldNames


class HostPacker:
    """Packs leased groups into batches on the host, with options checked once."""

    def __init__(
        self,
        *,
        advantages: Kind = "grpo",
        layout: Layout = "packed",
        device: torch.device | str = "cpu",
        fields: FieldNames | None = None,
        truncated: Truncated = "keep",
        stale: Stale = "drop",
        is_old: IsOld | None = None,
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
        self._layout: Layout = layout
        self._names = fields or FieldNames()
        self._withholding = Withholding(truncated, stale, is_old)
        self._extra_fields = ExtraFields.of(extra_fields)
        if layout == "padded" and self._extra_fields is not None and self._extra_fields.supports:
            raise ValueError(
                "extra_fields: expected no 'support' with layout='padded', got "
                f"{sorted(self._extra_fields.supports)}; take layout='packed' or 'prefix'"
            )
        self._threads = bus_gather.GatherThreads(pack_threads) if pack_threads > 1 else None

    def pack(self, groups: list[shmbus.Group], memory: BatchMemory | None = None) -> Batch:
        """Gather leased groups into one batch."""
        if memory is None:
            memory = self._memory
        elif not isinstance(memory, BatchMemory):
            raise TypeError(f"memory: expected a BatchMemory, got {type(memory).__name__}")
        names = self._names
        compared = compared_scores(groups, self._kind, names, self._withholding)
        extras = NO_EXTRAS
        extra: dict[str, Any] = {}
        if self._extra_fields is None:
            blocks = [] if memory is None else memory.blocks
            packed = bus_gather.gather(groups, names, blocks, compared, (), self._threads)
            if isinstance(packed, int):
                block = _block(packed, memory)
                packed = bus_gather.gather(groups, names, block, compared, (), self._threads)
            if packed is None:
                bus_gather.measure(groups, names)  # raises the error of the invalid sample
        else:
            packed, extras, extra = self._gather_extras(groups, memory, compared)
        assert isinstance(packed, bus_gather.PackedBatch), "the block is large enough"
        if packed.has_metas or self._withholding.is_old is not None:
            flags = sample_flags(packed.trajectories, self._withholding)
            if flags is not None:
                apply_flags(flags, packed)
        if not packed.finite:
            # The flags may have removed the non-finite values from the loss.
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
        if self._extra_fields is not None:
            of_groups(batch.extra_offsets, batch.extra_kinds, packed.sizes)
            join_support(batch, self._extra_fields, facts.lengths, packed.trajectories)
        if packed.has_rows:
            split = RowSplit.of(packed.trajectories, facts.lengths, names.tokens)
            split_rows(batch, split, extras.row_sources())
        add_columns(batch, groups, self._extra_fields)
        if self._layout == "padded":
            pad_batch(batch)
        elif self._layout == "prefix":
            share_in_batch(batch, packed.trajectories, names)
        return batch if self._device.type == "cpu" else copy_to_device(batch, self._device)

    def _gather_extras(
        self,
        groups: list[shmbus.Group],
        memory: BatchMemory | None,
        compared: NDArray[np.float32],
    ) -> tuple[bus_gather.PackedBatch | int | None, MeasuredExtras, dict[str, Any]]:
        """Gather with extra fields, measured before the memory is allocated."""
        assert self._extra_fields is not None
        names = self._names
        measured = bus_gather.measure(groups, names)
        lengths = measured.lengths
        extras = self._extra_fields.measure(measured.trajectories, lengths, column_names(groups))
        size = bus_gather.packed_bytes(sum(lengths), len(lengths))
        block = _block(size + extras.nbytes, memory)
        extra_block = block[size : size + extras.nbytes]
        packed = bus_gather.gather(
            groups, names, block, compared, extras.packed_into(extra_block), self._threads
        )
        values = extras.values(torch.from_numpy(extra_block))
        parts = ("extra", "extra_offsets", "extra_kinds")
        return packed, extras, dict(zip(parts, values, strict=True))

    def close(self) -> None:
        """End its threads; idempotent, and callable in a child of a fork."""
        if self._threads is not None:
            self._threads.close()


def compared_scores(
    groups: list[shmbus.Group], kind: Kind, names: FieldNames, withholding: Withholding
) -> NDArray[np.float32]:
    """Return the advantages of samples, 0 for samples outside the baseline."""
    trajectories, sizes = bus_gather.members(groups)
    excluded = withholding.excluded(trajectories) if withholding.excludes else None

    def seen(sizes: NDArray[np.int64], kept: NDArray[np.bool_] | None) -> list[ScoredGroup]:
        lengths = bus_gather.measure(groups, names).lengths
        pairs = list(zip(trajectories, lengths, strict=True))
        if kept is not None:
            pairs = [pair for pair, keeps in zip(pairs, kept.tolist(), strict=True) if keeps]
        return groups_of([t for t, _ in pairs], [n for _, n in pairs], sizes.tolist())

    scores = bus_gather.scores(trajectories)
    return advantages_for_groups(scores, sizes, kind, excluded=excluded, groups=seen)


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
        As for `group_advantages`; token-level advantages sent by a producer win.
    layout : "packed" | "padded" | "prefix"
        "packed": every sequence in one row, with borders in `Batch.cu_seqlens`. "padded": a row per
        sequence, padded to the longest. "prefix": packed, with `Batch.prefix_tree`.
    device : torch.device or str
        Device of the batch's tensors.
    fields : FieldNames, optional
        Producers' names of the arrays.
    memory : BatchMemory, optional
        The pool for the batch's memory; by default new memory.
    truncated : "keep" | "mask" | "exclude"
        "mask" leaves truncated samples, by their ``meta["finish_reason"]``, out of the loss; their
        scores still count for their groups. "exclude" leaves their scores out too.
    extra_fields : dict of str to kind or ExtraField, optional
        Further fields for `Batch.extra`: "token", "ragged", "sequence" or "meta", explained in
        `ExtraField`.
    pack_threads : int
        Copying threads, the caller's included. They start and end with the call; a `HostPacker`
        keeps them.

    Returns
    -------
    Batch

    Raises
    ------
    TypeError, ValueError
        Invalid arguments; no group; a trajectory without tokens, without a field present in another
        sample of its group, with mismatched fields, or with non-finite logprobs or advantages where
        the loss mask is True; logprobs in some groups only; an extra field missing, or of a
        deviating dtype or shape; for ``layout="prefix"``, samples of a group with different
        prompts, or a row without the prefix of its `prefix_length`.
    OSError
        The system refused to start the threads.

    Notes
    -----
    A sample put with ``rows=`` forms a sequence per row, with the sample's advantage.

    A sample with ``set_advantage_to_zero: True`` in its meta gets advantages of 0, even over its
    own; its score still counts for its group.
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


class RowSplit(NamedTuple):
    """Split of N samples into S sequences."""

    #: int64 [S]. Tokens per sequence.
    lengths: NDArray[np.int64]
    #: int64 [S]. Sample per sequence.
    sample_of: NDArray[np.int64]
    #: int64 [S]. Start of each sequence within its sample.
    starts: NDArray[np.int64]
    #: Per sample, the field names of its rows; None for a sample put without rows.
    cut_fields: list[frozenset[str] | None]

    @classmethod
    def of(
        cls, trajectories: list[shmbus.Trajectory], lengths: NDArray[np.int64], tokens: str
    ) -> RowSplit:
        """Find the rows of samples, after their checks."""
        every: list[NDArray[np.int64]] = []
        cut_fields: list[frozenset[str] | None] = []
        for t, length in zip(trajectories, lengths, strict=True):
            rows = row_lengths(t)
            names = row_fields(t.keys())
            if rows is not None and tokens not in names:
                raise ValueError(
                    f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field "
                    f"{tokens!r}: expected in each row, got it beside rows=; put it in the rows"
                )
            every.append(np.array([length], np.int64) if rows is None else rows[:, 0])
            cut_fields.append(None if rows is None else frozenset(names))
        counts = np.array([len(rows) for rows in every])
        joined = np.concatenate(every)
        ends = np.cumsum(joined)
        firsts = np.cumsum(counts) - counts
        return cls(
            joined,
            np.repeat(np.arange(len(every)), counts),
            ends - joined - np.repeat((ends - joined)[firsts], counts),
            cut_fields,
        )

    @property
    def borders(self) -> NDArray[np.int32]:
        """Start of each sequence in the packed row: int32 [S + 1]."""
        borders = np.zeros(len(self.lengths) + 1, np.int32)
        np.cumsum(self.lengths, out=borders[1:])
        return borders


def split_rows(batch: Batch, split: RowSplit, ragged: dict[str, str]) -> None:
    """Make sequences of the rows of a batch's samples, in place."""
    borders = split.borders
    sample_of = torch.from_numpy(split.sample_of)
    positions = np.arange(len(batch.tokens)) - np.repeat(
        borders[:-1].astype(np.int64), split.lengths
    )
    batch.position_ids.copy_(torch.from_numpy(positions))
    batch.cu_seqlens = torch.from_numpy(borders)
    batch.max_seqlen = int(split.lengths.max())
    batch.scores = batch.scores[sample_of]
    batch.policy_versions = batch.policy_versions[sample_of]
    batch.newest_policy_versions = batch.newest_policy_versions[sample_of]
    batch.instance_ids = [batch.instance_ids[sample] for sample in split.sample_of.tolist()]
    group_of = torch.repeat_interleave(torch.arange(len(batch.group_sizes)), batch.group_sizes)
    batch.group_sizes = torch.bincount(group_of[sample_of], minlength=len(batch.group_sizes))
    batch.sample_of = sample_of.to(torch.int32)
    if batch.facts is not None:
        batch.facts = batch.facts._replace(row_lengths=split.lengths)
    for name, kind in batch.extra_kinds.items():
        if kind == "meta":
            batch.extra[name] = [batch.extra[name][sample] for sample in split.sample_of.tolist()]
        elif kind == "sequence":
            batch.extra[name] = _select(batch.extra[name], sample_of)
        elif kind == "ragged":
            _split_ragged(batch, name, ragged[name], split)


def _split_ragged(batch: Batch, name: str, source: str, split: RowSplit) -> None:
    """Cut a per-row field at the rows, and repeat a per-sample field for its rows."""
    borders = batch.extra_offsets[name].numpy()
    cut = np.array([names is not None and source in names for names in split.cut_fields])
    cut = cut[split.sample_of]
    starts = borders[split.sample_of] + np.where(cut, split.starts, 0)
    counts = np.where(cut, split.lengths, np.diff(borders)[split.sample_of])
    ends = np.cumsum(counts)
    places = np.repeat(starts - (ends - counts), counts) + np.arange(int(ends[-1]))
    batch.extra[name] = _select(batch.extra[name], torch.from_numpy(places))
    batch.extra_offsets[name] = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int64))


def _select(values: Tensor, positions: Tensor) -> Tensor:
    return indexable(values).index_select(0, positions).view(values.dtype)
