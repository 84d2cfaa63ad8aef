"""Groups into batches: packed rows without padding, or padded ones.

Invariants:

- A batch holds whole groups, in the order given, each with its samples ordered by index.
- Logprobs are aligned to their own token, and 0 where the loss mask is False.
- Batch memory is used again only when no tensor, array or view of it is left anywhere.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.batch import gather as bus_gather
from trainer_adapter._arguments import check_choices, check_device, check_fields
from trainer_adapter.advantages import Kind, advantages_for_groups, check_kind
from trainer_adapter.batches.finite import require_finite
from trainer_adapter.batches.sample_flags import Truncated, apply_flags, sample_flags

__all__ = ["Batch", "BatchMemory", "FieldNames", "pack"]

FieldNames = bus_gather.FieldNames
Layout = Literal["packed", "padded"]

#: Blocks are rounded up to this many bytes, so that batches of like size share them: a huge page of
#: x86-64, and of aarch64 with pages of 4 KiB.
BLOCK_BYTES: Final = 2 << 20
#: Blocks kept for another batch; one in use, one being filled, one on its way to the device.
BLOCKS_KEPT: Final = 4


@dataclass(eq=False)
class Batch:
    """One batch of whole groups. T tokens in S sequences, the longest of L tokens.

    Tensors of it may share one block of memory, which lives as long as any of them: `clone` what
    is to outlast the rest.

    Attributes
    ----------
    tokens : int64 [T], or [S, L] padded with 0
    position_ids : int64 [T] or [S, L]
        From 0 in every sequence.
    cu_seqlens : int32 [S + 1]
        Where each sequence begins in the packed row; kept for padded batches too.
    max_seqlen : int
        L.
    loss_mask : bool [T] or [S, L]
    logprobs : float32 [T] or [S, L]
        The producer's, aligned to their own token; 0 where loss_mask is False.
    advantages : float32 [T] or [S, L]
        Broadcast from the group, or the producer's own.
    scores : float32 [S]
    instance_ids : list[str], one a sequence
    policy_versions : int64 [S]
    group_sizes : int64 [G]
        Sequences of each group, in order.
    groups : list[shmbus.Group]
        What is acknowledged with the batch.
    layout : "packed" | "padded"
    step : int
        The handler's count of batches, from 0; -1 for one that `pack` made.
    transport : str
        How it came to its device: "cpu", or on a GPU as `trainer_adapter.gpu` says.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    scores: Tensor
    instance_ids: list[str]
    policy_versions: Tensor
    group_sizes: Tensor
    groups: list[shmbus.Group] = field(repr=False)
    layout: Layout = "packed"
    step: int = -1
    transport: str = "cpu"

    @property
    def sequences(self) -> int:
        """S, how many sequences there are."""
        return len(self.instance_ids)

    @property
    def total_tokens(self) -> int:
        """T, the tokens of all sequences, padding not counted."""
        return int(self.cu_seqlens[-1])


