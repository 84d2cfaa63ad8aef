"""Groups into batches: a plan measured once, then one copy, on the host or by a kernel.

Invariants:

- A batch holds whole groups, in the order given, each with its samples ordered by index.
- Logprobs are aligned to their own token, and 0 where the loss mask is False.
- Flags, rows, columns and extra fields are decided in the plan; each gives its part of the batch,
  and no part is changed afterwards.
- The candidate ids of a sampling mask (top-k, top-p, a grammar) lie in the order of the packed
  tokens, for `token_logprobs(support=)`; a mask without the sampled token never reaches a loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.batch.gather import FieldNames, PackedBatch, PackPlan, gather
from trainer_adapter._arguments import (
    check_choices,
    check_device,
    check_fields,
    check_pack_threads,
    score_error,
)
from trainer_adapter.advantages import Kind, advantages_for_groups, check_kind
from trainer_adapter.batches.batch import Batch, BatchFacts, Layout, padded, replaced
from trainer_adapter.batches.columns import column_tensors
from trainer_adapter.batches.extra_fields import (
    COUNTS,
    ExtraFields,
    GivenExtraFields,
    MeasuredExtras,
)
from trainer_adapter.batches.finite import SampleError, wrong_value
from trainer_adapter.batches.memory import BatchMemory
from trainer_adapter.batches.prefixes import prefix_batch
from trainer_adapter.batches.rows import RowSplit
from trainer_adapter.batches.sample_flags import IsOld, Stale, Truncated, Withholding, sample_flags
from trainer_adapter.scored_group import ScoredGroup, groups_of


class SupportError(SampleError):
    """A sample with an invalid sampling mask."""


def support_offsets(
    wanted: ExtraFields,
    extra: dict[str, Any],
    offsets: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    plan: PackPlan,
) -> dict[str, torch.Tensor]:
    """Return the start of each token's part of the "support" fields, after their checks."""
    found = {}
    lengths = plan.samples[3]
    for name, source in wanted.supports.items():
        ids, counts = extra[name].numpy(), extra[name + COUNTS].numpy()
        borders = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        if (at := _first(counts < 0)) >= 0:
            raise _error(plan, at, source + COUNTS, "0 or more", str(counts[at]))
        own = offsets[name].diff().numpy()
        ends = np.cumsum(lengths)
        for sample, (end, there) in enumerate(zip(ends.tolist(), own.tolist(), strict=True)):
            said = int(borders[end] - borders[end - lengths[sample]])
            if said != there:
                expected = f"{said} ids, the sum of {source + COUNTS}"
                raise _error(plan, end - 1, source, expected, f"{there} of them")
        owners = np.repeat(np.arange(len(counts)), counts)
        tokens, mask = tensors["tokens"].numpy(), tensors["loss_mask"].numpy()
        sampled = np.zeros(len(counts), bool)
        sampled[owners[ids == tokens[owners]]] = True
        if (at := _first(mask & (counts > 0) & ~sampled)) >= 0:
            raise _error(
                plan, at, source, "the token that was sampled among its ids",
                f"{tokens[at]} among none of {counts[at]}",
            )  # fmt: skip
        found[name] = torch.from_numpy(borders)
    return found


def _first(wrong: NDArray[np.bool_]) -> int:
    at = int(wrong.argmax()) if len(wrong) else 0
    return at if len(wrong) and wrong[at] else -1


def _error(plan: PackPlan, token: int, field: str, expected: str, got: str) -> SupportError:
    ends = np.cumsum(plan.samples[3])
    sample = int(np.searchsorted(ends, token, side="right"))
    t = plan.trajectories[sample]
    at = token - int(ends[sample] - plan.samples[3][sample])
    return SupportError(
        f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field {field!r}: "
        f"expected {expected}, got {got}, at token {at}; put what "
        "the engine sampled from, or leave the field out of extra_fields",
        sample,
    )


#: Tensors of a batch that share the memory of its arrays.
_TENSORS: Final = PackedBatch._fields[:-1]


class BatchPlan(NamedTuple):
    """A batch before its copy: its measured samples, and the decided parts."""

    groups: list[shmbus.Group]
    names: FieldNames
    samples: PackPlan
    #: float32 [N].
    advantages: NDArray[np.float32]
    #: uint8 [N], None without flags.
    flags: NDArray[np.uint8] | None
    wanted: ExtraFields
    extras: MeasuredExtras
    #: None if each sample is a single sequence.
    rows: RowSplit | None

    def batch(self, tensors: dict[str, Tensor], extras: Tensor | None, **more: Any) -> Batch:
        """Make the batch of the copied tensors, and of the block of copied extra fields."""
        samples = self.samples
        facts = BatchFacts(samples.samples, samples.sizes, samples.total, self.rows)
        parts: dict[str, Any] = {
            **tensors,
            "max_seqlen": samples.longest,
            "instance_ids": samples.instance_ids,
            "groups": self.groups,
            **more,
        }
        if not samples.has_logprobs:
            parts["logprobs"] = None
        if self.rows is not None:
            parts.update(self.rows.parts(samples.instance_ids))
        added = self.extras.added
        if extras is not None:
            extra, offsets, kinds = self.extras.values(extras, samples.sizes, self.rows)
            if self.wanted.supports:
                offsets |= support_offsets(self.wanted, extra, offsets, tensors, samples)
            parts.update(extra=extra, extra_offsets=offsets, extra_kinds=kinds)
        if added:
            extra, kinds = column_tensors(
                self.groups, added, self.wanted, self.rows, tensors["loss_mask"], samples.samples[3]
            )
            parts["extra"] = parts.get("extra", {}) | extra
            parts["extra_kinds"] = parts.get("extra_kinds", {}) | kinds
        return Batch.of_facts(facts, **parts)


