"""OnlineDataHandler: the bus as an iterator of batches.

Invariants:

- A batch holds whole groups. They stay leased until `ack`, so a trainer that dies before gets all
  of them again.
- A group that was taken is in exactly one place, which the planner keeps, until it ends.
- An exception of a signal's handler loses no group and doubles none: the next call finishes what
  was cut short. A batch that leaves `next_batch` by an exception comes again; one that was returned
  is the caller's, and in `out`, until `ack` or `give_back`.
- After `load_state_dict`, samples that the checkpoint had trained are acknowledged and not yielded.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

import shmbus
from shmbus._arguments import check_timeout
from shmbus.batch.field_presence import MixedLogprobsError
from shmbus.inspect.stall_report import wait_sentence
from shmbus.open_requests import RestoredRequests
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
from trainer_adapter.batches.pack import FieldNames, HostPacker
from trainer_adapter.batches.sample_flags import Stale, Truncated
from trainer_adapter.gpu.packer import GpuPacker
from trainer_adapter.handler.admission import Admission, SampleAge
from trainer_adapter.handler.checkpoint import HandlerState
from trainer_adapter.handler.evaluation import MOST_AT_ONCE, Evaluation
from trainer_adapter.handler.group_calls import (
    AnnotateGroup,
    GroupAnnotation,
    ScoreGroup,
    group_scoring,
)
from trainer_adapter.handler.metrics import HandlerMetrics, OnMetrics, checked_on_metrics
from trainer_adapter.handler.planner import BatchPlanner, MadeBatch
from trainer_adapter.handler.prefetch import Prefetcher
from trainer_adapter.handler.progress import DropNotes, Progress, describe_wait
from trainer_adapter.handler.prompts import PromptOffers, PromptsEndedError
from trainer_adapter.handler.take import (
    QUIET_NOTE_S,
    Take,
    WorkedOn,
    take_groups,
    take_shard,
    take_until_due,
)
from trainer_adapter.scored_group import ScoredGroup

if TYPE_CHECKING:
    # Of no package that is needed at run time; typing has it from Python 3.11 on.
    from typing_extensions import Unpack

__all__ = ["OnlineDataHandler"]

logger = logging.getLogger(__name__)

#: Seconds of a timeout from which its error says what stands in the way.
SENTENCE_S: Final = 0.2


class OnlineDataHandler(IterableDataset[Batch]):
    """Takes complete groups from a bus and yields them as batches of tensors.

    It is a torch `IterableDataset`, for a DataLoader with ``batch_size=None`` and no workers.

    Parameters
    ----------
    bus : str
        Name of the bus.
    tokens_per_batch : int, optional
        A batch holds as many whole groups as fit into this many tokens, 65,536 by default. Padding
        is not counted, not even in the padded layout. A larger group is a batch by itself; a longer
        *sequence* is malformed.
    groups_per_batch : int, optional
        Instead: exactly so many groups a batch.
    advantages : "grpo" | "dr_grpo" | "rloo" | "batch" | "batch_std" | "none" or callable
        As for `group_advantages`.
    layout : "packed" | "padded" | "prefix"
        All sequences in one row, with `Batch.cu_seqlens` for their borders; or a row for each,
        padded to the longest; or packed, with what sequences of a group share once for the model,
        in `Batch.prefix_tree`. Then samples of a group have one prompt.
    device : torch.device or str
        Where the batch's tensors are. With "cuda" the GPU reads the ring itself where it can.
    rank, world_size : int
        This rank gets its shard of each step: disjoint from those of other ranks, balanced by
        tokens, and formed as soon as each rank gets a group. More than one rank need the daemon
        (`shmbus serve`). A rank that starts again first gets the groups that it had not
        acknowledged, as the same batches. `max_policy_lag` applies before a shard is formed, never
        after.
    max_wait : float, optional
        Seconds after its first group in which a batch is yielded though it is not full, if each
        rank has a group; None waits until it is full. By default 1 for a token budget, and None for
        a number of groups.
    fields : FieldNames, optional
        Producers' names of the arrays.
    malformed : "raise" | "drop"
        A group whose arrays do not fit together is dropped and counted in either case; "raise"
        also raises its ValueError, once, and iteration can continue.
    truncated : "keep" | "mask" | "exclude" | "drop"
        Treatment of truncated samples, whose ``meta["finish_reason"]`` is "length", "max_tokens" or
        "abort": train them as others; leave them out of the loss, while their scores still count
        for their groups; leave their scores out of the groups' baselines too; or drop their whole
        group. `truncated_groups` counts the groups dropped so; the ledger has them under
        "malformed".
    stale_samples : "drop" | "mask" | "exclude"
        Treatment of samples more than `max_policy_lag` versions behind, by `stale_share`: drop
        their whole group, or leave those samples alone out of the loss when their batch is packed,
        and under "exclude" out of the baseline.
    prefetch : int
        Batches that a thread keeps ready, on their device, while the step runs; 0, the default, for
        no thread. A batch is made ready when it is full or, while the trainer waits, when
        `max_wait` is over. A ready batch that is too old after `set_policy_version` is recalled and
        made from newer groups; a shard is not.
    progress : bool or file
        Write a line of progress to stderr, or to a file, now and then. ``handler.progress.line`` is
        the present one in any case.
    extra_fields : dict of str to kind or ExtraField, optional
        Further fields for `Batch.extra`: "token" (a row a token), "ragged" (rows joined),
        "sequence" (an array a sample, stacked) or "meta" (a value of the meta). `ExtraField` has
        dtype, shape, and a fill for a sample without it; else such a group is malformed.
    on_metrics : callable, or dict of callables, optional
        Called with `metrics` of its own for each batch, before the trainer gets it, such as
        ``wandb.log``; or one a kind, ``{"reward": ..., "lag": ...}``. Its exception is raised by
        `next_batch`, and the batch is the next one.
    keep_group : callable, optional
        Called with each group as a `ScoredGroup`; one for which it is not true is dropped, counted
        as "filtered", and one more to sample. For a filter by other than equal scores,
        which `skip_zero_variance` drops before. With one rank only. A ValueError of it makes the
        group malformed.
    pack_threads : int, optional
        Threads that copy a batch on the host, the packing one among them; by default a fourth of
        the processors of this rank, at most 4. They wait, parked, between batches.
    score_group : callable, optional
        Scores groups with samples that were put with ``score=None``, before they go into a batch:
        called with the leased `shmbus.Group`, it returns a number for each sample, of which those
        that have a score keep theirs; or None, and the group is dropped as "filtered" (with one
        rank only). A coroutine function scores all groups of a take at the same time. What it
        raises is raised by `next_batch`, and the groups wait for the next call; for an
        `UnservedGroupError` the group is dropped as "filtered" (with one rank only).
    annotate_group : callable, or list of them, optional
        Adds arrays to each group before it goes into a batch, such as reference logprobs: called
        with the leased `shmbus.Group`, scored, it returns a dict of names and lists, of an array a
        sample with a row a token. They come to `Batch.extra` as `extra_fields` do, which may say
        "sequence" for one that has an array or a number a sample. A coroutine function annotates
        all groups of a take at the same time; `shmbus.Columns` is one, for annotators in processes
        of their own. Of a list, each one sees what those before it added, in `Group.columns`. What
        it raises is raised as by `score_group`.
    call_timeout : float, optional
        Seconds that a call of `score_group` or `annotate_group` may take for a group; None for any
        time. A coroutine is cancelled then, and called again, three times at the most; then, and
        for a function at once, its group is dropped as "filtered", or with several ranks an
        `UnservedGroupError` is raised. A function runs in a thread of its own under this limit, and
        wherever a batch without `prefetch` is awaited with a timeout.
    **consumer_options
        As for `shmbus.Consumer`: group_timeout, on_timeout, max_policy_lag, stale_share,
        skip_zero_variance, duplicate, max_stash_bytes, on_overflow, sample_retries, retry_timeout,
        retry_backoff, on_failure, label, daemon, on_stall, stall_timeout, prompt_schema.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not fit.
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
        on_metrics: OnMetrics | None = None,
        keep_group: Callable[[ScoredGroup], object] | None = None,
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
        on_metrics = checked_on_metrics(on_metrics)
        check_for_ranks(world_size, truncated, keep_group)
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
        if options["is_old"] is not None:
            options["is_old"].consumer = self._consumer
        try:
            #: Version and waiting trajectories of the bus as found, until the first batch.
            self._found = self._consumer.policy_version, 0
            if self._found[0] and rank == 0:
                self._found = self._found[0], self._consumer.stats().undelivered
            self._prompts = PromptOffers(
                self._consumer,
                self._planner,
                rank=rank,
                world_size=world_size,
                split=consumer_options.get("split", "train"),
                prompt_schema=consumer_options.get("prompt_schema"),
            )
            drop = functools.partial(self._consumer.drop, reason="filtered")
            limits: dict[str, Any] = {
                "drop": drop if world_size == 1 else None,
                "call_timeout_s": check_timeout(call_timeout, "call_timeout"),
            }
            self._scoring = group_scoring(
                score_group, drop_equal=bool(consumer_options.get("skip_zero_variance")), **limits
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
            self._evaluation = Evaluation(self._consumer, self._fields, self._scoring)
            max_policy_lag = consumer_options.get("max_policy_lag")
            self._admission = Admission(
                self._consumer,
                self._planner,
                self._fields,
                tokens_per_batch=tokens_per_batch,
                malformed=malformed,
                truncated=truncated,
                # A shard stays as it is: all ranks make as many batches.
                max_policy_lag=None if world_size > 1 else max_policy_lag,
                stale_share=consumer_options.get("stale_share", 0.0),
                extra_fields=options["extra_fields"],
                keep_group=keep_group,
            )
            self._metrics = HandlerMetrics(
                self._consumer,
                self._planner,
                on_metrics,
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
            # Who keeps the exception keeps this handler, which nobody was given.
            self._consumer.close()
            raise

    def _taking(self) -> Take:
        take = take_groups(self._consumer)
        if self._world_size > 1:
            step = {**self._planner.step_options(), "field": self._fields.tokens}
            take = take_shard(self._consumer, step)
        works = [work for work in (self._scoring, self._annotation) if work is not None]
        return WorkedOn(take, works, whole=self._world_size > 1) if works else take

    # -- batches --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """How many batches were yielded: the step of the next one.

        After an optimizer step it is the policy version of the samples to come, ready batches or
        not: ``handler.set_policy_version(handler.step)``.
        """
        return self._planner.step

    @property
    def closed(self) -> bool:
        """Whether the handler, or its consumer, is closed."""
        return self._closed or self._consumer.closed

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until `close`, or the end of what `offer` was given.

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
        try:
            return self.next_batch()
        except PromptsEndedError:
            raise StopIteration from None
        except shmbus.BusClosedError:
            if self.closed:
                raise StopIteration from None
            raise

    def iter(self, timeout: float | None = None) -> Iterator[Batch]:
        """Yield batches until `close` or the end of the prompts, and wait only so long for each.

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
            As for `next_batch`. It ends this iteration; another one goes on behind it.
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
            Seconds to wait for it; None waits for ever, with a note in the log every half minute
            that names what is missing. What a prompt iterator takes comes on top.

        Returns
        -------
        Batch

        Raises
        ------
        TimeoutError
            There is no batch in time: the groups that are held stay so for the next call. Or, at
            once, none can come: what this handler has requested has ended, no producer is attached,
            and nothing is on the bus. The message tells what is held and open, what was dropped
            since the last such message and why, how many batches are out, and what to do.
        EOFError
            All prompts of `offer` are trained or given up.
        ValueError
            A group is malformed, under ``malformed="raise"``. It has been dropped.
        BusClosedError
            The handler is closed, or was made before a fork.

        Notes
        -----
        After an exception, that of a signal's handler too, the next call goes on, with the same
        batch where one was on its way. What was returned is in `out` until `ack` or `give_back`.
        """
        check_timeout(timeout)
        first: list[MadeBatch[Batch] | BaseException] = []
        try:
            return self._next_batch(timeout, first)
        except BaseException:
            # It has not reached the caller.
            last = self._planner.last_out
            if last is not None and any(last is one for one in first):
                with self._locked():
                    self._planner.take_back()
            raise

    def _next_batch(
        self, timeout: float | None, handed_out: list[MadeBatch[Batch] | BaseException]
    ) -> Batch:
        """Wait for the next batch, and note what is handed out before it is."""
        began_s = time.monotonic()
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
                # Else a group had to be dropped, or a batch was recalled.
                if self._planner.ready:
                    handed_out.append(self._planner.ready[0])
                    return self._hand_out(began_s)
            if timeout is not None:
                left_s = max(0.0, began_s + timeout - time.monotonic())

    def _warn_of_earlier_run(self) -> None:
        """Warn once, before the first batch, of samples that another run may have left."""
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
        """Finish what an exception of a signal's handler has cut short in the call before."""
        planner = self._planner
        if planner.unsettled or (planner.inbox and self._prefetcher is None):
            with self._locked():
                planner.keep_leased()
                if planner.inbox:
                    self._admission.admit()

    def _make_next(self, timeout: float | None) -> bool:
        """Make the next batch, unless a group of it has to be dropped; False after the timeout."""
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
        """Wait for a batch of the thread; one that has become too old is recalled."""
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
        """Count the first batch that is ready as a step, and return it."""
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
        """Offer prompts before a wait; raises where nothing can come any more."""
        if asked and self._prompts.is_hopeless():
            raise TimeoutError(
                "no batch can come: what was requested has ended, nothing is on the bus, and no "
                f"producer is attached; {self._what_is_there()}"
            )
        return self._prompts.look(asked, deadline_s)

    def _make(self) -> None:
        """Pack the next batch of the planner; after a failure its groups still wait."""
        if self._planner.unsettled:
            # Of the groups that are left a batch may not be due.
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
        # Who polls catches many of these, and a look at the whole bus takes milliseconds.
        said = self._sentence() if timeout is None or timeout >= SENTENCE_S else ""
        return TimeoutError(
            f"no {self._awaited} within {timeout:g} s{said}; {self._what_is_there()}"
        )

    def _sentence(self) -> str:
        """Return what `shmbus status` says in its first line, as the rest of a sentence."""
        said = wait_sentence(self._consumer.name, self._planner.missing_text)
        return f": {said.removesuffix('.')}" if said else ""

    def _note_quiet(self) -> None:
        logger.warning(
            "still waiting for a %s%s; %s", self._awaited, self._sentence(), self._what_is_there()
        )

    def _what_is_there(self) -> str:
        ledger = self._consumer.stats()
        dropped = self._drops.news(ledger, self.step)
        return describe_wait(
            self._consumer.name, ledger, self._planner, dropped, self._prompts.open_text()
        )

    # -- the end of a batch ---------------------------------------------------------------------

    @property
    def out(self) -> list[Batch]:
        """The batches that the trainer has: returned, and neither acknowledged nor given back."""
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
            It was acknowledged or given back already, or is not of this handler.

        Notes
        -----
        After an exception of a signal's handler, such as KeyboardInterrupt, call it again: it does
        what is left to do, or raises ProtocolError since nothing is.

        To lose nothing when the trainer returns to a checkpoint, save ``state_dict()`` before you
        acknowledge the batches that it covers.
        """
        self._require_out(batch, "ack")
        # Those that are acknowledged were so by a call that was interrupted.
        self._consumer.ack([group for group in batch.groups if group.state != "acknowledged"])
        self._planner.acknowledged(batch.step)

    def give_back(self, batch: Batch) -> None:
        """Return a batch that was not trained on; the next batch is made from its groups.

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
        # Not to the consumer: groups that wait here would be delivered before them.
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
        # A copy on another device has the list of the original.
        if out is not None and out.groups is batch.groups:
            return
        if all(group.state == "acknowledged" for group in batch.groups):
            why = "it was acknowledged already"
        else:
            why = "it was given back already, or another handler yielded it"
        raise shmbus.ProtocolError(
            f"cannot {verb} batch {batch.step}: it is not out: {why}; each batch of this handler "
            "ends once"
        )

    # -- prompts --------------------------------------------------------------------------------

    def request(
        self, instance_id: str | int, *, round: int | None = None, split: str = "train", **more: Any
    ) -> int:
        """Offer one group to the workers, as `shmbus.Consumer.request` does, which says how.

        After `load_state_dict` a trainer goes over its data again, from where the checkpoint stood.
        What it had offered after that and the bus has still is not offered twice.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key.
        round : int, optional
            Which repetition of the prompt this is.
        split : str, default "train"
            What the group is for.
        **more
            All others of `shmbus.Consumer.request`, the prompt's fields too.

        Returns
        -------
        int
            The request's number; 0 where it was offered before the restart.
        """
        return self._prompts.request(instance_id, round=round, split=split, **more)

    def offer(self, prompts: Any, ahead: int = 2, group_size: int = 8) -> None:
        """Keep prompts open for the workers, whatever becomes of each, from now to their end.

        `next_batch` goes on offering, before it waits and while it does. What counts is what is
        open or on its way to a batch, so a group that fails, is late, stale, malformed or filtered
        is replaced. Prompts from others, such as a `Feeder`, count too.

        `state_dict` has the position. After `load_state_dict`, which comes first, the same call,
        with the same data from their start in the same order, goes on at the exact prompt: each is
        trained at most once, and none is left out but those that were given up. A prompt's round,
        `round` of a `Request`, is its place in all that was offered, so an id may come again.

        With several ranks the call is made on each: rank 0 offers for all, and it does nothing on
        others.

        Parameters
        ----------
        prompts : iterable, or data set with a length and ``__getitem__``
            Of dicts, or of (id, prompt) pairs. A dict may have ``instance_id`` (its place by
            default), ``group_size``, ``need``, ``priority`` and ``meta``. Of the others, arrays, a
            list ``prompt`` of token ids, and what ``prompt_schema`` has are the request's fields;
            all else, such as text, is put into its meta. An iterator's `next` is called by
            `next_batch`, which waits for it; give a DataLoader (``batch_size=None``) to have that
            done ahead. One with `load_state_dict`, as torchdata's StatefulDataLoader, goes on by
            that; another is gone through again.
        ahead : int, default 2
            How many batches' worth of prompts are kept open when a batch is waited for, so one less
            while it is trained; those of ready batches, of `prefetch`, are not counted. A batch is
            `groups_per_batch` of each rank; or `tokens_per_batch` by the mean of the last 64
            groups' tokens, and 8 groups until the first has come.
        group_size : int, default 8
            Samples of each group that does not say it itself.

        Raises
        ------
        TypeError, ValueError
            An argument is wrong, or the data are others than those of the checkpoint. A prompt that
            is wrong is left out, and its error is raised once, here or by `next_batch`, which goes
            on behind it.
        Exception
            What the iterator raises, here or by `next_batch`, which goes on at the same prompt.

        Notes
        -----
        When there are no more prompts, and nothing is open or on its way, ``for batch in handler``
        ends, and `next_batch` raises EOFError. The last batch has the groups that are left, with
        `groups_per_batch` too; with several ranks, those that do not fill a step stay on the bus,
        and rank 0 alone is told.

        Called again, it goes on at the same position, or, where all had been offered, begins anew.
        """
        self._prompts.offer(prompts, ahead, group_size)

    @property
    def restored_requests(self) -> RestoredRequests | None:
        """What `load_state_dict` did with requests; None before, and on ranks other than 0."""
        return self._prompts.restored

    # -- evaluation -----------------------------------------------------------------------------

    def take(
        self, split: str = "eval", *, max_groups: int = MOST_AT_ONCE, timeout: float | None = 0.1
    ) -> list[shmbus.Group]:
        """Take complete groups of another split than "train", as `shmbus.Consumer.take` does.

        Parameters
        ----------
        split : str, default "eval"
            As `request` or `shmbus.Producer.put` was given it.
        max_groups : int, default 64
            The most to take.
        timeout : float, optional
            Seconds to wait for the first: None waits for ever, 0 does not wait.

        Returns
        -------
        list of shmbus.Group
            To be acknowledged by the caller: ``with group:`` does. With a `score_group` they are
            scored; what it raises is raised here, and they are given back.

        Raises
        ------
        ValueError
            The split is "train", whose groups come as batches.
        TypeError, BusClosedError, BusRemovedError, StallError, DaemonUnavailableError
            As for `shmbus.Consumer.take`.
        """
        return self._evaluation.take(split, max_groups=max_groups, timeout=timeout)

    def evaluate(
        self, groups: int, *, timeout: float | None = None, split: str = "eval"
    ) -> dict[str, float]:
        """Take groups of another split, acknowledge them, and return figures to log.

        Offer them by `request` with ``split="eval"`` and a high priority, so that workers take them
        first. No batch is made meanwhile: keep no more prompts for training in the lane than the
        bus has room for, or call this with ``timeout=0`` between steps, for what there is.

        Parameters
        ----------
        groups : int
            How many to take.
        timeout : float, optional
            Seconds to wait for all of them together: None waits for ever, 0 does not wait.
        split : str, default "eval"
            Which.

        Returns
        -------
        dict of str to float
            By names that begin with the split: ``eval/groups``, which is less than asked for where
            the time was over first, and, of what came, ``eval/samples``; ``eval/reward/mean`` and
            ``/std``, and ``/best``, the mean of each group's best sample; ``eval/length/mean`` in
            tokens; ``eval/lag/mean`` and ``/max`` in versions.

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
        """Groups for training that were dropped since the handler was made: so many to replace.

        For any reason, on the whole bus: failed, late, stale, too many, malformed, truncated,
        without variance, refused by `keep_group` or `score_group`. `offer` replaces them itself;
        workers that choose their prompts read the same count by `Producer.groups_dropped`.
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
        """Groups that were dropped under ``truncated="drop"``."""
        return self._admission.truncated_groups

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return figures of the batches since the last call, for a logger of experiments.

        Parameters
        ----------
        prefix : str
            Put before each name, such as "rollout/".

        Returns
        -------
        dict[str, float]
            The names are in docs/trainer.md. Those of batches are left out where there was none
            since the last call. Truncated samples are counted from the first call on.

        Raises
        ------
        BusClosedError
            The handler is closed.

        Examples
        --------
        ``wandb.log(handler.metrics())``, ``mlflow.log_metrics(handler.metrics(), step=batch.step)``
        or ``for name, value in handler.metrics().items(): writer.add_scalar(name, value, step)``.
        """
        return self._metrics.read(prefix)

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
            It is no int, negative, or goes back. `load_state_dict` may set it back.
        """
        self._consumer.policy_version = version
        self._found = 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, so that no trajectory is repeated or skipped.

        Batches that were yielded count as trained, acknowledged or not, as for torch's
        StatefulDataLoader; give back what of `out` the trainer has lost. A daemon is asked for the
        requests; where it is gone, that is a DaemonUnavailableError, and nothing is lost.

        Returns
        -------
        dict
            Plain ints, strs and lists, for any serialiser. With requests that are not trained it
            has these too, with their prompts; of several ranks, rank 0 has them.
        """
        self._prompts.settle()
        # Behind what is left of a checkpoint, since that may end while this goes on.
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
        """Continue from a checkpoint. Its policy version is set, even if it is a lower one.

        Requests that it had not trained and that the bus has not are offered again. Those that were
        offered after it was saved, and that the bus has, are not offered again by `request`.

        Parameters
        ----------
        state : dict or list of dict
            From `state_dict` of any rank, of a job of any world size; or those of several of its
            ranks, saved at one step.

        Raises
        ------
        ValueError
            It is not a handler's state, or of another version, or a list of several steps; or it is
            of another data set than `offer` was given, or of another rank.
        """
        saved = HandlerState.parse(state)
        self._found = 0, 0
        self._prompts.restore_position(saved.offer)
        self._consumer.reset_policy_version(saved.policy_version)
        with self._locked():
            self._admission.trained = saved.trained
            self._planner.begin_at(saved.step, time.monotonic())
            self._admission.return_trained()
            self._consumer.end_trained(saved.trained)
            if self._prefetcher is not None:
                self._prefetcher.wake()
        self._prompts.restore_requests(saved.requests, saved.bus == self._identity)

    def close(self) -> None:
        """Leave the bus. Groups that are not acknowledged are delivered to the next reader.

        It may be called twice; after an exception of a signal's handler, call it again.
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
        self._packer.close()
        self._evaluation.close()
        self._consumer.close()

    @property
    def transport(self) -> str:
        """How batches are moved to their device: "cpu", "gather", "pinned" or "copy"."""
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

    def __enter__(self) -> OnlineDataHandler:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()
