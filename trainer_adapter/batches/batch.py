"""Batch: the tensors of one training step, in packed rows or padded ones.

Invariants:

- A batch holds whole groups, each with its samples ordered by index.
- `cu_seqlens` says where each sequence begins in the packed row, in either layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

import shmbus

__all__ = ["Batch", "Layout", "UnseenBatch", "copy_to_device", "pad_batch"]

Layout = Literal["packed", "padded"]

#: Tensors of a batch with an element a token, and those with one a sequence or a group.
PER_TOKEN: Final = ("tokens", "position_ids", "loss_mask", "logprobs", "advantages")
PER_SEQUENCE: Final = ("cu_seqlens", "scores", "policy_versions", "group_sizes")


@dataclass(eq=False, repr=False)
class Batch:
    """One batch of whole groups. T tokens in S sequences, the longest of L tokens.

    Its tensors may share one block of memory, which lives as long as any of them. `clone` a tensor
    that you keep longer than the rest.

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
    logprobs : float32 [T] or [S, L], or None
        The producer's, aligned to their own token; 0 where loss_mask is False. None where the
        groups have none, or where ``FieldNames(logprobs=None)`` says that none are read.
    advantages : float32 [T] or [S, L]
        Broadcast from the group, or the producer's own.
    scores : float32 [S]
    instance_ids : list[str], one a sequence
    policy_versions : int64 [S]
    group_sizes : int64 [G]
        Sequences of each group, in order.
    groups : list[shmbus.Group]
        The leased groups, which `OnlineDataHandler.ack` acknowledges together.
    layout : "packed" | "padded"
    step : int
        The handler's count of batches, from 0; -1 for one that `pack` made.
    transport : str
        How it was moved to its device: "cpu", "gather", "pinned" or "copy" (`GpuPacker`).
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
    group_sizes: Tensor
    groups: list[shmbus.Group]
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

    def __repr__(self) -> str:
        step = "" if self.step < 0 else f" step {self.step}"
        return (
            f"<Batch{step}: {len(self.groups)} groups, {self.sequences} sequences, "
            f"{self.total_tokens} tokens, {self.layout} on {self.tokens.device}"
            f"{', without logprobs' if self.logprobs is None else ''}>"
        )


class UnseenBatch(Batch):
    """A batch on its way to the trainer, at which nobody has looked; then it is a `Batch`."""

    def __getattribute__(self, name: str) -> Any:
        self.__class__ = Batch  # type: ignore[assignment]
        return object.__getattribute__(self, name)


def pad_batch(batch: Batch) -> None:
    """Turn a packed batch into a padded one, in place, on its device.

    Parameters
    ----------
    batch : Batch
        Packed. Its tensors [T] become [S, L]; the filler is 0 and False.
    """
    device = batch.tokens.device
    borders = batch.cu_seqlens.to(torch.int64)
    total = len(batch.tokens)
    rows = torch.repeat_interleave(
        torch.arange(batch.sequences, device=device), borders.diff(), output_size=total
    )
    columns = torch.arange(total, device=device) - borders[rows]
    for name in PER_TOKEN:
        packed: Tensor | None = getattr(batch, name)
        if packed is None:
            continue
        padded = packed.new_zeros((batch.sequences, batch.max_seqlen))
        padded[rows, columns] = packed
        setattr(batch, name, padded)
    batch.layout = "padded"


def copy_to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of a batch on another device, with the same groups.

    Parameters
    ----------
    batch : Batch
    device : torch.device

    Returns
    -------
    Batch
        Its `transport` is "copy".
    """
    values: dict[str, Any] = {}
    for name in PER_TOKEN + PER_SEQUENCE:
        value: Tensor | None = getattr(batch, name)
        values[name] = None if value is None else value.to(device)
    return Batch(**{**batch.__dict__, **values, "transport": "copy"})