class BatchMemory:
    """Blocks of memory for batches, used again, since fresh pages cost more than filling them.

    A block is free when this pool holds the only reference to it: tensors and arrays of a batch
    refer to their block, so one that somebody kept is never written over.
    """

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return a block of at least `size` bytes; its content is arbitrary."""
        blocks = self._blocks
        # References to a free block: the list's, and the argument of getrefcount.
        for position in range(len(blocks)):
            if sys.getrefcount(blocks[position]) == 2 and blocks[position].nbytes >= size:
                return blocks[position]
        block = self.fresh(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
        if len(blocks) >= BLOCKS_KEPT:
            del blocks[0]
        blocks.append(block)
        return block

    def fresh(self, size: int) -> NDArray[np.uint8]:
        """Return a new block of `size` bytes, in huge pages where the system gives them.

        Packing into those is some 5% faster: a batch then needs a page or two, and not hundreds.
        """
        pages = mmap.mmap(-1, size + BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        # Straight from the mapping: of a slice, numpy would hold what it is a slice of.
        start = -np.frombuffer(pages, np.uint8).ctypes.data % BLOCK_BYTES
        return np.frombuffer(pages, np.uint8, count=size, offset=start)


def pack(
    groups: Iterable[shmbus.Group] | shmbus.Group,
    *,
    advantages: Kind = "grpo",
    layout: Layout = "packed",
    device: torch.device | str = "cpu",
    fields: FieldNames | None = None,
    memory: BatchMemory | None = None,
    truncated: Truncated = "keep",
) -> Batch:
    """Gather leased groups into one batch.

    Parameters
    ----------
    groups : shmbus.Group or iterable of them
        Leased, of one Consumer.
    advantages : "grpo" | "dr_grpo" | "rloo" | "none" or callable
        As for `group_advantages`; token-level advantages that a producer sent win.
    layout : "packed" | "padded"
    device : torch.device or str
    fields : FieldNames, optional
        How producers call the arrays.
    memory : BatchMemory, optional
        Where the batch's memory comes from; fresh memory without it.
    truncated : "keep" | "mask"
        "mask" leaves samples that were cut off, as their ``meta["finish_reason"]`` says, out of the
        loss; their scores still count for their groups.

    Returns
    -------
    Batch

    Raises
    ------
    TypeError, ValueError
        Arguments that do not fit; no group; a trajectory without tokens, with fields that do not
        fit together, or with logprobs or advantages that are not finite where the loss mask is
        True.

    Notes
    -----
    A sample whose meta has ``set_advantage_to_zero: True`` gets advantages of 0, whatever else
    was computed or sent; its score still counts for its group.
    """
    chosen = [groups] if isinstance(groups, shmbus.Group) else list(groups)
    if not chosen:
        raise ValueError("pack: expected at least one group, got none")
    check_choices(layout=layout, truncated=truncated)
    check_kind("advantages", advantages)
    check_fields(fields)
    target = check_device(device)
    names = fields or FieldNames()
    trajectories, sizes = bus_gather.members(chosen)
    lengths = bus_gather.sequence_lengths(trajectories, names)
    scores, policy_versions, instance_ids = bus_gather.describe(trajectories)
    total = sum(lengths)
    size = bus_gather.packed_bytes(total, len(lengths))
    block = np.empty(size, np.uint8) if memory is None else memory.take(size)
    arrays = bus_gather.PackedArrays.inside(block, total, len(lengths))
    per_sequence = advantages_for_groups(scores, sizes, advantages)
    finite = bus_gather.gather(trajectories, arrays, per_sequence, names)
    flags = sample_flags(trajectories, truncated)
    if flags is not None:
        apply_flags(flags, arrays)
    if not finite:
        # What was not may have been left out of the loss meanwhile.
        require_finite(arrays, trajectories, names)
    batch = Batch(
        tokens=torch.from_numpy(arrays.tokens),
        position_ids=torch.from_numpy(arrays.position_ids),
        cu_seqlens=torch.from_numpy(arrays.cu_seqlens),
        max_seqlen=max(lengths),
        loss_mask=torch.from_numpy(arrays.loss_mask),
        logprobs=torch.from_numpy(arrays.logprobs),
        advantages=torch.from_numpy(arrays.advantages),
        scores=torch.from_numpy(scores.astype(np.float32)),
        instance_ids=instance_ids,
        policy_versions=torch.from_numpy(policy_versions),
        group_sizes=torch.from_numpy(sizes),
        groups=chosen,
    )
    if layout == "padded":
        pad_batch(batch)
    return batch if target.type == "cpu" else _move(batch, target)


_PER_TOKEN = ("tokens", "position_ids", "loss_mask", "logprobs", "advantages")
_PER_SEQUENCE = ("cu_seqlens", "scores", "policy_versions", "group_sizes")


def pad_batch(batch: Batch) -> None:
    """Spread the packed row over [S, L], wherever it is; the filler is 0 and False."""
    device = batch.tokens.device
    borders = batch.cu_seqlens.to(torch.int64)
    total = len(batch.tokens)
    rows = torch.repeat_interleave(
        torch.arange(batch.sequences, device=device), borders.diff(), output_size=total
    )
    columns = torch.arange(total, device=device) - borders[rows]
    for name in _PER_TOKEN:
        packed: Tensor = getattr(batch, name)
        padded = packed.new_zeros((batch.sequences, batch.max_seqlen))
        padded[rows, columns] = packed
        setattr(batch, name, padded)
    batch.layout = "padded"


def _move(batch: Batch, device: torch.device) -> Batch:
    values: dict[str, Any] = {}
    for name in _PER_TOKEN + _PER_SEQUENCE:
        values[name] = getattr(batch, name).to(device)
    return Batch(**{**batch.__dict__, **values, "transport": "copy"})
