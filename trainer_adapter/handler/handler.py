"""OnlineDataHandler: the bus as an iterator of batches.

Invariants:

- A batch holds whole groups. They stay leased until `ack`, so a trainer that dies earlier gets the
  groups again.
- A taken group is in exactly one place, recorded by the planner, until its end.
- An exception of a signal handler neither loses nor duplicates a group: the next call finishes the
  interrupted work. A batch that leaves `next_batch` by an exception comes again; a returned batch
  is the caller's, and in `out`, until `ack` or `give_back`.
- After `load_state_dict`, samples trained before the checkpoint are acknowledged and not yielded.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

import shmbus
from shmbus.base.arguments import check_timeout
from shmbus.base.closing import ClosedByWith
from shmbus.batch.gather import FieldNames, MixedLogprobsError
from shmbus.handles.open_requests import RestoredRequests
from shmbus.inspect.stall_report import wait_sentence
from trainer_adapter._arguments import (
    ConsumerOptions,
    check_choices,
    check_consumer_options,
    check_for_ranks,
    check_loader,
    check_packing,
    checked_budget,
    checked_max_wait,
    checked_pack_threads,
)
from trainer_adapter.advantages import Kind
from trainer_adapter.batches.batch import Batch, Layout
from trainer_adapter.batches.extra_fields import ExtraFields, GivenExtraFields
from trainer_adapter.batches.finite import SampleError, group_of_sample
from trainer_adapter.batches.memory import BatchMemory
from trainer_adapter.batches.pack import HostPacker
from trainer_adapter.batches.sample_flags import Stale, Truncated
from trainer_adapter.gpu.packer import GpuPacker
from trainer_adapter.handler.admission import Admission, SampleAge
from trainer_adapter.handler.checkpoint import HandlerState
from trainer_adapter.handler.evaluation import MOST_AT_ONCE, Evaluation
from trainer_adapter.handler.group_calls import (
    AnnotateGroup,
    GroupAnnotation,
    GroupScoring,
    ScoreGroup,
)
from trainer_adapter.handler.metrics import HandlerMetrics
from trainer_adapter.handler.planner import BatchPlanner, MadeBatch
from trainer_adapter.handler.prefetch import Prefetcher
from trainer_adapter.handler.progress import DropNotes, Progress, describe_wait
from trainer_adapter.handler.prompts import LEDGER_S, PromptOffers, PromptsEndedError
from trainer_adapter.handler.take import QUIET_NOTE_S, Take, WorkedOn, take_from, take_until_due
from trainer_adapter.mismatch import LogprobMismatch

if TYPE_CHECKING:
    # Not a runtime dependency; typing exports Unpack from Python 3.11 on.
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

#: Timeout in seconds from which the error names the cause.
SENTENCE_S: Final = 0.2


class OnlineDataHandler(IterableDataset[Batch], ClosedByWith):
    """Takes complete groups from a bus and yields them as batches of tensors.

    A torch `IterableDataset`, for a DataLoader with ``batch_size=None`` and no workers.

    Parameters
    ----------
    bus : str
        Name of the bus.
    tokens_per_batch : int, optional
        Token budget of a batch of whole groups, 65,536 by default. Padding is not counted, not even
        in the padded layout. A larger group forms a batch alone; a longer *sequence* is malformed.
    groups_per_batch : int, optional
        Instead: an exact number of groups per batch.
    advantages : "grpo" | "dr_grpo" | "rloo" | "batch" | "batch_std" | "none" or callable
        As for `group_advantages`.
    layout : "packed" | "padded" | "prefix"
        "packed": every sequence in one row, with borders in `Batch.cu_seqlens`. "padded": a row per
        sequence, padded to the longest. "prefix": packed, with the shared prefix of a group's
        sequences stored once for the model, in `Batch.prefix_tree`; samples of a group then share
        one prompt.
    device : torch.device or str
        Device of the batch's tensors. With "cuda" the GPU reads the ring directly if supported.
    rank, world_size : int
        This rank gets its shard of each step: disjoint from the shards of the remaining ranks,
        balanced by tokens, and formed as soon as each rank gets a group. Several ranks need the
        daemon (`shmbus serve`). A restarted rank first gets its unacknowledged groups, as the same
        batches. `max_policy_lag` applies before a shard is formed, never after.
    max_wait : float, optional
        Seconds after its first group until a partial batch is yielded, if each rank gets a group;
        None waits for a full batch. By default 1 for a token budget, and None for a number of
        groups.
    fields : FieldNames, optional
        Producers' names of the arrays.
    malformed : "raise" | "drop"
        A group of mismatched arrays is dropped and counted in either case; "raise" also raises its
        ValueError, once, and iteration can continue.
    truncated : "keep" | "mask" | "exclude" | "drop"
        Treatment of truncated samples, with ``meta["finish_reason"]`` "length", "max_tokens" or
        "abort": train them normally; leave them out of the loss, while their scores still count for
        their groups; leave their scores out of the groups' baselines too; or drop their whole
        group, counted by `truncated_groups` and in the ledger under "malformed".
    stale_samples : "drop" | "mask" | "exclude"
        Treatment of samples more than `max_policy_lag` versions behind: drop
        their whole group, or leave those samples alone out of the loss when their batch is packed,
        and under "exclude" out of the baseline.
    prefetch : int
        Batches kept ready on their device by a thread during the step; 0, the default, for no
        thread. A batch becomes ready when full or, while the trainer waits, after `max_wait`. A
        ready batch too old after `set_policy_version` is recalled and made from newer groups; a
        shard is not.
    progress : bool or file
        Write a line of progress to stderr, or to a file, now and then. ``handler.progress.line``
        holds the current line in any case.
    extra_fields : dict of str to kind or ExtraField, optional
        Further fields for `Batch.extra`, by the kinds of `ExtraField`.
    pack_threads : int, optional
        Threads for copying a batch on the host, the packing thread included; by default a fourth of
        this rank's processors, at most 4. They start and end with the copy.
    score_group : callable, optional
        Scores groups with samples put with ``score=None``, before batching: called with the leased
        `shmbus.Group`, the callable returns a number per sample (existing scores win), or None, and
        the group is dropped as "filtered" (single rank only). A coroutine function scores the
        groups of a take concurrently. `next_batch` raises its exceptions, and the groups wait for
        the next call; after an `UnservedGroupError` the group is dropped as "filtered" (single rank
        only).
    annotate_group : callable, or list of them, optional
        Adds arrays to each group before batching, for example reference logprobs: called with the
        leased, scored `shmbus.Group`, the callable returns a dict of names and lists: an array per
        sample with a row per token. The arrays reach `Batch.extra` like `extra_fields`; declare
        "sequence" there for an array or a number per sample. A coroutine function annotates the
        groups of a take concurrently; `shmbus.Columns` is a ready-made coroutine function, for
        annotators in separate processes. Each callable of a list sees the additions of the earlier
        callables in `Group.columns`. Exceptions are raised as by `score_group`.
    call_timeout : float, optional
        Seconds per group for a call of `score_group` or `annotate_group`; None for no limit. A late
        coroutine is cancelled and called again, at most three times. After the third time, and for
        a function at once, its group is dropped as "filtered", or with several ranks an
        `UnservedGroupError` is raised. A function runs in a separate thread under this limit, and
        when a batch without `prefetch` is awaited with a timeout.
    **consumer_options
        As for `shmbus.Consumer`, such as group_timeout, max_policy_lag and skip_zero_variance.

    Raises
    ------
    TypeError, ValueError
        Invalid arguments.
    BusNotFoundError, BusBusyError, LayoutMismatchError
        As for `shmbus.Consumer`.
    """

    _closed = False

    def __init__(
        self,
        bus: str,
        *,
        tokens_per_batch: int | None = None,
        groups_per_batch: int | None = None,
        advantages: Kind = "grpo",
        layout: Layout = "packed",
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        max_wait: float | Literal["auto"] | None = "auto",
        fields: FieldNames | None = None,
        malformed: Literal["raise", "drop"] = "raise",
        truncated: Truncated = "keep",
        stale_samples: Stale = "drop",
        prefetch: int = 0,
        progress: bool | TextIO = False,
        extra_fields: GivenExtraFields | None = None,
        pack_threads: int | None = None,
        score_group: ScoreGroup | None = None,
        annotate_group: AnnotateGroup | Sequence[AnnotateGroup] | None = None,
        call_timeout: float | None = None,
        **consumer_options: Unpack[ConsumerOptions],
    ) -> None:
        tokens_per_batch = checked_budget(tokens_per_batch, groups_per_batch)
        check_choices(
            layout=layout, malformed=malformed, truncated=truncated, stale_samples=stale_samples
        )
        check_consumer_options(consumer_options, OnlineDataHandler)
        check_for_ranks(world_size, truncated)
        max_wait_s = checked_max_wait(max_wait, tokens_per_batch)
        on_device = check_packing(device, fields, advantages, prefetch)
        self.tokens_per_batch = tokens_per_batch
        self.groups_per_batch = groups_per_batch
        self._fields = fields or FieldNames()
        self._malformed = malformed
        self.progress = Progress.of(progress)
        options: dict[str, Any] = {
            "advantages": advantages,
            "layout": layout,
            "fields": fields,
            "truncated": truncated,
            "stale": stale_samples,
            "is_old": SampleAge.of(stale_samples, consumer_options),
            "extra_fields": ExtraFields.of(extra_fields),
            "pack_threads": checked_pack_threads(pack_threads, world_size),
        }
        self._gpu = GpuPacker(on_device, **options) if on_device.type == "cuda" else None
        self._packer = self._gpu or HostPacker(device=on_device, memory=BatchMemory(), **options)
        self._planner: BatchPlanner[Batch] = BatchPlanner(
            tokens_per_batch, groups_per_batch, max_wait_s, world_size
        )
        self._rank, self._world_size = rank, world_size
        self._awaited = "batch" if world_size == 1 else "step"
        if options["is_old"] is not None:
            consumer_options.pop("max_policy_lag")
        self._consumer = shmbus.Consumer(bus, rank=rank, world_size=world_size, **consumer_options)
        try:
            if options["is_old"] is not None:
                options["is_old"].consumer = self._consumer
            #: Version and waiting trajectories of the bus as found, until the first batch.
            self._found = self._consumer.policy_version, 0
            if self._found[0] and rank == 0:
                self._found = self._found[0], self._consumer.stats().undelivered
            split = consumer_options.get("split", "train")
            self._prompts = PromptOffers(
                self._consumer,
                self._planner,
                rank=rank,
                world_size=world_size,
                split=split,
                prompt_schema=consumer_options.get("prompt_schema"),
            )
            drop = functools.partial(self._consumer.drop, reason="filtered")
            limits: dict[str, Any] = {
                "drop": drop if world_size == 1 else None,
                "call_timeout_s": check_timeout(call_timeout, "call_timeout"),
            }
            drop_equal = bool(consumer_options.get("skip_zero_variance"))
            self._scoring = (
                None
                if score_group is None
                else GroupScoring(score_group, drop_equal=drop_equal, **limits)
            )
            self._annotation = (
                None
                if annotate_group is None
                else GroupAnnotation(
                    annotate_group,
                    tokens=self._fields.tokens,
                    extra_fields=options["extra_fields"],
                    **limits,
                )
            )
            self._evaluation = Evaluation(self._consumer, self._fields, self._scoring, split)
            max_policy_lag = consumer_options.get("max_policy_lag")
            self._admission = Admission(
                self._consumer,
                self._planner,
                self._fields,
                tokens_per_batch=tokens_per_batch,
                malformed=malformed,
                truncated=truncated,
                # A shard never changes: every rank makes the same number of batches.
                max_policy_lag=None if world_size > 1 else max_policy_lag,
                extra_fields=options["extra_fields"],
            )
            self._metrics = HandlerMetrics(
                self._consumer,
                self._planner,
                tokens_per_batch=tokens_per_batch,
                groups_per_batch=groups_per_batch,
            )
            self._drops = DropNotes(self._consumer.stats(), max_policy_lag)
            self._take = self._taking()
            self._prefetcher = (
                Prefetcher(self._planner, prefetch, self._take, self._admission.admit, self._make)
                if prefetch
                else None
            )
            with shmbus.Bus.open(self._consumer.name) as handle:
                self._identity = handle.identity
        except BaseException:
            # The raised exception keeps this unreachable handler alive.
            self._consumer.close()
            raise

    def _taking(self) -> Take:
        step = {**self._planner.step_options(), "field": self._fields.tokens}
        take = take_from(self._consumer, step if self._world_size > 1 else None)
        works = [work for work in (self._scoring, self._annotation) if work is not None]
        return WorkedOn(take, works, whole=self._world_size > 1) if works else take

    # -- batches --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of yielded batches: the step of the next batch.

        After an optimizer step, the policy version of the samples to come, regardless of ready
        batches: ``handler.set_policy_version(handler.step)``.
        """
        return self._planner.step

    @property
    def closed(self) -> bool:
        """True if the handler or its consumer is closed."""
        return self._closed or self._consumer.closed

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until `close`, or the end of the prompts of `offer`.

        An exception does not end the iteration.
        """
        if get_worker_info() is not None:
            raise RuntimeError(
                "OnlineDataHandler: expected to be iterated by the process that made it, got a "
                "DataLoader's worker; pass num_workers=0, and prefetch=1 to have batches ready"
            )
        check_loader(sys._getframe(1))
        return self

    def __next__(self) -> Batch:
        return next(self._iterate(None))

    def iter(self, timeout: float | None = None) -> Iterator[Batch]:
        """Yield batches until `close` or the end of the prompts, with a time limit for each.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for a batch, as for `next_batch`.

        Yields
        ------
        Batch

        Raises
        ------
        TimeoutError
            As for `next_batch`. The error ends this iteration; a new iteration continues after it.
        ValueError, BusClosedError
            As for `next_batch`.
        """
        check_timeout(timeout)
        return self._iterate(timeout)

    def _iterate(self, timeout: float | None) -> Iterator[Batch]:
        while True:
            try:
                yield self.next_batch(timeout)
            except PromptsEndedError:
                return
            except shmbus.BusClosedError:
                if self.closed:
                    return
                raise

    def next_batch(self, timeout: float | None = None) -> Batch:
        """Wait for the next batch.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None waits for ever, with a note of the missing parts in the log every
            half minute. Time spent in a prompt iterator comes on top.

        Returns
        -------
        Batch

        Raises
        ------
        TimeoutError
            No batch in time: held groups stay held for the next call. Or, at once, no batch can
            come: this handler's requests have ended, no producer is attached, and the bus is empty.
            The message reports held and open groups, drops since the last such message with
            reasons, the number of batches out, and the remedy.
        EOFError
            Every prompt of `offer` is trained or given up.
        ValueError
            A group is malformed, under ``malformed="raise"``, and was dropped.
        BusClosedError
            The handler is closed, or was made before a fork.

        Notes
        -----
        After an exception, even of a signal handler, the next call continues, with the same batch
        if already begun. A returned batch is in `out` until `ack` or `give_back`.
        """
        check_timeout(timeout)
        first: list[MadeBatch[Batch] | BaseException] = []
        try:
            return self._next_batch(timeout, first)
        except BaseException:
            # The batch did not reach the caller.
            last = self._planner.last_out
            if last is not None and any(last is one for one in first):
                with self._locked():
                    self._planner.take_back()
            raise

    def _next_batch(
        self, timeout: float | None, handed_out: list[MadeBatch[Batch] | BaseException]
    ) -> Batch:
        """Wait for the next batch, and note the result before handing it out."""
        began_s = time.monotonic()
        self._require_open()
        self._warn_of_earlier_run()
        self._settle()
        left_s = timeout
        while True:
            if self._prefetcher is None:
                there = self._make_next(left_s)
            else:
                there = self._wait_for_ready(self._prefetcher, left_s)
            if not there:
                raise self._timeout_error(timeout)
            self._metrics.measure(time.monotonic() - began_s)
            with self._locked():
                self._require_open()  # a ready batch's groups went back
                # Else a group was dropped, or a batch recalled.
                if self._planner.ready:
                    handed_out.append(self._planner.ready[0])
                    return self._hand_out(began_s)
            if timeout is not None:
                left_s = max(0.0, began_s + timeout - time.monotonic())

    def _require_open(self) -> None:
        if self.closed:
            raise shmbus.BusClosedError("this handler is closed; make a new one")

    def _warn_of_earlier_run(self) -> None:
        """Warn once, before the first batch, of samples possibly left by an earlier run."""
        (version, waiting), self._found = self._found, (0, 0)
        if waiting and self._consumer.policy_version == version:
            name = self._consumer.name
            logger.warning(
                "bus %r is at policy version %d and has %d trajectories from before this trainer, "
                "which trains on them: if it is of an earlier run, `shmbus rm %s` before a new "
                "one; else set_policy_version or load_state_dict before the first batch",
                name, version, waiting, name,
            )  # fmt: skip

    def _settle(self) -> None:
        """Finish work interrupted by a signal handler's exception in the previous call."""
        planner = self._planner
        if planner.unsettled or (planner.inbox and self._prefetcher is None):
            with self._locked():
                planner.keep_leased()
                if planner.inbox:
                    self._admission.admit()

    def _make_next(self, timeout: float | None) -> bool:
        """Make the next batch unless its group must be dropped; False after the timeout."""
        planner, admission = self._planner, self._admission
        if self._ready_is_stale():
            planner.recall(time.monotonic())
        if not planner.ready:
            admission.return_stale()
            look = self._look
            if isinstance(self._take, WorkedOn):
                self._take.bounded = timeout is not None
            if not take_until_due(
                planner, self._take, admission.admit, timeout, self._note_quiet, look
            ):
                return False
            self._make()
        return True

    def _wait_for_ready(self, prefetcher: Prefetcher, timeout: float | None) -> bool:
        """Wait for a batch of the thread; recall a batch too old by now."""
        prefetcher.require_own_process()
        if not prefetcher.wait(timeout, QUIET_NOTE_S, self._note_quiet, self._look):
            return False
        with prefetcher.lock:
            if self._ready_is_stale():
                self._planner.recall(time.monotonic())
                self._admission.return_stale()
                prefetcher.wake()
        return True

    def _ready_is_stale(self) -> bool:
        ready = self._planner.ready
        if not ready or not isinstance(ready[0], MadeBatch):
            return False
        return bool(self._admission.stale([one.group for one in ready[0].planned]))

    def _hand_out(self, began_s: float) -> Batch:
        """Count the first ready batch as a step, and return it."""
        first = self._planner.ready[0]
        if isinstance(first, MadeBatch):
            batch = first.batch
            batch.step = self._planner.step
            if self._gpu is not None:
                self._gpu.deliver(batch)
            self.progress.note(batch, time.monotonic() - began_s, self._consumer)
            if self._world_size > 1:
                self._consumer.note_trained([one.group for one in first.planned], batch.step)
        if self._prefetcher is not None:
            self._prefetcher.wake()
        return self._planner.hand_out(self._planner.step)

    def _look(self, asked: bool, deadline_s: float | None) -> float | None:
        """Offer prompts before a wait; raise if no batch can come any more."""
        if asked and self._prompts.is_hopeless():
            raise TimeoutError(
                "no batch can come: every request ended, the bus is empty, and no producer is "
                f"attached; {self._what_is_there()}"
            )
        return self._prompts.look(asked, deadline_s)

    def _make(self) -> None:
        """Pack the next batch of the planner; after a failure its groups still wait."""
        if self._planner.unsettled:
            # The remaining groups may not make a batch due.
            self._planner.keep_leased()
            return
        planned = self._planner.next_groups()
        groups = [one.group for one in planned]
        try:
            began_s = time.monotonic()
            batch = self._packer.pack(groups)
            packed_s = time.monotonic() - began_s
        except SampleError as error:
            self._admission.drop(groups[group_of_sample(groups, error.sample)], error)
            if self._malformed == "raise":
                raise
        except MixedLogprobsError as error:
            self._admission.drop_without_logprobs([groups[at] for at in error.lacking])
            if self._malformed == "raise":
                raise
        else:
            self._planner.made(planned, batch, packed_s)

    def _timeout_error(self, timeout: float | None) -> TimeoutError:
        # A polling caller catches many of these errors, and a look at the whole bus takes
        # milliseconds.
        said = self._sentence() if timeout is None or timeout >= SENTENCE_S else ""
        return TimeoutError(
            f"no {self._awaited} within {timeout:g} s{said}; {self._what_is_there()}"
        )

    def _sentence(self) -> str:
        """Return a helper's unfinished work, or the first line of `shmbus status`."""
        said = self._take.describe() if isinstance(self._take, WorkedOn) else ""
        said = said or wait_sentence(self._consumer.name, self._planner.missing_text)
        return f": {said.removesuffix('.')}" if said else ""

    def _note_quiet(self) -> None:
        logger.warning(
            "still waiting for a %s%s; %s", self._awaited, self._sentence(), self._what_is_there()
        )

    def _what_is_there(self) -> str:
        try:
            ledger = self._consumer.stats(LEDGER_S)
        except shmbus.DaemonUnavailableError as error:
            return str(error)
        dropped = self._drops.news(ledger, self.step)
        open_text = self._prompts.open_text(ledger)
        return describe_wait(self._consumer.name, ledger, self._planner, dropped, open_text)

    # -- the end of a batch ---------------------------------------------------------------------

    @property
    def out(self) -> list[Batch]:
        """Batches at the trainer: returned, and neither acknowledged nor given back."""
        return [made.batch for made in self._planner.out.values()]

    def ack(self, batch: Batch) -> None:
        """Acknowledge a batch after its optimizer step; this frees the ring.

        Parameters
        ----------
        batch : Batch
            Yielded by this handler, not acknowledged before.

        Raises
        ------
        ProtocolError
            The batch was already acknowledged or given back, or belongs to another handler.

        Notes
        -----
        After an exception of a signal handler, like KeyboardInterrupt, call `ack` again: the call
        finishes the remaining work, or raises ProtocolError if nothing remains.

        To lose nothing on a return to a checkpoint, save ``state_dict()`` before acknowledging the
        batches in it.
        """
        self._require_out(batch, "ack")
        # An interrupted call may have acknowledged some groups already.
        self._consumer.ack([group for group in batch.groups if group.state != "acknowledged"])
        self._planner.acknowledged(batch.step)

    def give_back(self, batch: Batch) -> None:
        """Return an untrained batch; its groups make the next batch.

        Parameters
        ----------
        batch : Batch
            Yielded by this handler, not acknowledged before.

        Raises
        ------
        ProtocolError
            As for `ack`.
        """
        self._require_out(batch, "give back")
        if self._world_size > 1:
            self._consumer.note_trained(batch.groups, -1)
        # Not to the consumer, which would deliver the groups waiting here first.
        with self._locked():
            self._planner.give_back(batch.step, time.monotonic())
            if self._prefetcher is not None:
                self._prefetcher.wake()

    def _locked(self) -> AbstractContextManager[Any]:
        """Return the lock of waiting groups and ready batches, if a thread works with them too."""
        if self._prefetcher is None:
            return nullcontext()
        self._prefetcher.require_own_process()
        return cast("AbstractContextManager[Any]", self._prefetcher.lock)

    def _require_out(self, batch: Batch, verb: str) -> None:
        if not isinstance(batch, Batch):
            raise TypeError(f"cannot {verb} it: expected a Batch, got {type(batch).__name__}")
        out = self._planner.out_as(batch.step)
        # A copy on another device shares the list of the original.
        if out is not None and out.groups is batch.groups:
            return
        if not batch.groups:
            why = "it is a copy without groups, as by pickle; end the original, which is in out"
        elif all(group.state == "acknowledged" for group in batch.groups):
            why = "it was acknowledged already"
        else:
            why = "it was given back already, or another handler yielded it"
        raise shmbus.ProtocolError(
            f"cannot {verb} batch {batch.step}: {why}; each batch of this handler ends once"
        )

    # -- prompts --------------------------------------------------------------------------------

    def request(
        self,
        instance_id: str | int,
        *,
        round: int | None = None,
        split: str | None = None,
        **more: Any,
    ) -> int:
        """Offer one group to the workers; details in `shmbus.Consumer.request`.

        After `load_state_dict` a trainer repeats its data from the checkpoint's position. A later
        offer still on the bus is not offered twice.

        Parameters
        ----------
        instance_id, round, split, **more
            As for `shmbus.Consumer.request`; the split is the handler's own by default.

        Returns
        -------
        int
            The request's number; 0 if offered before the restart.
        """
        return self._prompts.request(instance_id, round, split, **more)

    def offer(self, prompts: Any, ahead: int = 2, group_size: int = 8) -> None:
        """Keep prompts open for the workers until the prompts end.

        `next_batch` continues the offers, before and during its wait. The count covers prompts open
        or on their way to a batch, so a failed, late, stale, malformed or filtered group is
        replaced. Prompts of a separate `Feeder` count too.

        `state_dict` contains the position. After `load_state_dict`, which comes first, the same
        call with the same data from their start in the same order continues at the exact prompt:
        each is trained at most once, and only given-up prompts are left out. A prompt's round,
        `round` of a `Request`, is its place in the whole sequence of offers, so an id may come
        again.

        With several ranks every rank makes the call: rank 0 offers for the job, and the call does
        nothing on the remaining ranks.

        Parameters
        ----------
        prompts : iterable, or data set with a length and ``__getitem__``
            Dicts, or (id, prompt) pairs. A dict may contain ``instance_id`` (its place by default),
            ``group_size``, ``need``, ``priority`` and ``meta``. Of the remaining items, arrays, a
            list ``prompt`` of token ids, and fields of ``prompt_schema`` become the request's
            fields; the rest, like text, goes into its meta. `next_batch` calls an iterator's `next`
            and waits for it; pass a DataLoader (``batch_size=None``) to load ahead. A source with
            `load_state_dict`, like torchdata's StatefulDataLoader, resumes by that method; a source
            without this method is read again from its start.
        ahead : int, default 2
            Batches' worth of prompts kept open while waiting for a batch, so one less during
            training; prompts of ready `prefetch` batches are not counted. A batch is
            `groups_per_batch` of each rank; or `tokens_per_batch` by the mean of the last 64
            groups' tokens, and 8 groups until the first group.
        group_size : int, default 8
            Samples per group without its own `group_size`.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or the data differ from the checkpoint's. An invalid prompt is
            left out, and its error is raised once, here or by `next_batch`, which continues after
            it.
        Exception
            An exception of the iterator, here or by `next_batch`, which retries the same prompt.

        Notes
        -----
        With no more prompts, and no group open or on its way, ``for batch in handler`` ends, and
        `next_batch` raises EOFError. The last batch holds the remaining groups, even with
        `groups_per_batch`; with several ranks, groups short of a full step stay on the bus, and
        only rank 0 learns of the end.

        A repeated call continues at the same position, or, after the last prompt, begins anew.
        """
        self._prompts.offer(prompts, ahead, group_size)

    @property
    def restored_requests(self) -> RestoredRequests | None:
        """Outcome of `load_state_dict` for requests; None before, and on ranks above 0."""
        return self._prompts.restored

    # -- evaluation -----------------------------------------------------------------------------

    def take(
        self, split: str = "eval", *, max_groups: int = MOST_AT_ONCE, timeout: float | None = 0.1
    ) -> list[shmbus.Group]:
        """Take complete groups of a split beside the trained split, like `shmbus.Consumer.take`.

        Parameters
        ----------
        split : str, default "eval"
            Split given to `request` or `shmbus.Producer.put`.
        max_groups, timeout
            As for `shmbus.Consumer.take`.

        Returns
        -------
        list of shmbus.Group
            To be acknowledged by the caller, for example by ``with group:``. A `score_group` scores
            them; its exceptions are raised here, and the groups given back.

        Raises
        ------
        ValueError
            The split is the handler's own, "train" by default, delivered as batches only.
        TypeError, BusClosedError, BusRemovedError, StallError, DaemonUnavailableError
            As for `shmbus.Consumer.take`.
        """
        return self._evaluation.take(split, max_groups=max_groups, timeout=timeout)

    def evaluate(
        self, groups: int, *, timeout: float | None = None, split: str = "eval"
    ) -> dict[str, float]:
        """Take groups of another split, acknowledge them, and return figures to log.

        Offer them by `request` with ``split="eval"`` and a high priority, so workers take them
        first. No batch is made meanwhile: keep fewer training prompts in the lane than the bus can
        hold, or call with ``timeout=0`` between steps, for the groups already there.

        Parameters
        ----------
        groups : int
            Number of groups to take.
        timeout : float, optional
            Seconds to wait for the whole number: None waits for ever, 0 does not wait.
        split : str, default "eval"
            Split of the groups.

        Returns
        -------
        dict of str to float
            Names begin with the split: ``eval/groups``, less than requested after a timeout, and,
            of the received groups, ``eval/samples``; ``eval/reward/mean`` and ``/std``, and
            ``/best``, the mean of each group's best sample; ``eval/length/mean`` in tokens;
            ``eval/lag/mean`` and ``/max`` in versions.

        Raises
        ------
        TypeError, ValueError
            `groups` is no int of 1 or more, or as for `take`.
        BusClosedError, BusRemovedError, StallError, DaemonUnavailableError
            As for `take`.

        Examples
        --------
        ::

            for batch in handler:
                train(batch)
                handler.ack(batch)
                if handler.step % 50 == 0:
                    for number, prompt in enumerate(held_out):
                        handler.request(f"e{handler.step}-{number}", group_size=4, split="eval",
                                        priority=7, prompt=prompt)
                    wandb.log(handler.evaluate(len(held_out), timeout=600), step=handler.step)
        """
        return self._evaluation.evaluate(groups, timeout=timeout, split=split)

    # -- figures --------------------------------------------------------------------------------

    @property
    def refill(self) -> int:
        """Training groups dropped since the handler was made: the number to replace.

        Every reason counts, on the whole bus: failed, late, stale, too many, malformed, truncated,
        without variance, refused by `score_group`. `offer` replaces them itself;
        workers with their own choice of prompts read the same count as `Producer.groups_dropped`.
        """
        return self._metrics.refill

    def stats(self) -> shmbus.Ledger:
        """Return the ledger of the bus.

        Returns
        -------
        shmbus.Ledger
        """
        return self._consumer.stats()

    @property
    def truncated_groups(self) -> int:
        """Groups dropped under ``truncated="drop"``."""
        return self._admission.truncated_groups

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return figures of the batches since the last call, for an experiment logger.

        Parameters
        ----------
        prefix : str
            Put before each name, for example "rollout/".

        Returns
        -------
        dict[str, float]
            The names are in docs/trainer.md. Figures of batches are left out without a batch since
            the last call. Truncated samples are counted from the first call on.

        Raises
        ------
        BusClosedError
            The handler is closed.
        """
        return self._metrics.read(prefix)

    def note_mismatch(
        self,
        figures: LogprobMismatch,
        *,
        engine: torch.dtype | str = "",
        trainer: torch.dtype | str = "",
    ) -> None:
        """Count a comparison of the engine's and the trainer's logprobs, for `metrics`.

        `shmbus status` names a precision gap that dominates, and Prometheus gets the newest
        figures; of several trainers on a bus, those of the first.

        Parameters
        ----------
        figures : LogprobMismatch
            From `logprob_mismatch`, of a batch or a micro-batch. The call waits for no device.
        engine, trainer : torch.dtype or str
            Dtypes of the forward passes, for the sentence of `shmbus status`.

        Raises
        ------
        TypeError, BusClosedError
            `figures` is of another type; the handler is closed.
        """
        if not isinstance(figures, LogprobMismatch):
            raise TypeError(
                "figures: expected a LogprobMismatch, as logprob_mismatch returns, got "
                f"{type(figures).__name__}"
            )
        names = (str(dtype).removeprefix("torch.") for dtype in (engine, trainer))
        self._metrics.note_mismatch(figures, *names)

    # -- state ----------------------------------------------------------------------------------

    def set_policy_version(self, version: int) -> None:
        """Set the current policy version, for producers and for the filter of stale groups.

        Parameters
        ----------
        version : int
            0 or more, and not less than before.

        Raises
        ------
        TypeError, ValueError
            The version is no int, negative, or goes back. Only `load_state_dict` may set it back.
        """
        self._consumer.policy_version = version
        self._found = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: no trajectory is repeated or skipped.

        Yielded batches count as trained, acknowledged or not, as in torch's StatefulDataLoader;
        give back batches of `out` lost by the trainer. A daemon supplies the requests; without the
        daemon the call raises DaemonUnavailableError, and nothing is lost.

        Returns
        -------
        dict
            Plain ints, strs and lists, for any serialiser. Includes untrained requests with their
            prompts; of several ranks, only rank 0 includes them.
        """
        self._prompts.settle()
        # After the remains of a checkpoint, since they may end meanwhile.
        known = self._consumer.trained_before(self.step)
        trained = set(known.names)
        for made in self._planner.out.values():
            trained |= self._consumer.lasting_names(one.group for one in made.planned)
        return HandlerState(
            self._rank,
            self.step,
            self._consumer.policy_version,
            self._identity,
            trained,
            self._prompts.requests_to_save(Counter(known.groups)),
            self._prompts.position(),
            self._prompts.groups_to_save(),
        ).as_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a checkpoint. Its policy version is set, even to a lower value.

        Batches out from that step on are given back. Untrained requests missing on the bus are
        offered again; `request` does not repeat later offers that are still on the bus.

        Parameters
        ----------
        state : dict or list of dict
            From `state_dict` of any rank, of a job of any world size; or the states of several
            ranks, saved at one step.

        Raises
        ------
        ValueError
            Not a handler's state, an unknown version, or a list from different steps; or the state
            belongs to another data set of `offer`, or to another rank.
        """
        saved = HandlerState.parse(state)
        self._found = 0, 0
        self._prompts.restore_position(saved.offer)
        self._consumer.reset_policy_version(saved.policy_version)
        for batch in reversed(self.out):
            if batch.step >= saved.step:
                self.give_back(batch)
        with self._locked():
            self._admission.trained = saved.trained
            self._planner.begin_at(saved.step, time.monotonic())
            self._admission.return_trained()
            self._consumer.end_trained(saved.trained)
            if self._prefetcher is not None:
                self._prefetcher.wake()
        self._prompts.restore_requests(saved.requests, saved.bus == self._identity)

    def close(self) -> None:
        """Leave the bus. Unacknowledged groups are delivered to the next reader.

        Idempotent; after an exception of a signal handler, call `close` again.
        """
        self._closed = True
        self.progress.end()
        if self._prefetcher is not None and self._prefetcher.forked:
            # The thread may have held the reader's lock at the time of the fork.
            return
        if self._scoring is not None:
            self._scoring.close()  # first: the thread may wait for scores
        if self._annotation is not None:
            self._annotation.close()
        if self._prefetcher is not None:
            self._prefetcher.stop()
        if self._gpu is not None:
            self._gpu.close()
        self._evaluation.close()
        self._metrics.close()
        self._consumer.close()

    @property
    def transport(self) -> str:
        """Transport of batches to their device: "cpu", "gather", "pinned" or "copy"."""
        return "cpu" if self._gpu is None else self._gpu.transport

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "OnlineDataHandler: expected to stay in its process, got pickled; one process reads a "
            "bus: give a DataLoader num_workers=0"
        )

    def __repr__(self) -> str:
        out = len(self._planner.out)
        more = " closed" if self._closed else f" {out} out" if out else ""
        return f"<OnlineDataHandler {self._consumer.name!r} step {self.step}{more}>"
