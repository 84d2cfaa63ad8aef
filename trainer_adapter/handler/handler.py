"""OnlineDataHandler: the bus as an iterator of batches.

Invariants:

- A batch holds whole groups. They stay leased until `ack`, so a trainer that dies before gets all
  of them again.
- A group that was taken is in exactly one place, which the planner keeps, until it ends.
- An exception of a signal's handler, which may come between any two steps, loses no group and
  leaves nothing half done: the same call, or the next one, finishes what was cut short.
- After `load_state_dict`, samples that the checkpoint had trained are acknowledged and not yielded.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, cast

import torch

import shmbus
from shmbus._arguments import check_timeout
from shmbus.batch.field_presence import MixedLogprobsError
from shmbus.inspect.stall_report import wait_sentence
from trainer_adapter._arguments import (
    check_choices,
    check_consumer_options,
    check_for_ranks,
    check_packing,
    checked_budget,
    checked_max_wait,
    checked_pack_threads,
)
from trainer_adapter.advantages import Kind
from trainer_adapter.batches.batch import Batch, Layout, UnseenBatch
from trainer_adapter.batches.extra_fields import ExtraFields, GivenExtraFields
from trainer_adapter.batches.finite import NotFiniteError, group_of_sample
from trainer_adapter.batches.pack import FieldNames
from trainer_adapter.batches.sample_flags import Truncated
from trainer_adapter.gpu.packer import GpuPacker, packer_on
from trainer_adapter.handler.admission import Admission
from trainer_adapter.handler.checkpoint import HandlerState
from trainer_adapter.handler.consumer_options import ConsumerOptions
from trainer_adapter.handler.drops import DropNotes
from trainer_adapter.handler.evaluation import EvaluatingHandler
from trainer_adapter.handler.iteration import BatchIteration
from trainer_adapter.handler.metrics import MeteredHandler, OnMetrics, checked_on_metrics
from trainer_adapter.handler.planner import BatchPlanner, MadeBatch
from trainer_adapter.handler.prefetch import Prefetcher
from trainer_adapter.handler.progress import Progress, describe_wait
from trainer_adapter.handler.requests import RequestingHandler
from trainer_adapter.handler.scoring import ScoreGroup, ScoringHandler
from trainer_adapter.handler.take import QUIET_NOTE_S, Take, take_groups, take_shard, take_until_due
from trainer_adapter.scored_group import ScoredGroup

if TYPE_CHECKING:
    # Of no package that is needed at run time; typing has it from Python 3.11 on.
    from typing_extensions import Unpack

__all__ = ["OnlineDataHandler"]

logger = logging.getLogger(__name__)

#: Seconds of a timeout from which its error says what stands in the way.
SENTENCE_S: Final = 0.2


class OnlineDataHandler(
    MeteredHandler, RequestingHandler, EvaluatingHandler, ScoringHandler, BatchIteration
):
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
    layout : "packed" | "padded"
        All sequences in one row, with `Batch.cu_seqlens` for their borders; or a row for each,
        padded to the longest.
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
    truncated : "keep" | "mask" | "drop"
        Treatment of truncated samples, whose ``meta["finish_reason"]`` is "length", "max_tokens" or
        "abort": train them as others; leave them out of the loss, while their scores still count
        for their groups; or drop their whole group, since a batch holds whole groups only.
        `truncated_groups` counts the groups dropped so; the ledger has them under "malformed".
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
        raises is raised by `next_batch`, and the groups wait for the next call.
    **consumer_options
        As for `shmbus.Consumer`: group_timeout, on_timeout, max_policy_lag, skip_zero_variance,
        duplicate, max_stash_bytes, on_overflow, sample_retries, retry_timeout, retry_backoff,
        on_failure, label, daemon, on_stall, stall_timeout, prompt_schema.

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
        prefetch: int = 0,
        progress: bool | TextIO = False,
        extra_fields: GivenExtraFields | None = None,
        on_metrics: OnMetrics | None = None,
        keep_group: Callable[[ScoredGroup], object] | None = None,
        pack_threads: int | None = None,
        score_group: ScoreGroup | None = None,
        **consumer_options: Unpack[ConsumerOptions],
    ) -> None:
        tokens_per_batch = checked_budget(tokens_per_batch, groups_per_batch)
        check_choices(layout=layout, malformed=malformed, truncated=truncated)
        check_consumer_options(consumer_options, OnlineDataHandler)
        self._on_metrics = checked_on_metrics(on_metrics)
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
            "extra_fields": ExtraFields.of(extra_fields),
            "pack_threads": checked_pack_threads(pack_threads, world_size),
        }
        self._packer = packer_on(on_device, **options)
        self._gpu = self._packer if isinstance(self._packer, GpuPacker) else None
        self._planner: BatchPlanner[Batch] = BatchPlanner(
            tokens_per_batch, groups_per_batch, max_wait_s, world_size
        )
        self._begin_requests(
            rank=rank,
            world_size=world_size,
            split=consumer_options.get("split", "train"),
            prompt_schema=consumer_options.get("prompt_schema"),
        )
        self._consumer = shmbus.Consumer(bus, rank=rank, world_size=world_size, **consumer_options)
        try:
            self._begin_scoring(score_group, world_size, consumer_options)
            self._admission = Admission(
                self._consumer,
                self._planner,
                self._fields,
                tokens_per_batch=tokens_per_batch,
                malformed=malformed,
                truncated=truncated,
                # A shard stays as it is: all ranks make as many batches.
                max_policy_lag=None if world_size > 1 else consumer_options.get("max_policy_lag"),
                extra_fields=options["extra_fields"],
                keep_group=keep_group,
            )
            self._begin(world_size, prefetch, consumer_options.get("max_policy_lag"))
        except BaseException:
            # Who keeps the exception keeps this handler, which nobody was given.
            self._consumer.close()
            raise

    def _begin(self, world_size: int, prefetch: int, max_policy_lag: int | None) -> None:
        self._begin_evaluation()
        self._begin_metrics()
        self._awaited = "batch" if world_size == 1 else "step"
        self._take = self._taking(world_size)
        self._prefetcher = (
            Prefetcher(self._planner, prefetch, self._take, self._admission.admit, self._make)
            if prefetch
            else None
        )
        self._drops = DropNotes(self._consumer.stats(), max_policy_lag)
        with shmbus.Bus.open(self._consumer.name) as handle:
            self._identity = handle.identity

    def _taking(self, world_size: int) -> Take:
        if world_size == 1:
            return self._scored(take_groups(self._consumer))
        step = self._planner.step_options()
        return self._scored(take_shard(self._consumer, {**step, "field": self._fields.tokens}))

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

    def next_batch(self, timeout: float | None = None) -> Batch:
        """Wait for the next batch.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for it; None waits for ever, with a note in the log every half minute
            that names what is missing. What a prompt iterator or `score_group` takes comes on top.

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
        A batch that nobody keeps, and at which nobody has looked, was not delivered: as after an
        exception on its way, it is the next one again, of the same step.
        """
        check_timeout(timeout)
        began_s = time.monotonic()
        self._settle()
        left_s = timeout
        while True:
            if self._prefetcher is None:
                there = self._make_next(left_s)
            else:
                there = self._wait_for_ready(self._prefetcher, left_s)
            if not there:
                raise self._timeout_error(timeout)
            self._measure(time.monotonic() - began_s)
            with self._locked():
                # Else a group had to be dropped, or a batch was recalled.
                if self._planner.ready:
                    return self._hand_out(began_s)
            if timeout is not None:
                left_s = max(0.0, began_s + timeout - time.monotonic())

    def _settle(self) -> None:
        """Finish what an exception of a signal's handler has cut short in the call before."""
        self._take_back_unseen()
        planner = self._planner
        if planner.unsettled or (planner.inbox and self._prefetcher is None):
            with self._locked():
                planner.keep_leased()
                if planner.inbox:
                    self._admission.admit()

    def _take_back_unseen(self) -> None:
        """Have the batch that was handed out last come again, if it never reached anybody.

        Nobody has looked at it, and nobody but the planner refers to it: an exception was raised on
        its way out.
        """
        made = self._planner.last_out
        # References: the attribute's, and the argument of getrefcount.
        if (
            made is not None
            and type(made.batch) is UnseenBatch
            and sys.getrefcount(made.batch) == 2
        ):
            with self._locked():
                self._planner.take_back()

    def _make_next(self, timeout: float | None) -> bool:
        """Make the next batch, unless a group of it has to be dropped; False after the timeout."""
        planner, admission = self._planner, self._admission
        if self._ready_is_stale():
            planner.recall(time.monotonic())
        if not planner.ready:
            admission.return_stale()
            look = self._look_at_prompts
            if not take_until_due(
                planner, self._take, admission.admit, timeout, self._note_quiet, look
            ):
                return False
            self._make()
        return True

    def _wait_for_ready(self, prefetcher: Prefetcher, timeout: float | None) -> bool:
        """Wait for a batch of the thread; one that has become too old is recalled."""
        prefetcher.require_own_process()
        if not prefetcher.wait(timeout, QUIET_NOTE_S, self._note_quiet, self._look_at_prompts):
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
        """Count the first batch that is ready as a step, and return it.

        No frame has it in a variable on the way out: who catches an exception may keep the frames.
        """
        first = self._planner.ready[0]
        if isinstance(first, MadeBatch):
            first.batch.step = self._planner.step
            if self._gpu is not None:
                self._gpu.deliver(first.batch)
            self.progress.note(first.batch, time.monotonic() - began_s, self._consumer)
            first.batch = UnseenBatch.of(first.batch)
            if self._world_size > 1:
                self._consumer.note_trained(
                    [one.group for one in first.planned], self._planner.step
                )
        if self._prefetcher is not None:
            self._prefetcher.wake()
        return self._planner.hand_out(self._planner.step)

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
        except NotFiniteError as error:
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

    def _hopeless_text(self) -> str:
        return (
            "no batch can come: what was requested has ended, nothing is on the bus, and no "
            f"producer is attached; {self._what_is_there()}"
        )

    def _what_is_there(self) -> str:
        ledger = self._consumer.stats()
        dropped = self._drops.news(ledger, self.step)
        return describe_wait(
            self._consumer.name, ledger, self._planner, dropped, self._open_prompts()
        )

    # -- the end of a batch ---------------------------------------------------------------------

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, so that no trajectory is repeated or skipped.

        Batches that were yielded count as trained, acknowledged or not, as for torch's
        StatefulDataLoader. One that never reached the trainer, since an exception of a signal's
        handler was raised on its way, does not; it is the next one again. A daemon is asked for the
        requests; where it is gone, that is a DaemonUnavailableError, and nothing is lost.

        Returns
        -------
        dict
            Plain ints, strs and lists, for any serialiser. With requests that are not trained it
            has these too, with their prompts; of several ranks, rank 0 has them.
        """
        self._take_back_unseen()
        self._settle_offer()
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
            self._requests_to_save(Counter(known.groups)),
            self._offer_to_save(),
            self._groups_to_save(),
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
        self._restore_offer(saved.offer)
        self._consumer.reset_policy_version(saved.policy_version)
        self._take_back_unseen()
        with self._locked():
            self._admission.trained = saved.trained
            self._planner.begin_at(saved.step, time.monotonic())
            self._admission.return_trained()
            self._consumer.end_trained(saved.trained)
            if self._prefetcher is not None:
                self._prefetcher.wake()
        self._restore_requests(saved.requests, saved.bus == self._identity)

    def close(self) -> None:
        """Leave the bus. Groups that are not acknowledged are delivered to the next reader.

        It may be called twice; after an exception of a signal's handler, call it again.
        """
        self._closed = True
        self.progress.end()
        if self._prefetcher is not None:
            if self._prefetcher.forked:
                # The thread may have held the reader's lock at the time of the fork.
                return
            self._end_scoring()
            self._prefetcher.stop()
        self._end_scoring()
        self._packer.close()
        self._end_evaluation()
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
