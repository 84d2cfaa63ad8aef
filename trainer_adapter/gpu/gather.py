"""Packing of leased groups by a kernel that reads the ring itself.

A batch is one block of memory on the device, filled by one launch: the table lies in pinned memory,
for the kernel to read and to report to. Small batches wait for the host, and each allocation, copy
and view costs some of its time.

Invariants:

- Only `Pending.finish` waits for the device.
- The ring and the tables are kept until the kernel's reads end.
- The values equal the host's gather, for records of any dtype.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from shmbus.batch.gather import PackPlan
from shmbus.batch.kernel_table import CHUNK_WORDS, COPY_WORDS, KernelTable, kernel_table
from shmbus.batch.uninterrupted import finalizer
from trainer_adapter.batches.batch import PER_TOKEN, Batch, Layout, padded
from trainer_adapter.batches.finite import SampleError, is_logprob, not_finite, wrong_mask
from trainer_adapter.batches.pack import BatchPlan
from trainer_adapter.gpu.memory import Staging, StagingBlock

#: The parts of a block are rounded up to this many tokens: they begin on multiples of as many
#: bytes, more than vector loads need.
PART_TOKENS: Final = 64
#: Field kinds of a launch without token fields.
NO_FIELDS: Final = (0, -1, -1, -1)
#: Dtypes of a batch's tensors; int64 by default.
TYPES: Final = {
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "advantages": torch.float32,
    "cu_seqlens": torch.int32,
    "scores": torch.float32,
}
#: Argument of an event for sleeping waits, without spinning.
BLOCKING: Final = True


class Pending:
    """A batch in flight to the device."""

    def __init__(
        self,
        batch: Batch,
        stream: torch.cuda.Stream | None,
        keep: object = None,
        check: Callable[[], None] | None = None,
        done: torch.cuda.Event | None = None,
    ) -> None:
        self._done = done
        self._batch = batch
        self._keep = keep
        self._check = check
        if stream is not None:
            if done is None:
                done = self._done = torch.cuda.Event(blocking=BLOCKING)  # type: ignore[no-untyped-call]
            done.record(stream)

    def finish(self) -> Batch:
        """Wait until the batch reaches the device, and return it."""
        self._wait()
        if self._check is not None:
            self._check()
            self._check = None
        return self._batch

    def _wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()
        self._done = None  # another batch reuses the event

    @finalizer
    def __del__(self) -> None:
        # The kernel's memory must not be reused before the end of its reads.
        if not sys.is_finalizing():
            self._wait()


def begin_gather(
    plan: BatchPlan,
    device: torch.device,
    *,
    stream: torch.cuda.Stream | None = None,
    device_shift: int = 0,
    staging: Staging | None = None,
    layout: Layout = "packed",
) -> Pending:
    """Copy the samples of a plan by the kernel, on the current stream."""
    assert plan.rows is None, "the kernel packs a record as one sequence"
    staging = staging or Staging(device)
    samples = plan.samples
    chunk_tokens = _kernel().CHUNK_TOKENS
    block = staging.take(samples.table_bytes(chunk_tokens))
    table = kernel_table(
        samples,
        block.array,
        shift=device_shift,
        chunk_tokens=chunk_tokens,
        advantages=plan.advantages,
        flags=plan.flags,
    )
    blocks = [block]
    try:
        there = _launch(block, table, samples, device)
        extras = None
        if plan.extras.arrays or plan.extras.metas:
            extras = _copy_extras(plan, device, device_shift, blocks, staging)
        tensors = there.tensors()
        newest = tensors["policy_versions"]
        if not np.array_equal(samples.samples[1], samples.samples[2]):
            newest = torch.from_numpy(samples.samples[2].copy()).to(device)
        batch = plan.batch(tensors, extras, newest_policy_versions=newest, transport="gather")
        if layout == "padded":
            batch = padded(batch)

        def check() -> None:
            found = block.longs[table.found_at // 8 :][:2].view(np.int32)[:3].tolist()
            if any(found):
                raise _wrong_value(found, there, plan)
            for one in blocks:
                staging.give_back(one)

        return Pending(batch, stream, check=check, done=block.done)
    except BaseException:
        # The kernel may read the block already.
        if stream is not None:
            stream.synchronize()
        raise


class _Block:
    """Device memory of a batch: the table's known part unchanged, and its tokens."""

    def __init__(self, table: KernelTable, samples: PackPlan, device: torch.device) -> None:
        self._table, self._samples = table, samples
        tokens = table.chunks_at - table.borders_at
        wide = -samples.total // PART_TOKENS * -PART_TOKENS
        position_ids = tokens + wide * 8
        loss_mask = position_ids + wide * 8
        logprobs = loss_mask + wide
        advantages = logprobs + wide * 4
        #: Start of each part, in the kernel's order.
        self.places = 0, tokens, position_ids, loss_mask, logprobs, advantages
        self.memory = torch.empty(advantages + wide * 4, dtype=torch.uint8, device=device)

    def tensors(self) -> dict[str, Tensor]:
        names = (*PER_TOKEN, "cu_seqlens", "scores", "policy_versions", "group_sizes")
        return {name: self.view(name) for name in names}

    def view(self, name: str) -> Tensor:
        table, samples = self._table, self._samples
        total, sequences = samples.total, len(samples.instance_ids)
        if name in PER_TOKEN:
            at = self.places[1 + PER_TOKEN.index(name)]
            return self._part(at, TYPES.get(name, torch.int64), total)
        at, count = {
            "cu_seqlens": (table.borders_at, sequences + 1),
            "scores": (table.scores_at, sequences),
            "policy_versions": (table.versions_at, sequences),
            "group_sizes": (table.sizes_at, len(samples.sizes)),
        }[name]
        return self._part(at - table.borders_at, TYPES.get(name, torch.int64), count)

    def _part(self, at: int, dtype: torch.dtype, count: int) -> Tensor:
        first = at // dtype.itemsize
        return self.memory.view(dtype)[first : first + count]