class HostPacker:
    """Plans batches of leased groups, and copies them on the host, with options checked once."""

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
        self._excludes = self._withholding.excludes
        self._extra_fields = ExtraFields.of(extra_fields)
        if layout == "padded" and self._extra_fields.supports:
            raise ValueError(
                "extra_fields: expected no 'support' with layout='padded', got "
                f"{sorted(self._extra_fields.supports)}; take layout='packed' or 'prefix'"
            )
        self._threads = pack_threads

    def pack(self, groups: list[shmbus.Group], memory: BatchMemory | None = None) -> Batch:
        """Gather leased groups into one batch."""
        return self.copy(self.plan(groups), memory)

    def plan(self, groups: list[shmbus.Group]) -> BatchPlan:
        """Measure leased groups, and decide every part of their batch."""
        names, withholding = self._names, self._withholding
        samples, extras = self._extra_fields.measure(groups, names)
        flags = None
        if samples.has_metas or withholding.is_old is not None:
            flags = sample_flags(samples.trajectories, withholding)
        return BatchPlan(
            groups=groups,
            names=names,
            samples=samples,
            advantages=self._advantages(samples),
            flags=flags,
            wanted=self._extra_fields,
            extras=extras,
            rows=RowSplit(samples.trajectories, names.tokens) if samples.has_rows else None,
        )

    def _advantages(self, samples: PackPlan) -> NDArray[np.float32]:
        """Return the advantages of samples, 0 for samples outside the baseline."""
        if not samples.scores_fit:
            raise score_error(samples.trajectories)
        excluded = self._withholding.excluded(samples.trajectories) if self._excludes else None

        def seen(sizes: NDArray[np.int64], kept: NDArray[np.bool_] | None) -> list[ScoredGroup]:
            pairs = list(zip(samples.trajectories, samples.samples[3].tolist(), strict=True))
            if kept is not None:
                pairs = [pair for pair, keeps in zip(pairs, kept.tolist(), strict=True) if keeps]
            return groups_of([t for t, _ in pairs], [n for _, n in pairs], sizes.tolist())

        scores = samples.samples[0].view(np.float64)
        return advantages_for_groups(
            scores, samples.sizes, self._kind, excluded=excluded, groups=seen
        )

    def copy(self, plan: BatchPlan, memory: BatchMemory | None = None) -> Batch:
        """Copy the samples of a plan into one batch."""
        if memory is None:
            memory = self._memory
        elif not isinstance(memory, BatchMemory):
            raise TypeError(f"memory: expected a BatchMemory, got {type(memory).__name__}")
        samples = plan.samples
        size = samples.nbytes + plan.extras.nbytes
        block = np.empty(size, np.uint8) if memory is None else memory.take(size)
        extras = block[samples.nbytes : size]
        arrays = gather(
            samples, block, plan.advantages, plan.flags, plan.extras.outs(extras), self._threads
        )
        if not arrays.clean:
            raise wrong_value(arrays, samples.trajectories, plan.names)
        own = plan.extras.arrays or plan.extras.metas
        tensors = {name: torch.from_numpy(getattr(arrays, name)) for name in _TENSORS}
        batch = plan.batch(tensors, torch.from_numpy(extras) if own else None)
        if self._layout == "padded":
            batch = padded(batch)
        elif self._layout == "prefix":
            batch = prefix_batch(batch, samples, plan.names)
        if self._device.type == "cpu":
            return batch
        return replaced(batch.to(self._device), transport="copy")


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
    layout, device, fields
        As for `OnlineDataHandler`.
    memory : BatchMemory, optional
        The pool for the batch's memory; by default new memory.
    truncated : "keep" | "mask" | "exclude"
        "mask" leaves truncated samples, by their ``meta["finish_reason"]``, out of the loss; their
        scores still count for their groups. "exclude" leaves their scores out too.
    extra_fields : dict of str to kind or ExtraField, optional
        Further fields for `Batch.extra`, by the kinds of `ExtraField`.
    pack_threads : int
        Copying threads, the caller's included. They start and end with the copy.

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
    return packer.pack(chosen, memory)
