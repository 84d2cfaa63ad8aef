"""Packing of leased groups by a kernel that reads the ring itself.

A batch is one block of memory on the device, and one launch that fills it: the table is in pinned
memory, from which the kernel reads and to which it reports. Small batches wait for the host, and
each allocation, copy and view costs some of its time.

Invariants:

- Only `Pending.finish` waits for the device.
- The ring and the tables are kept until the kernel has read them.
- The values are those of the host's gather, for records of any dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.batch.gather import FieldNames, describe, measure, members
from shmbus.batch.gather_plan import CHUNK_WORDS, GatherTable, plan_gather
from trainer_adapter.advantages import Kind, advantages_for_groups, baseline_of
from trainer_adapter.batches.batch import Batch, Layout, pad_batch
from trainer_adapter.batches.extra_fields import ExtraFields, GivenExtraFields
from trainer_adapter.batches.facts import BatchFacts
from trainer_adapter.batches.finite import not_finite
from trainer_adapter.batches.sample_flags import Truncated, request_words, sample_flags
from trainer_adapter.gpu.extra_fields import copy_extras
from trainer_adapter.gpu.memory import Staging, StagingBlock
from trainer_adapter.scored_group import ScoredGroup, groups_of

__all__ = ["Pending", "SeveralRowsError", "begin_gather"]

#: Alignment of a block's parts, in bytes: more than vector loads need.
PART_ALIGN: Final = 64
#: Bytes of table for a sequence of up to 4,000 tokens; longer ones need a second attempt.
USUAL_TABLE_BYTES: Final = 160
#: Field kinds of a launch that packs no token.
NO_FIELDS: Final = (0, -1, -1, -1)
#: What an event is created with so that a thread that waits for it sleeps instead of spinning.
BLOCKING: Final = True


class SeveralRowsError(ValueError):
    """A sample was put with rows: each is a sequence of its own, which the kernel cannot make."""


class Pending:
    """A batch in flight to the device.

    Parameters
    ----------
    batch : Batch
        Its tensors are being filled.
    stream : torch.cuda.Stream or None
        The stream that fills them; None if they are filled already.
    keep : object
        An object that must live until then.
    check : callable, optional
        Called once the batch is on the device; raises if the batch cannot be used. It is called
        again if it raised.
    done : torch.cuda.Event, optional
        To be recorded behind what fills them, and recorded again by nobody until then; a new one
        without it.
    """

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
        """Whether `finish` would not wait."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def finish(self) -> Batch:
        """Wait until the batch is on the device, sleeping, and return it.

        Returns
        -------
        Batch

        Raises
        ------
        ValueError
            A logprob or an advantage is not finite where the loss mask is True.
        """
        self._wait()
        if self._check is not None:
            self._check()
            self._check = None
        return self._batch

    def _wait(self) -> None:
        # If the batch has arrived already, `synchronize` still costs ten times as much as `query`.
        if not self.arrived and self._done is not None:
            self._done.synchronize()

    def __del__(self) -> None:
        # The memory that the kernel reads must not be used again before it is done.
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
    extra_fields: GivenExtraFields | ExtraFields | None = None,
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
        The device's address of the ring, minus this process's.
    staging : Staging, optional
        The pool for tables; new memory without it.
    advantages, layout, fields, truncated, extra_fields
        As for `pack`.

    Returns
    -------
    Pending

    Raises
    ------
    ValueError
        As for `pack`; for a value that is not finite, only from `Pending.finish`.
    SeveralRowsError
        A sample was put with ``rows=``.
    """
    names = fields or FieldNames()
    staging = staging or Staging(device)
    told: dict[str, Any] = {"names": names, "shift": device_shift}
    told["advantages"] = baseline_of(advantages)
    if told["advantages"] is None:
        told["advantages"] = _compared(groups, advantages, names)
    block, table = _plan(groups, staging, told, request_words(truncated))
    if not table.scores_fit:
        # Raises, with the score and its sample.
        _compared(groups, advantages, names)
    if table.mentions:
        told["flags"] = sample_flags(members(groups)[0], truncated)
        if told["flags"] is not None:
            staging.give_back(block)
            block, table = _plan(groups, staging, told)
    if table.has_rows:
        staging.give_back(block)
        raise SeveralRowsError(
            "gather: expected samples of one row each, got one that was put with rows=; the kernel "
            "packs a record as one sequence: use trainer_adapter.pack, or transport='copy'"
        )
    facts = _facts(block, table, groups)
    blocks = [block]
    try:
        batch = Batch.of_facts(
            facts,
            max_seqlen=table.longest,
            instance_ids=table.instance_ids,
            groups=groups,
            transport="gather",
            **_launch(block, table, len(groups), device),
        )
        if extra_fields is not None:
            lengths = facts.lengths.tolist()
            extras = copy_extras(
                groups, lengths, extra_fields, device, device_shift, blocks, staging
            )
            vars(batch).update(extras)
        if table.has_spans:
            batch.newest_policy_versions = torch.tensor(facts.newest_policy_versions).to(device)
        columns = batch.logprobs, batch.advantages
        if not table.has_logprobs:
            batch.logprobs = None
        if layout == "padded":
            pad_batch(batch)

        def check() -> None:
            found = block.array[table.found_at :][:8].view(np.int32).tolist()
            for wrong, column, name in zip(found, columns, names.as_tuple()[2:], strict=True):
                if wrong and column is not None:
                    _raise_not_finite(column, name, batch.cu_seqlens, members(groups)[0])
            for one in blocks:
                staging.give_back(one)

        return Pending(batch, stream, check=check, done=block.done)
    except BaseException:
        # The kernel may read the block already.
        if stream is not None:
            stream.synchronize()
        raise


def _facts(block: StagingBlock, table: GatherTable, groups: list[shmbus.Group]) -> BatchFacts:
    """Copy out of the table what stays known on the host: the block is used again."""
    memory, sequences = block.array, len(table.instance_ids)
    borders = np.frombuffer(memory, np.int32, sequences + 1, table.borders_at)
    samples = np.empty((4, sequences), np.int64)
    samples[0].view(np.float64)[:] = np.frombuffer(memory, np.float32, sequences, table.scores_at)
    samples[1] = np.frombuffer(memory, np.int64, sequences, table.versions_at)
    # The table has no newest versions: a look at each sample.
    samples[2] = describe(members(groups)[0])[3] if table.has_spans else samples[1]
    np.subtract(borders[1:], borders[:-1], out=samples[3])
    sizes = np.frombuffer(memory, np.int64, len(groups), table.sizes_at).copy()
    return BatchFacts(samples, sizes, table.tokens)


def _compared(groups: list[shmbus.Group], kind: Kind, names: FieldNames) -> NDArray[np.float32]:
    trajectories, sizes = members(groups)

    def seen() -> list[ScoredGroup]:
        return groups_of(trajectories, measure(groups, names).lengths, sizes.tolist())

    return advantages_for_groups(describe(trajectories)[0], sizes, kind, groups=seen)


def _plan(
    groups: list[shmbus.Group],
    staging: Staging,
    told: dict[str, Any],
    words: tuple[bytes, ...] = (),
) -> tuple[StagingBlock, GatherTable]:
    """Make the kernel's table in a block that is large enough."""
    from trainer_adapter.gpu.kernel import CHUNK_TOKENS

    told = {**told, "chunk_tokens": CHUNK_TOKENS, "words": words}
    block = staging.take(len(groups) * groups[0].size * USUAL_TABLE_BYTES)
    while True:
        table = plan_gather(groups, memory=block.array, **told)
        if table.nbytes <= block.array.nbytes:
            return block, table
        block = staging.take(table.nbytes)


