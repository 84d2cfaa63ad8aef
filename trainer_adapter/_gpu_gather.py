"""Leased groups gathered into a packed batch by a kernel that reads the ring itself.

Invariants:

- Nothing here waits for the device but `Pending.finish`.
- What the kernel reads, the ring and the tables, is kept until it is done.
- The values are those of the host's gather, whatever dtypes the records have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.gather import FieldNames, describe
from shmbus.locate import KINDS, ROW_WORDS, GatherTable, plan_gather
from trainer_adapter._cuda import Staging, StagingBlock
from trainer_adapter._finite import not_finite
from trainer_adapter.advantages import Kind, advantages_for_groups
from trainer_adapter.overrides import ZEROED, Truncated, sample_flags
from trainer_adapter.packing import Batch, Layout, pad_batch

__all__ = ["Pending", "begin_gather"]

#: Bytes that parts of one block on the device are aligned to: what vector loads want, and more.
PART_ALIGN: Final = 64
#: Bytes of table that a sequence of up to 20,000 tokens has; longer ones cost a second attempt.
USUAL_TABLE_BYTES: Final = 256
#: Words of a row that are filled in here: flags of `overrides.py`; in the first half of the other,
#: the advantage of a sequence whose tokens bring none.
FLAGS_WORD: Final = 6
GAIN_WORD: Final = 7
#: Of an entry of the table of chunks.
CHUNK_BYTES: Final = 8
#: What the kernel fills, in the order of its arguments.
OUTPUTS: Final = {
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
        Called when it has arrived; raises for what cannot be used.
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
    names = fields or FieldNames()
    trajectories = [t for group in groups for t in group.trajectories]
    sizes = [len(group.trajectories) for group in groups]
    scores, policy_versions, instance_ids = describe(trajectories)
    flags = sample_flags(trajectories, truncated)
    per_sequence = advantages_for_groups(scores, sizes, advantages)
    if flags is not None:
        per_sequence[flags & ZEROED != 0] = 0
    block, table = _plan(trajectories, names, device_shift, staging or Staging(device), len(groups))
    count = len(trajectories)
    rows = block.array[: table.chunks_at].view(np.int64).reshape(count, ROW_WORDS)
    if flags is not None:
        rows[:, FLAGS_WORD] = flags
    rows.view(np.float32)[:, 2 * GAIN_WORD] = per_sequence
    borders = block.array[table.borders_at :][: 4 * (count + 1)].view(np.int32).copy()
    parts = _append(block.array, table.nbytes, scores, policy_versions, sizes)
    there = block.send(parts.end)
    out = {
        name: torch.empty(table.tokens, dtype=dtype, device=device)
        for name, dtype in OUTPUTS.items()
    }
    _launch(there, table, parts.broken_at, out)
    found = torch.empty(2, dtype=torch.int64, pin_memory=device.type == "cuda")
    found.copy_(_part(there, parts.broken_at, 2, torch.int64), non_blocking=True)
    batch = Batch(
        tokens=out["tokens"],
        position_ids=out["position_ids"],
        loss_mask=out["loss_mask"],
        logprobs=out["logprobs"],
        advantages=out["advantages"],
        cu_seqlens=_part(there, table.borders_at, count + 1, torch.int32),
        max_seqlen=table.longest,
        scores=_part(there, parts.scores_at, count, torch.float32),
        instance_ids=instance_ids,
        policy_versions=_part(there, parts.versions_at, count, torch.int64),
        group_sizes=_part(there, parts.sizes_at, len(sizes), torch.int64),
        groups=groups,
        transport="gather",
    )
    if layout == "padded":
        pad_batch(batch)

    def check() -> None:
        _require_finite(found.tolist(), out, names, borders, trajectories)

    return Pending(batch, stream, keep=there, check=check)


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
        at = -(-end // PART_ALIGN) * PART_ALIGN
        places.append(at)
    return _Parts(*places)


def _part(there: Tensor, at: int, length: int, dtype: torch.dtype) -> Tensor:
    return there[at : at + length * dtype.itemsize].view(dtype)


def _launch(there: Tensor, table: GatherTable, broken_at: int, out: dict[str, Tensor]) -> None:
    """Start the kernel, once for all sequences that have the same fields."""
    import triton.language as tl

    from trainer_adapter._gpu_kernel import CHUNK_TOKENS, WARPS, pack_records

    # As numpy's kinds; a bool is a byte, and one that is missing has any type.
    types = {
        "b1": tl.int8, "i1": tl.int8, "u1": tl.uint8, "i2": tl.int16, "u2": tl.uint16,
        "i4": tl.int32, "u4": tl.uint32, "i8": tl.int64, "u8": tl.uint64,
        "f4": tl.float32, "f8": tl.float64,
    }  # fmt: skip
    broken = _part(there, broken_at, 2, torch.int64)
    for first, count, kinds in table.launches:
        tokens, mask, logprobs, advantages = (
            types[KINDS[kind].str[1:]] if kind >= 0 else tl.int8 for kind in kinds
        )
        pack_records[(count,)](
            there,
            table.chunks_at + first * CHUNK_BYTES,
            *out.values(),
            broken,
            TOKENS=tokens,
            MASK=mask,
            LOGPROBS=logprobs,
            ADVANTAGES=advantages,
            HAS_MASK=kinds[1] >= 0,
            HAS_LOGPROBS=kinds[2] >= 0,
            HAS_ADVANTAGES=kinds[3] >= 0,
            WORDS=ROW_WORDS,
            CHUNK=CHUNK_TOKENS,
            NOWHERE=NOWHERE,
            num_warps=WARPS,
        )


def _require_finite(
    found: list[int],
    out: dict[str, Tensor],
    names: FieldNames,
    borders: NDArray[np.int32],
    trajectories: list[shmbus.Trajectory],
) -> None:
    for token, column, name in zip(
        found, ("logprobs", "advantages"), (names.logprobs, names.advantages), strict=True
    ):
        if token != NOWHERE:
            value = float(out[column][token])
            raise not_finite(name, token, value, borders, trajectories)
