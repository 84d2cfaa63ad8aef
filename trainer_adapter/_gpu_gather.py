"""Leased groups gathered into a packed batch by a kernel that reads the ring itself.

Invariants:

- Nothing here waits for the device but `Pending.finish`.
- What the kernel reads, the ring and the tables, is kept until it is done.
- The values are those of the host's gather, whatever dtypes the records have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.gather import FieldNames, describe
from shmbus.locate import KINDS, Places, locate
from trainer_adapter._finite import not_finite
from trainer_adapter.advantages import Kind, advantages_for_groups
from trainer_adapter.overrides import ZEROED, Truncated, sample_flags
from trainer_adapter.packing import Batch, Layout, pad_batch

__all__ = ["Pending", "begin_gather"]

#: Bytes that parts of one block on the device are aligned to: what vector loads want, and more.
PART_ALIGN: Final = 64
#: What an event is created with so that a thread that waits for it sleeps instead of spinning.
BLOCKING: Final = True
#: No token is at this position: "nothing is broken", for the kernel's minimum.
NOWHERE: Final = 2**62


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
    places = locate(trajectories, names)
    total = int(places.lengths.sum())
    if total > np.iinfo(np.int32).max:
        raise ValueError(
            f"a batch of {total} tokens is more than int32 cu_seqlens can index; lower "
            "tokens_per_batch"
        )
    sizes = np.array([len(group.trajectories) for group in groups], np.int64)
    scores, policy_versions, instance_ids = describe(trajectories)
    borders = np.zeros(len(trajectories) + 1, np.int32)
    np.cumsum(places.lengths, out=borders[1:])
    flags = sample_flags(trajectories, truncated)
    per_sequence = advantages_for_groups(scores, sizes, advantages)
    if flags is not None:
        per_sequence[flags & ZEROED != 0] = 0
    tables, plan = _tables(places, device_shift, flags)
    small: list[NDArray[Any]] = [
        per_sequence,
        borders,
        scores.astype(np.float32),
        policy_versions,
        sizes,
    ]
    sent, block = _to_device(device, [*tables, *small])
    rows, chunks, broken, gains, cu_seqlens, device_scores, versions, group_sizes = sent
    out = {
        "tokens": torch.empty(total, dtype=torch.int64, device=device),
        "position_ids": torch.empty(total, dtype=torch.int64, device=device),
        "loss_mask": torch.empty(total, dtype=torch.bool, device=device),
        "logprobs": torch.empty(total, dtype=torch.float32, device=device),
        "advantages": torch.empty(total, dtype=torch.float32, device=device),
    }
    _launch(rows, gains, chunks, out, broken, plan)
    found = torch.empty(2, dtype=torch.int64, pin_memory=device.type == "cuda")
    found.copy_(broken, non_blocking=True)
    batch = Batch(
        tokens=out["tokens"],
        position_ids=out["position_ids"],
        loss_mask=out["loss_mask"],
        logprobs=out["logprobs"],
        advantages=out["advantages"],
        cu_seqlens=cu_seqlens,
        max_seqlen=int(places.lengths.max()),
        scores=device_scores,
        instance_ids=instance_ids,
        policy_versions=versions,
        group_sizes=group_sizes,
        groups=groups,
        transport="gather",
    )
    if layout == "padded":
        pad_batch(batch)

    def check() -> None:
        _require_finite(found.tolist(), out, names, borders, trajectories)

    return Pending(batch, stream, keep=(block, sent), check=check)


class _Launch:
    """One launch: chunks that lie behind each other, of records whose fields have these dtypes."""

    def __init__(self, first: int, count: int, kinds: tuple[int, ...]) -> None:
        self.first = first
        self.count = count
        self.kinds = kinds


def _tables(
    places: Places, device_shift: int, flags: NDArray[np.uint8] | None
) -> tuple[list[NDArray[Any]], list[_Launch]]:
    """Make the kernel's tables: rows, chunks, and what it reports into; and the launches."""
    from trainer_adapter._gpu_kernel import CHUNK_TOKENS, ROW_COLUMNS

    lengths = places.lengths
    rows = np.zeros((len(lengths), ROW_COLUMNS), np.int64)
    np.add(places.offsets, places.base + device_shift, out=rows[:, :4])
    rows[:, 4] = lengths
    np.cumsum(lengths[:-1], out=rows[1:, 5])
    if flags is not None:
        rows[:, 6] = flags
    # Sequences of like dtypes behind each other; nearly always that is all of them.
    order = np.arange(len(lengths))
    borders = [0, len(lengths)]
    if not (places.kinds == places.kinds[0]).all():
        order = np.lexsort(places.kinds.T)
        differ = (np.diff(places.kinds[order], axis=0) != 0).any(axis=1)
        borders = [0, *(np.flatnonzero(differ) + 1).tolist(), len(lengths)]
    counts = -(-lengths[order] // CHUNK_TOKENS)
    ends = np.cumsum(counts)
    chunks = np.empty((int(ends[-1]), 2), np.int32)
    chunks[:, 0] = np.repeat(order, counts)
    chunks[:, 1] = (np.arange(len(chunks)) - np.repeat(ends - counts, counts)) * CHUNK_TOKENS
    plan = []
    for low, high in itertools.pairwise(borders):
        first = int(ends[low] - counts[low])
        kinds = tuple(places.kinds[order[low]].tolist())
        plan.append(_Launch(first, int(ends[high - 1]) - first, kinds))
    broken = np.full(2, NOWHERE, np.int64)
    return [rows, chunks, broken], [launch for launch in plan if launch.count]


def _to_device(device: torch.device, arrays: list[NDArray[Any]]) -> tuple[list[Tensor], Tensor]:
    """Copy small arrays to the device as one block, which is returned too: it is still read."""
    places = [0]
    for array in arrays:
        places.append(places[-1] + -(-array.nbytes // PART_ALIGN) * PART_ALIGN)
    block = torch.empty(places[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = block.numpy()
    for array, at in zip(arrays, places, strict=False):
        host[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = block.to(device, non_blocking=True)
    sent = [
        there[at : at + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, at in zip(arrays, places, strict=False)
    ]
    return sent, block


_TORCH_DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def _launch(
    rows: Tensor,
    gains: Tensor,
    chunks: Tensor,
    out: dict[str, Tensor],
    broken: Tensor,
    plan: list[_Launch],
) -> None:
    import triton.language as tl

    from trainer_adapter._gpu_kernel import CHUNK_TOKENS, ROW_COLUMNS, WARPS, pack_records

    # As numpy's kinds; a bool is a byte, and one that is missing has any type.
    types = {
        "b1": tl.int8, "i1": tl.int8, "u1": tl.uint8, "i2": tl.int16, "u2": tl.uint16,
        "i4": tl.int32, "u4": tl.uint32, "i8": tl.int64, "u8": tl.uint64,
        "f4": tl.float32, "f8": tl.float64,
    }  # fmt: skip
    for launch in plan:
        tokens, mask, logprobs, advantages = (
            types[KINDS[kind].str[1:]] if kind >= 0 else tl.int8 for kind in launch.kinds
        )
        pack_records[(launch.count,)](
            rows,
            gains,
            chunks[launch.first :],
            out["tokens"],
            out["position_ids"],
            out["loss_mask"].view(torch.uint8),
            out["logprobs"],
            out["advantages"],
            broken,
            TOKENS=tokens,
            MASK=mask,
            LOGPROBS=logprobs,
            ADVANTAGES=advantages,
            HAS_MASK=launch.kinds[1] >= 0,
            HAS_LOGPROBS=launch.kinds[2] >= 0,
            HAS_ADVANTAGES=launch.kinds[3] >= 0,
            COLUMNS=ROW_COLUMNS,
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
