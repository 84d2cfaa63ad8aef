"""Leased groups gathered into a packed batch by a kernel that reads the ring itself.

A batch is one block of memory on the device: the kernel's table and all that it fills. The host's
time a batch is what small ones wait for, and each allocation and each copy costs some of it.

Invariants:

- Nothing here waits for the device but `Pending.finish`.
- What the kernel reads, the ring and the tables, is kept until it is done.
- The values are those of the host's gather, whatever dtypes the records have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.gather import FieldNames, describe
from shmbus.locate import ROW_WORDS, GatherTable, plan_gather
from trainer_adapter._cuda import Staging, StagingBlock
from trainer_adapter._finite import not_finite
from trainer_adapter.advantages import Kind, advantages_for_groups
from trainer_adapter.overrides import ZEROED, Truncated, sample_flags
from trainer_adapter.packing import Batch, Layout, pad_batch

__all__ = ["Pending", "begin_gather"]

#: Bytes that parts of a block are aligned to: what vector loads want, and more.
PART_ALIGN: Final = 64
#: Bytes of table that a sequence of up to 20,000 tokens has; longer ones cost a second attempt.
USUAL_TABLE_BYTES: Final = 256
#: Words of a row that are filled in here: flags of `overrides.py`; in the first half of the other,
#: the advantage of a sequence whose tokens bring none.
FLAGS_WORD: Final = 6
GAIN_WORD: Final = 7
#: What the kernel fills, a token each, in the order of its arguments.
COLUMNS: Final = {
    "tokens": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "advantages": torch.float32,
}
#: What an event is created with so that a thread that waits for it sleeps instead of spinning.
BLOCKING: Final = True
#: No token is at this position: "nothing is broken", for the kernel's minimum.
NOWHERE: Final = 2**62
#: What the kernel lowers: the first token whose logprob, and whose advantage, is not finite.
NOTHING_BROKEN: Final = (NOWHERE, NOWHERE)


class Pending:
    """A batch on its way to the device.

    Parameters
    ----------
    batch : Batch
        Its tensors are being filled.
    stream : torch.cuda.Stream or None
        Where that happens; None where it has happened already.
    keep : object
        What must not go away before.
    check : callable, optional
        Called when it has arrived, until it returns; raises for what cannot be used.
    """

    def __init__(
        self,
        batch: Batch,
        stream: torch.cuda.Stream | None,
        keep: object = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._batch = batch
        self._keep = keep
        self._check = check
        self._done = (
            None
            if stream is None
            else torch.cuda.Event(  # type: ignore[no-untyped-call]
                blocking=BLOCKING
            )
        )
        if self._done is not None:
            self._done.record(stream)

    @property
    def arrived(self) -> bool:
        """Whether `finish` would not wait."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def finish(self) -> Batch:
        """Wait until it has arrived, sleeping, and return it.

        Raises
        ------
        ValueError
            A logprob or an advantage is not finite where the loss mask is True.
        """
        if self._done is not None:
            self._done.synchronize()
        if self._check is not None:
            self._check()
            self._check = None
        return self._batch


def begin_gather(
    groups: list[shmbus.Group],
    device: torch.device,
    *,
    stream: torch.cuda.Stream | None = None,
    device_shift: int = 0,
    staging: Staging | None = None,
    advantages: Kind = "grpo",
    layout: Layout = "packed",
    fields: FieldNames | None = None,
    truncated: Truncated = "keep",
) -> Pending:
    """Pack leased groups by the kernel, on the current stream.

    Parameters
    ----------
    groups : list[shmbus.Group]
        Leased, of one Consumer whose ring the device can read; at least one.
    device : torch.device
    stream : torch.cuda.Stream or None
        The current stream; None on a device that has none.
    device_shift : int
        What an address in this process is off from the device's.
    staging : Staging, optional
        Where tables are made; memory of its own without it.
    advantages, layout, fields, truncated
        As for `pack`.

    Returns
    -------
    Pending

    Raises
    ------
    ValueError
        As for `pack`; what is not finite, only when it is finished.
    """
    from trainer_adapter._gpu_kernel import launch

    names = fields or FieldNames()
    staging = staging or Staging(device)
    members = [group.trajectories for group in groups]
    trajectories = list(itertools.chain.from_iterable(members))
    sizes = list(map(len, members))
    scores, policy_versions, instance_ids = describe(trajectories)
    flags = sample_flags(trajectories, truncated)
    per_sequence = advantages_for_groups(scores, sizes, advantages)
    if flags is not None:
        per_sequence[flags & ZEROED != 0] = 0
    block, table = _plan(trajectories, names, device_shift, staging, len(groups))
    count = len(trajectories)
    rows = block.array[: table.chunks_at].view(np.int64).reshape(count, ROW_WORDS)
    if flags is not None:
        rows[:, FLAGS_WORD] = flags
    rows.view(np.float32)[:, 2 * GAIN_WORD] = per_sequence
    parts = _append(block.array, table.nbytes, scores, policy_versions, sizes)
    there, views = _on_device(block.host, table, parts, len(sizes), device)
    outputs = [views[name] for name in COLUMNS] + [views.pop("broken")]
    for first, chunks, kinds in table.launches:
        launch(kinds, first, chunks, there, table.chunks_at, outputs, NOWHERE)
    # Back to where it came from: the block is not used again before it was looked at.
    found = parts.broken_at, parts.scores_at - parts.broken_at
    block.host.narrow(0, *found).copy_(there.narrow(0, *found), non_blocking=True)
    batch = Batch(
        **views,
        max_seqlen=table.longest,
        instance_ids=instance_ids,
        groups=groups,
        transport="gather",
    )
    columns = batch.logprobs, batch.advantages
    if layout == "padded":
        pad_batch(batch)

    def check() -> None:
        _require_finite(block.array, table, parts, columns, names, trajectories)
        staging.give_back(block)

    return Pending(batch, stream, check=check)