def _launch(
    block: StagingBlock, table: KernelTable, samples: PackPlan, device: torch.device
) -> _Block:
    launch = _kernel().launch
    there = _Block(table, samples, device)
    # The first launch also copies the facts; a batch without tokens has a launch for them alone.
    words = (table.chunks_at - table.borders_at) // 4
    for first, chunks, kinds in table.launches or [(0, 0, NO_FIELDS)]:
        of_table = table.chunks_at + first * CHUNK_WORDS * 8, table.found_at, table.borders_at
        launch(kinds, chunks, words, block.host, of_table, there.memory, there.places)
        words = 0
    return there


@functools.cache
def _kernel() -> Any:
    """Import the Triton parts on first use."""
    from trainer_adapter.gpu import kernel

    return kernel


def _wrong_value(found: list[int], there: _Block, plan: BatchPlan) -> SampleError:
    """Make the error for the first wrong value that the kernel found."""
    trajectories, names = plan.samples.trajectories, plan.names
    if found[0] and (error := wrong_mask(trajectories, names)) is not None:
        return error
    column, name = ("logprobs", names.logprobs) if found[1] else ("advantages", names.advantages)
    values, borders = there.view(column), there.view("cu_seqlens")
    good = is_logprob(values) if column == "logprobs" else torch.isfinite(values)
    token = int(good.logical_not().nonzero()[0])
    return not_finite(name, token, float(values[token]), borders.tolist(), trajectories)


#: Bytes of a program's copy: enough for some warps, and few enough for many programs.
CHUNK_BYTES: Final = 16_384
CHUNK_ENTRY_BYTES: Final = COPY_WORDS * 8


def _copy_extras(
    plan: BatchPlan, device: torch.device, shift: int, blocks: list[StagingBlock], staging: Staging
) -> Tensor:
    """Start the copies of extra fields, on the current stream."""
    from trainer_adapter.gpu.kernel import launch_copy

    measured = plan.extras
    # Rows of a sample without an optional field are not copied.
    make = torch.zeros if measured.lacking else torch.empty
    there = make(measured.nbytes, dtype=torch.uint8, device=device)
    if not measured.arrays:
        return there
    # At most one partial chunk per sample and field.
    fields = len(plan.samples.instance_ids) * len(measured.arrays)
    most = measured.nbytes // CHUNK_BYTES + fields
    block = staging.take(most * CHUNK_ENTRY_BYTES)
    blocks.append(block)
    places = measured.places()
    memory = block.array[: most * CHUNK_ENTRY_BYTES].view(np.int64)
    chunks, launches = plan.samples.copy_table(places, memory, shift, CHUNK_BYTES)
    assert chunks <= most, f"{chunks} chunks of extra fields, at most {most} expected"
    for (first, count), (_, width) in zip(launches, places, strict=True):
        if count:
            launch_copy(block.host, first * CHUNK_ENTRY_BYTES, count, width, there)
    return there
