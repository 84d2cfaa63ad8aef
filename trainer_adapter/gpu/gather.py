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
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.batch.extra_fields import COPY_WORDS, plan_extras
from shmbus.batch.gather import FieldNames, members
from shmbus.batch.gather_plan import CHUNK_WORDS, GatherTable, plan_gather
from trainer_adapter.advantages import Kind
from trainer_adapter.batches.batch import PER_TOKEN, Batch, BatchFacts, Layout, pad_batch
from trainer_adapter.batches.columns import add_columns, column_names
from trainer_adapter.batches.extra_fields import (
    ExtraFields,
    GivenExtraFields,
    MeasuredExtras,
    of_groups,
)
from trainer_adapter.batches.finite import is_logprob, not_finite
from trainer_adapter.batches.pack import compared_scores
from trainer_adapter.batches.sample_flags import (
    IsOld,
    Stale,
    Truncated,
    Withholding,
    request_words,
    sample_flags,
)
from trainer_adapter.gpu.memory import Staging, StagingBlock

__all__ = ["Pending", "SeveralRowsError", "begin_gather", "copy_extras"]

#: The parts of a block are rounded up to this many tokens: they begin on multiples of as many
#: bytes, more than vector loads need.
PART_TOKENS: Final = 64
#: Bytes of table for a sequence of up to 4,000 tokens; longer ones need a second attempt.
USUAL_TABLE_BYTES: Final = 160
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


class SeveralRowsError(ValueError):
    """A sample put with rows: the kernel cannot make a sequence per row."""


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

    @property
    def arrived(self) -> bool:
        """True if `finish` would not wait."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

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

    def __del__(self) -> None:
        # The kernel's memory must not be reused before the end of its reads.
        if not sys.is_finalizing():
            self._wait()


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
    stale: Stale = "drop",
    is_old: IsOld | None = None,
    extra_fields: GivenExtraFields | ExtraFields | None = None,
) -> Pending:
    """Pack leased groups by the kernel, on the current stream."""
    names = fields or FieldNames()
    staging = staging or Staging(device)
    withholding = Withholding(truncated, stale, is_old)
    told = names, device_shift, compared_scores(groups, advantages, names, withholding)
    block, table = _plan(groups, staging, *told, request_words(truncated))
    if table.mentions or is_old is not None:
        flags = sample_flags(members(groups)[0], withholding)
        if flags is not None:
            staging.give_back(block)
            block, table = _plan(groups, staging, *told, flags=flags)
    if table.has_rows:
        staging.give_back(block)
        raise SeveralRowsError(
            "gather: expected single-row samples, got a sample put with rows=; the kernel packs a "
            "record as one sequence: use trainer_adapter.pack, or transport='copy'"
        )
    facts = _facts(table)
    blocks = [block]
    try:
        there = _launch(block, table, device)
        batch = Batch.of_facts(
            facts,
            **there.tensors(),
            max_seqlen=table.longest,
            instance_ids=table.instance_ids,
            groups=groups,
            transport="gather",
        )
        wanted = ExtraFields.of(extra_fields)
        if wanted is not None:
            asked = facts.lengths.tolist(), wanted, device, device_shift
            vars(batch).update(copy_extras(groups, *asked, blocks, staging))
            of_groups(batch.extra_offsets, batch.extra_kinds, facts.group_sizes)
        newest = batch.policy_versions
        if table.has_spans:
            newest = torch.tensor(facts.newest_policy_versions).to(device)
        batch.newest_policy_versions = newest
        if not table.has_logprobs:
            batch.logprobs = None
        add_columns(batch, groups, wanted)
        if layout == "padded":
            pad_batch(batch)

        def check() -> None:
            if block.longs[table.found_at // 8]:
                _raise_not_finite(block, table, there, names, groups)
            for one in blocks:
                staging.give_back(one)

        return Pending(batch, stream, check=check, done=block.done)
    except BaseException:
        # The kernel may read the block already.
        if stream is not None:
            stream.synchronize()
        raise


def _facts(table: GatherTable) -> BatchFacts:
    """Return the batch's facts on the host."""
    known = np.frombuffer(table.known, np.int64)
    of_samples = 4 * len(table.instance_ids)
    return BatchFacts(known[:of_samples].reshape(4, -1), known[of_samples:], table.tokens)


def _plan(
    groups: list[shmbus.Group],
    staging: Staging,
    names: FieldNames,
    shift: int,
    advantages: NDArray[np.float32],
    words: tuple[bytes, ...] = (),
    flags: NDArray[np.uint8] | None = None,
) -> tuple[StagingBlock, GatherTable]:
    """Make the kernel's table in a sufficiently large block."""
    block = staging.take(len(groups) * groups[0].size * USUAL_TABLE_BYTES)
    while True:
        table = plan_gather(
            groups,
            names,
            block.array,
            shift=shift,
            chunk_tokens=_kernel().CHUNK_TOKENS,
            advantages=advantages,
            flags=flags,
            words=words,
        )
        if table.nbytes <= block.array.nbytes:
            return block, table
        block = staging.take(table.nbytes)