def _launch(
    block: StagingBlock, table: GatherTable, groups: int, device: torch.device
) -> dict[str, Any]:
    """Launch the kernel on a new block of the device; return the views of its parts."""
    from trainer_adapter.gpu.kernel import launch

    total, facts = table.tokens, table.chunks_at - table.borders_at
    tokens = facts
    position_ids = tokens + _aligned(total * 8)
    loss_mask = position_ids + _aligned(total * 8)
    logprobs = loss_mask + _aligned(total)
    advantages = logprobs + _aligned(total * 4)
    there = torch.empty(advantages + _aligned(total * 4), dtype=torch.uint8, device=device)
    places = 0, tokens, position_ids, loss_mask, logprobs, advantages
    # The first launch also copies the facts; a batch without tokens has a launch for them alone.
    words = facts // 4
    for first, chunks, kinds in table.launches or [(0, 0, NO_FIELDS)]:
        of_table = table.chunks_at + first * CHUNK_WORDS * 8, table.found_at, table.borders_at
        launch(kinds, chunks, words, block.host, of_table, there, places)
        words = 0
    longs, floats = there.view(torch.int64), there.view(torch.float32)
    sequences = len(table.instance_ids)

    def later(name: str) -> Tensor:
        if name == "scores":
            first = (table.scores_at - table.borders_at) // 4
            return floats[first : first + sequences]
        of_groups = name == "group_sizes"
        at = table.sizes_at if of_groups else table.versions_at
        first = (at - table.borders_at) // 8
        return longs[first : first + (groups if of_groups else sequences)]

    # Each view costs as much as a record's part of the table: those few ask for are made later.
    return {
        "tokens": longs[tokens // 8 : tokens // 8 + total],
        "position_ids": longs[position_ids // 8 : position_ids // 8 + total],
        "cu_seqlens": there.view(torch.int32)[: sequences + 1],
        "loss_mask": there.view(torch.bool)[loss_mask : loss_mask + total],
        "logprobs": floats[logprobs // 4 : logprobs // 4 + total],
        "advantages": floats[advantages // 4 : advantages // 4 + total],
        "later": later,
    }


def _aligned(size: int) -> int:
    return -(-size // PART_ALIGN) * PART_ALIGN


def _raise_not_finite(
    column: Tensor, name: str | None, borders: Tensor, trajectories: list[shmbus.Trajectory]
) -> None:
    token = int(torch.isfinite(column).logical_not().nonzero()[0])
    raise not_finite(name, token, float(column[token]), borders.tolist(), trajectories)
