"""OnlineDataHandler: the bus as an iterator of batches.

Invariants:

- A batch holds whole groups. What it was made of stays leased until `ack`, so a trainer that dies
  before that finds all of it again.
- A group is in exactly one place: held over for the next batch, in a batch that is ready or out,
  or ended.
- After `load_state_dict`, what the checkpoint had trained already is acknowledged and not yielded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from types import TracebackType
from typing import Any, Final, Literal, TextIO

import torch
from torch.utils.data import IterableDataset, get_worker_info

import shmbus
from shmbus.batch.gather import sequence_lengths
from trainer_adapter._arguments import (
    check_choices,
    check_consumer_options,
    check_count,
    check_device,
    check_fields,
    check_for_ranks,
    check_lengths,
    check_prefetch,
    check_scores,
    check_wait,
    group_of_sample,
    what_a_step_needs,
)
from trainer_adapter.advantages import Kind, check_kind
from trainer_adapter.batches.finite import NotFiniteError
from trainer_adapter.batches.pack import Batch, BatchMemory, FieldNames, Layout, pack
from trainer_adapter.batches.sample_flags import Truncated, is_truncated
from trainer_adapter.gpu.packer import GpuPacker
from trainer_adapter.handler.backlog import Backlog, Held
from trainer_adapter.handler.checkpoint import HandlerState, identities
from trainer_adapter.handler.maker import HandlerMaker
from trainer_adapter.handler.prefetch import Prefetcher
from trainer_adapter.handler.progress import Progress

__all__ = ["OnlineDataHandler"]

logger = logging.getLogger(__name__)

#: Tokens of a batch where nothing is said.
DEFAULT_TOKENS_PER_BATCH: Final = 65_536
#: Seconds that a batch with a token budget waits to be filled, once it has a group.
DEFAULT_MAX_WAIT_S: Final = 1.0
#: Seconds between two notes in the log while no complete group comes.
QUIET_NOTE_S: Final = 30.0
#: Groups taken from the bus at a time.
TAKE_GROUPS: Final = 64


class OnlineDataHandler(IterableDataset[Batch]):
    """Takes complete groups from a bus and yields them as batches of tensors.

    It is a torch `IterableDataset`, for a DataLoader with ``batch_size=None`` and no workers.

    Parameters
    ----------
    bus : str
        The bus.
    tokens_per_batch : int, optional
        A batch holds as many whole groups as fit into this many tokens, 65,536 by default. Padding
        is not counted, in the padded layout neither. A single group larger than that comes alone;
        a single *sequence* longer than that is malformed.
    groups_per_batch : int, optional
        Instead: exactly so many groups.
    advantages : "grpo" | "dr_grpo" | "rloo" | "none" or callable
        As for `group_advantages`.
    layout : "packed" | "padded"
    device : torch.device or str
    rank, world_size : int
        This rank gets its shard of each step: disjoint from the others', balanced by tokens, and
        formed once each rank gets a group. More than one need the daemon (`shmbus serve`); a rank
        that starts again gets what it had not acknowledged before anything else, as the same
        batches. A shard stays what it was formed of: `max_policy_lag` is looked at before.
    max_wait : float, optional
        Seconds after the first group of a batch when it is yielded though it is not full, and each
        rank has a group; None waits until it is. By default 1 for a token budget, and None for a
        number of groups.
    fields : FieldNames, optional
        How producers call the arrays.
    malformed : "raise" | "drop"
        A group whose arrays do not fit together is dropped and counted in either case; "raise"
        also raises its ValueError, once, and iteration can go on.
    truncated : "keep" | "mask" | "drop"
        What becomes of samples that did not come to their own end, as their
        ``meta["finish_reason"]`` says ("length", "max_tokens" or "abort"): trained like others;
        left out of the loss, while their scores still count for their groups; or dropped with
        their whole group, since a batch holds whole groups only. `truncated_groups` counts groups
        so dropped; the ledger has them under "malformed".
    prefetch : int
        Batches that a thread has ready, on their device, while the step runs; 0, the default, for
        none and no thread. A batch is ready only when it is full; while the trainer waits, also
        when `max_wait` is over. Those that `set_policy_version` made too old are made anew, but for
        shards.
    progress : bool or file
        Write a line of progress to stderr, or to a file; also as ``handler.progress.line``.
    **consumer_options
        As for `shmbus.Consumer`: group_timeout, on_timeout, max_policy_lag, skip_zero_variance,
        duplicate, max_stash_bytes, on_overflow, sample_retries, retry_timeout, on_failure,
        on_stall, stall_timeout.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not fit.
    BusNotFoundError, BusBusyError, LayoutMismatchError
        As for `shmbus.Consumer`.
    """

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
        **consumer_options: Any,
    ) -> None:
        if tokens_per_batch is not None and groups_per_batch is not None:
            raise ValueError(
                "expected one of tokens_per_batch and groups_per_batch, got both; drop one"
            )
        if groups_per_batch is None and tokens_per_batch is None:
            tokens_per_batch = DEFAULT_TOKENS_PER_BATCH
        check_count("tokens_per_batch", tokens_per_batch)
        check_count("groups_per_batch", groups_per_batch)
        check_choices(layout=layout, malformed=malformed, truncated=truncated)
        check_prefetch(prefetch)
        check_consumer_options(consumer_options)
        if world_size != 1:
            check_for_ranks(truncated)
        if max_wait == "auto":
            max_wait = None if tokens_per_batch is None else DEFAULT_MAX_WAIT_S
        check_wait("max_wait", max_wait)
        check_fields(fields)
        on_gpu = check_device(device).type == "cuda"
        check_kind("advantages", advantages)
        self.tokens_per_batch = tokens_per_batch
        self.groups_per_batch = groups_per_batch
        self.step = 0
        self._advantages = advantages
        self._layout = layout
        self._device = device
        self._max_wait = max_wait
        self._fields = fields or FieldNames()
        self._malformed = malformed
        self._memory = BatchMemory()
        self._held = Backlog(tokens_per_batch, groups_per_batch, sharded=world_size != 1)
        self._out: dict[int, Batch] = {}
        self._trained: set[tuple[int, int]] = set()
        self._truncated: Truncated = truncated
        self.truncated_groups = 0
        self.progress = Progress.of(progress)
        self._max_lag: int | None = consumer_options.get("max_policy_lag")
        self._closed = False
        self._gpu = None
        if on_gpu:
            self._gpu = GpuPacker(
                device, advantages=advantages, layout=layout, fields=fields, truncated=truncated
            )
        self._sharded = world_size != 1
        self._world_size = world_size
        self._awaited = "step" if self._sharded else "complete group"
        self._prefetcher = Prefetcher(HandlerMaker(self), prefetch, max_wait) if prefetch else None
        self._consumer = shmbus.Consumer(bus, rank=rank, world_size=world_size, **consumer_options)
        with shmbus.Bus.open(bus) as handle:
            self._created_unix_ns = handle.created_unix_ns

    # -- batches --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches for ever, until `close`; an exception does not end the iteration."""
        if get_worker_info() is not None:
            raise RuntimeError(
                "OnlineDataHandler: expected to be iterated by the process that made it, got a "
                "DataLoader's worker; pass num_workers=0, and prefetch=1 to have batches ready"
            )
        return self

    def __next__(self) -> Batch:
        try:
            return self.next_batch()
        except shmbus.BusClosedError:
            if self._closed or self._consumer.closed:
                raise StopIteration from None
            raise

    def next_batch(self, timeout: float | None = None) -> Batch:
        """Wait for the next batch.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for its first group; None waits for ever, with a note in the log every
            half minute that says what is missing.

        Returns
        -------
        Batch

        Raises
        ------
        TimeoutError
            No complete group came; the message says what is in the stash.
        ValueError
            A malformed group came, under ``malformed="raise"``. It has been dropped.
        BusClosedError
            The handler is closed, or was made before a fork.
        """
        check_wait("timeout", timeout)
        began = time.monotonic()
        batch = None
        while batch is None:
            if self._prefetcher is not None:
                batch = self._next_ready(self._prefetcher, timeout)
            else:
                self._return_stale()
                batch = self._make(self._choose(timeout))
        try:
            if self._gpu is not None:
                self._gpu.deliver(batch)
            batch.step = self.step
            self.progress.note(batch, time.monotonic() - began, self._consumer)
            self._out[batch.step] = batch
            self.step = batch.step + 1
        except BaseException:
            # A Ctrl-C, for instance: nobody has the batch.
            self._out.pop(batch.step, None)
            self._hold_first(batch)
            raise
        return batch

    def _next_ready(self, prefetcher: Prefetcher, timeout: float | None) -> Batch | None:
        """Return the batch that the thread has ready; None for one that has become too old."""
        prefetcher.require_own_process()
        batch = prefetcher.next(timeout, QUIET_NOTE_S, self._note_quiet)
        if batch is None:
            raise TimeoutError(f"no {self._awaited} within {timeout:g} s; {self._waiting()}")
        if self._stale_among(batch.groups):
            with prefetcher.lock:
                prefetcher.put_back(batch)
                prefetcher.recall()
                self._return_stale()
            return None
        return batch

    def _make(self, chosen: list[Held]) -> Batch | None:
        """Pack groups; whatever goes wrong, they are held again. None if one had to be dropped."""
        groups = [held.group for held in chosen]
        try:
            if self._gpu is not None:
                return self._gpu.pack(groups)
            return pack(
                groups,
                advantages=self._advantages,
                layout=self._layout,
                device=self._device,
                fields=self._fields,
                memory=self._memory,
                truncated=self._truncated,
            )
        except NotFiniteError as error:
            group = chosen.pop(group_of_sample(groups, error.sample)).group
            self._held.put_back(chosen)
            group.drop()
            logger.warning("dropped group %r: %s", group.instance_id, error)
            if self._malformed == "raise":
                raise
            return None
        except BaseException:
            self._held.put_back(chosen)
            raise

    def _stale_among(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        # A shard stays what it is: a rank that made its own smaller would leave the others' steps.
        if self._max_lag is None or self._sharded:
            return []
        bound = self._consumer.policy_version - self._max_lag
        return [g for g in groups if min(t.policy_version for t in g.trajectories) < bound]

    def _return_stale(self) -> None:
        """Give held groups that became too old to the Consumer, which drops and counts them."""
        stale = self._stale_among(self._held.groups)
        if stale:
            self._held.keep(lambda group: group not in stale)
            for group in stale:
                group.give_back()

    def _choose(self, timeout: float | None) -> list[Held]:
        """Collect groups until the budget is used, or max_wait after the first is over."""
        if self._sharded:
            return self._choose_shard(timeout)
        began = noted = time.monotonic()
        first_came: float | None = None
        while True:
            if self._held.full:
                return self._held.cut()
            now = time.monotonic()
            if self._held:
                first_came = first_came or now
                left = None if self._max_wait is None else first_came + self._max_wait - now
                if left is not None and left <= 0:
                    return self._held.cut()
            else:
                left = None if timeout is None else began + timeout - now
                if left is not None and left <= 0:
                    raise TimeoutError(f"no complete group within {timeout:g} s; {self._waiting()}")
            quiet_left = noted + QUIET_NOTE_S - now
            groups = self._consumer.take(
                TAKE_GROUPS, quiet_left if left is None else min(left, max(quiet_left, 0.0))
            )
            self._hold_all(groups)
            if groups:
                noted = time.monotonic()
            elif time.monotonic() >= noted + QUIET_NOTE_S:
                noted = time.monotonic()
                self._note_quiet()

    def _choose_shard(self, timeout: float | None) -> list[Held]:
        """Take this rank's shard of the next step, as the daemon has shared it out."""
        began = noted = time.monotonic()
        while not self._held:
            left = noted + QUIET_NOTE_S - time.monotonic()
            if timeout is not None:
                left = min(left, began + timeout - time.monotonic())
            groups = self._consumer.take_step(**self._step_options(), timeout=max(left, 0.0))
            self._hold_all(groups)
            now = time.monotonic()
            if not groups and timeout is not None and now >= began + timeout:
                raise TimeoutError(f"no {self._awaited} within {timeout:g} s; {self._waiting()}")
            if not groups and now >= noted + QUIET_NOTE_S:
                noted = now
                self._note_quiet()
        return self._held.cut()

    def _step_options(self) -> dict[str, Any]:
        """Return what all ranks ask for a step with."""
        return {
            "groups": self.groups_per_batch,
            "tokens": self.tokens_per_batch,
            "max_wait": self._max_wait,
            "field": self._fields.tokens,
        }

    def _hold_all(self, groups: list[shmbus.Group]) -> None:
        """Keep what was taken for the next batches; the first malformed group raises at the end."""
        groups = self._without_trained(groups)
        if self._truncated == "drop":
            cut = [group for group in groups if is_truncated(group)]
            self._consumer.drop(cut)
            self.truncated_groups += len(cut)
            groups = [group for group in groups if group.state == "leased"]
        if not groups:
            return
        try:
            self._held.add(self._measure(groups))
        except (TypeError, ValueError):
            self._hold_each(groups)

    def _hold_each(self, groups: list[shmbus.Group]) -> None:
        wrong: Exception | None = None
        good: list[tuple[shmbus.Group, int]] = []
        try:
            for group in groups:
                try:
                    good += self._measure([group])
                except (TypeError, ValueError) as error:
                    group.drop()
                    logger.warning("dropped group %r: %s", group.instance_id, error)
                    wrong = wrong or error
        finally:
            self._held.add(good)
        if wrong is not None and self._malformed == "raise":
            raise wrong

    def _measure(self, groups: list[shmbus.Group]) -> list[tuple[shmbus.Group, int]]:
        """Pair each group with its tokens; raises if one of them is malformed."""
        trajectories = [t for group in groups for t in group.trajectories]
        lengths = sequence_lengths(trajectories, self._fields)
        check_scores(trajectories)
        if self.tokens_per_batch is not None and max(lengths) > self.tokens_per_batch:
            check_lengths(trajectories, lengths, self.tokens_per_batch)
        left = iter(lengths)
        return [(group, sum(islice(left, len(group.trajectories)))) for group in groups]

    def _without_trained(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        """Acknowledge what a checkpoint had trained; return the others."""
        if self._trained:
            self._consumer.ack([group for group in groups if self._was_trained(group)])
        return [group for group in groups if group.state == "leased"]

    def _was_trained(self, group: shmbus.Group) -> bool:
        samples = identities([group])
        trained = samples <= self._trained
        if trained:
            self._trained -= samples
        return trained

    def _note_quiet(self) -> None:
        logger.warning("still waiting for a %s; %s", self._awaited, self._waiting())

    def _waiting(self) -> str:
        """Describe what is there instead of a batch, for a message."""
        ledger = self._consumer.stats()
        text = (
            f"bus {self._consumer.name!r} has {ledger.groups_open} incomplete groups with "
            f"{ledger.stashed} trajectories, {ledger.in_ring} unread, {ledger.producers} producers "
            f"attached, {len(self._held)} groups held for the next batch"
        )
        if self._sharded:
            text += "; " + what_a_step_needs(
                self._world_size,
                self.groups_per_batch,
                self.tokens_per_batch,
                self._max_wait,
                ledger.leased,
            )
        return text

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
            It was acknowledged or given back before, or came from elsewhere.

        Notes
        -----
        To lose nothing, save ``state_dict()`` before the batches that it covers are acknowledged.
        """
        self._require_out(batch, "ack")
        self._consumer.ack(batch.groups)
        del self._out[batch.step]

    def give_back(self, batch: Batch) -> None:
        """Return a batch that was not trained on; its groups are the next to be delivered.

        Parameters
        ----------
        batch : Batch
            One that this handler yielded, and that is neither acknowledged nor given back.
        """
        self._require_out(batch, "give back")
        # Not to the consumer: groups that are held here would be delivered before them.
        self._hold_first(batch)
        del self._out[batch.step]

    def _hold_first(self, batch: Batch) -> None:
        """Hold the groups of a batch that is not out, before all others."""
        with self._guard():
            if self._prefetcher is not None:
                # What is ready comes after it, so that is made anew.
                self._prefetcher.recall()
            self._unmake(batch)

    def _unmake(self, batch: Batch) -> None:
        self._held.put_first(
            (group, sum(sequence_lengths(group.trajectories, self._fields)))
            for group in batch.groups
        )

    def _guard(self) -> AbstractContextManager[Any]:
        """Enter what guards the groups that are held, where a thread works with them too."""
        if self._prefetcher is None:
            return nullcontext()
        self._prefetcher.require_own_process()
        return self._prefetcher.lock

    def _require_out(self, batch: Batch, verb: str) -> None:
        if not isinstance(batch, Batch):
            raise TypeError(f"cannot {verb} it: expected a Batch, got {type(batch).__name__}")
        if self._out.get(batch.step) is not batch:
            raise shmbus.ProtocolError(
                f"cannot {verb} batch {batch.step}: it is not out; each batch of this handler ends "
                "once"
            )

    # -- state ----------------------------------------------------------------------------------

    def set_policy_version(self, version: int) -> None:
        """Tell the producers, and the filter of stale groups, the current policy version.

        Parameters
        ----------
        version : int
            0 or more.
        """
        self._consumer.policy_version = version

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to neither repeat nor skip a trajectory.

        Batches that were yielded count as trained, acknowledged or not, as for torch's
        StatefulDataLoader. Plain ints, strs and lists, for any serialiser.
        """
        with self._guard():
            trained = set(self._trained)
        for batch in self._out.values():
            trained |= identities(batch.groups)
        return HandlerState(
            self.step, self._consumer.policy_version, self._created_unix_ns, trained
        ).as_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on where a checkpoint stood.

        Parameters
        ----------
        state : dict
            From `state_dict`.

        Raises
        ------
        ValueError
            It is not a handler's state, or of another version.
        """
        saved = HandlerState.parse(state)
        self.set_policy_version(saved.policy_version)
        with self._guard():
            if self._prefetcher is not None:
                self._prefetcher.recall()
            self.step = saved.step
            here = saved.bus_created_unix_ns == self._created_unix_ns
            self._trained = saved.trained if here else set()
            left = self._without_trained(self._held.groups)
            self._held.keep(left.__contains__)

    def stats(self) -> shmbus.Ledger:
        """Return the ledger of the bus."""
        return self._consumer.stats()

    def close(self) -> None:
        """Leave the bus. What is not acknowledged is delivered again to the next reader."""
        if self._closed:
            return
        self._closed = True
        self.progress.end()
        if self._prefetcher is not None:
            if self._prefetcher.forked:
                # The thread may have held the reader's lock when this process was forked off.
                return
            self._prefetcher.stop()
        if self._gpu is not None:
            self._gpu.close()
        self._consumer.close()

    @property
    def transport(self) -> str:
        """How batches come to their device: "cpu", or as `trainer_adapter.gpu` says."""
        return "cpu" if self._gpu is None else self._gpu.transport

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError(
            "OnlineDataHandler: expected to stay in its process, got pickled; one process reads a "
            "bus: give a DataLoader num_workers=0"
        )

    def __enter__(self) -> OnlineDataHandler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