def _plan(
    trajectories: list[shmbus.Trajectory],
    names: FieldNames,
    device_shift: int,
    staging: Staging,
    groups: int,
) -> tuple[StagingBlock, GatherTable]:
    """Make the kernel's table in a block that has room for what is appended to it."""
    from trainer_adapter._gpu_kernel import CHUNK_TOKENS

    appended = len(trajectories) * 12 + groups * 8 + 5 * PART_ALIGN
    block = staging.take(len(trajectories) * USUAL_TABLE_BYTES + appended)
    while True:
        table = plan_gather(
            trajectories, names, block.array, shift=device_shift, chunk_tokens=CHUNK_TOKENS
        )
        if table.nbytes + appended <= block.array.nbytes:
            return block, table
        block = staging.take(table.nbytes + appended)


class _Parts(NamedTuple):
    """Where in the block lies what is not the kernel's table."""

    versions_at: int
    sizes_at: int
    broken_at: int
    scores_at: int
    end: int


def _append(
    block: NDArray[np.uint8],
    at: int,
    scores: NDArray[np.float64],
    policy_versions: NDArray[np.int64],
    sizes: list[int],
) -> _Parts:
    """Put what a batch says of its sequences and groups behind the table."""
    places = [at]
    for values, dtype in (
        (policy_versions, np.int64), (sizes, np.int64), (NOTHING_BROKEN, np.int64),
        (scores, np.float32),
    ):  # fmt: skip
        end = at + len(values) * np.dtype(dtype).itemsize
        block[at:end].view(dtype)[:] = values
        at = _aligned(end)
        places.append(at)
    return _Parts(*places)


def _aligned(at: int) -> int:
    return -(-at // PART_ALIGN) * PART_ALIGN


def _on_device(
    host: Tensor, table: GatherTable, parts: _Parts, groups: int, device: torch.device
) -> tuple[Tensor, dict[str, Any]]:
    """Send the table and what is behind it; return the block there, and the views of its parts."""
    count = table.chunks_at // (ROW_WORDS * 8)
    places = {
        "cu_seqlens": (table.borders_at, count + 1, torch.int32),
        "policy_versions": (parts.versions_at, count, torch.int64),
        "group_sizes": (parts.sizes_at, groups, torch.int64),
        "broken": (parts.broken_at, len(NOTHING_BROKEN), torch.int64),
        "scores": (parts.scores_at, count, torch.float32),
    }
    end = parts.end
    for name, dtype in COLUMNS.items():
        places[name] = (end, table.tokens, dtype)
        end = _aligned(end + table.tokens * dtype.itemsize)
    there = torch.empty(end, dtype=torch.uint8, device=device)
    there.narrow(0, 0, parts.end).copy_(host.narrow(0, 0, parts.end), non_blocking=True)
    typed = {dtype: there.view(dtype) for dtype in {dtype for _, _, dtype in places.values()}}
    return there, {
        name: typed[dtype].narrow(0, at // dtype.itemsize, length)
        for name, (at, length, dtype) in places.items()
    }


def _require_finite(
    host: NDArray[np.uint8],
    table: GatherTable,
    parts: _Parts,
    columns: tuple[Tensor, Tensor],
    names: FieldNames,
    trajectories: list[shmbus.Trajectory],
) -> None:
    found = host[parts.broken_at : parts.scores_at].view(np.int64)[: len(NOTHING_BROKEN)].tolist()
    for token, column, name in zip(found, columns, (names.logprobs, names.advantages), strict=True):
        if token != NOWHERE:
            borders = host[table.borders_at :][: 4 * (len(trajectories) + 1)].view(np.int32)
            raise not_finite(name, token, float(column[token]), borders, trajectories)