class _Block:
    """Device memory of a batch: the table's known part unchanged, and its tokens."""

    def __init__(self, table: GatherTable, device: torch.device) -> None:
        self._table = table
        tokens = table.chunks_at - table.borders_at
        wide = -table.tokens // PART_TOKENS * -PART_TOKENS
        position_ids = tokens + wide * 8
        loss_mask = position_ids + wide * 8
        logprobs = loss_mask + wide
        advantages = logprobs + wide * 4
        #: Start of each part, in the kernel's order.
        self.places = 0, tokens, position_ids, loss_mask, logprobs, advantages
        self.memory = torch.empty(advantages + wide * 4, dtype=torch.uint8, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch in this block."""
        names = (*PER_TOKEN, "cu_seqlens", "scores", "policy_versions", "group_sizes")
        return {name: self.view(name) for name in names}

    def view(self, name: str) -> Tensor:
        """Return a tensor of the batch by its name."""
        table, total, sequences = self._table, self._table.tokens, len(self._table.instance_ids)
        if name in PER_TOKEN:
            at = self.places[1 + PER_TOKEN.index(name)]
            return self._part(at, TYPES.get(name, torch.int64), total)
        at, count = {
            "cu_seqlens": (table.borders_at, sequences + 1),
            "scores": (table.scores_at, sequences),
            "policy_versions": (table.versions_at, sequences),
            "group_sizes": (table.sizes_at, len(table.known) // 8 - 4 * sequences),
        }[name]
        return self._part(at - table.borders_at, TYPES.get(name, torch.int64), count)

    def _part(self, at: int, dtype: torch.dtype, count: int) -> Tensor:
        first = at // dtype.itemsize
        return self.memory.view(dtype)[first : first + count]


def _launch(block: StagingBlock, table: GatherTable, device: torch.device) -> _Block:
    """Launch the kernel on a new block of the device."""
    launch = _kernel().launch
    there = _Block(table, device)
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


def _raise_not_finite(
    block: StagingBlock,
    table: GatherTable,
    there: _Block,
    names: FieldNames,
    groups: list[shmbus.Group],
) -> None:
    """Raise an error with value and sample, if the kernel found a non-finite value in use."""
    found = block.longs[table.found_at // 8 :][:1].view(np.int32).tolist()
    for wrong, column, name in zip(found, PER_TOKEN[3:], names.as_tuple()[2:], strict=True):
        if wrong:
            values, borders = there.view(column), there.view("cu_seqlens")
            good = is_logprob(values) if column == "logprobs" else torch.isfinite(values)
            token = int(good.logical_not().nonzero()[0])
            found_in = members(groups)[0]
            raise not_finite(name, token, float(values[token]), borders.tolist(), found_in)


#: Bytes of a program's copy: enough for some warps, and few enough for many programs.
CHUNK_BYTES: Final = 16_384
CHUNK_ENTRY_BYTES: Final = COPY_WORDS * 8


def copy_extras(
    groups: list[shmbus.Group],
    lengths: list[int],
    wanted: ExtraFields,
    device: torch.device,
    shift: int,
    blocks: list[StagingBlock],
    staging: Staging,
) -> dict[str, Any]:
    """Start the copies of extra fields, on the current stream."""
    trajectories = members(groups)[0]
    measured = wanted.measure(trajectories, lengths, column_names(groups))
    # Rows of a sample without an optional field are not copied.
    make = torch.zeros if measured.lacking else torch.empty
    there = make(measured.nbytes, dtype=torch.uint8, device=device)
    if measured.columns:
        _copy(measured, trajectories, lengths, there, shift, blocks, staging)
    extra, offsets, kinds = measured.values(there)
    return {"extra": extra, "extra_offsets": offsets, "extra_kinds": kinds}


def _copy(
    measured: MeasuredExtras,
    trajectories: list[shmbus.Trajectory],
    lengths: list[int],
    there: torch.Tensor,
    shift: int,
    blocks: list[StagingBlock],
    staging: Staging,
) -> None:
    from trainer_adapter.gpu.kernel import launch_copy

    # At most one partial chunk per sample and field.
    most = measured.nbytes // CHUNK_BYTES + len(trajectories) * len(measured.columns)
    block = staging.take(most * CHUNK_ENTRY_BYTES)
    blocks.append(block)
    places = measured.places()
    chunks, launches = plan_extras(
        trajectories,
        lengths,
        measured.specs(),
        places,
        block.array[: most * CHUNK_ENTRY_BYTES].view(np.int64),
        shift=shift,
        chunk_bytes=CHUNK_BYTES,
    )
    assert chunks <= most, f"{chunks} chunks of extra fields, at most {most} expected"
    for (first, count), (_, width) in zip(launches, places, strict=True):
        if count:
            launch_copy(block.host, first * CHUNK_ENTRY_BYTES, count, width, there)
