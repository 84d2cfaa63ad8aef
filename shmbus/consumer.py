"""Consumer: delivers complete groups under lease, from a daemon or straight from the ring.

`take` is C (shmbus_ext/python/read); what it leaves to Python is here. In an event loop a group is
leased by the loop's own thread, in a call that does not wait. What waits is one other thread for
all tasks of the loop; it leases nothing where this process reads the ring itself. Where a daemon
leases, that thread asks it, and what is granted is ready until a task takes it.

Invariants:

- After an exception in attaching nothing is attached.
- No variable has groups on their way to the caller, so those that an exception keeps from the
  caller are ready again. Groups that were granted after the last task has been cancelled go back to
  the daemon, so no group is leased to nobody.
- A group is checked (that it is one, is leased, and is this Consumer's) before its source ends the
  lease, so no source ends a lease twice. The one exception, a list of groups for a daemon, is
  checked in the same call that ends them (`DaemonClient.end_groups`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

from shmbus import errors, limits
from shmbus._arguments import (
    TRAIN,
    check_backoff,
    check_choice,
    check_count,
    check_flag,
    check_label,
    check_period,
    check_policy_version,
    check_rank,
    check_share,
    check_split,
    check_timeout,
    clamp_request,
    names_options,
)
from shmbus._closing import ClosedByAnyWith
from shmbus._format import show_wait
from shmbus._loop_waits import LoopWaits
from shmbus._schema import Schema, mapping_of, parse
from shmbus.client.daemon_client import DaemonClient
from shmbus.feeder import Feeder
from shmbus.group import Group, GroupState
from shmbus.ledger import Ledger, TrainedBefore
from shmbus.open_requests import (
    OpenKeys,
    RequestsState,
    RestoredRequests,
    requests_state,
    restore_requests,
)
from shmbus.segment.names import check_name
from shmbus.source import AttachOptions, Source, attach
from shmbus.stall import OnStall, Watch
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

_T = TypeVar("_T")

#: What `drop` counts groups as.
_DROP_REASONS: Final = {"malformed": _core.DROP_MALFORMED, "filtered": _core.DROP_FILTERED}


class Consumer(_core.ConsumerBase[Group], ClosedByAnyWith):
    """Takes complete groups from a bus: from its daemon where there is one, else from the ring.

    Without a daemon a bus has one consumer, and a second one gets BusBusyError. With a daemon
    (`shmbus serve NAME`) there may be many: each group goes to one of them, or, with ranks, each
    step is shared out among them. The daemon's options of the stash apply then. Consumers with a
    rank and without one cannot be attached together: who comes later gets BusBusyError.

    With ranks, `take(max_groups)` is `take_shard(groups=max_groups, max_wait=0)`: this rank's shard
    of the next step, which has at most `max_groups` groups for each rank and is formed as soon as
    each gets one. All ranks have to call it with the same number.

    A group is leased until it is acknowledged, dropped or given back. Groups that an earlier
    consumer had not acknowledged are delivered again. A handle pickles by name and options, and
    attaches when it is first used. Its methods may be called from several threads.

    Attaching blocks for `wait` seconds at most, or for DAEMON_WAIT_S (5 s) where that is longer and
    a daemon was started a moment ago or is being restarted.

    Parameters
    ----------
    name : str
        The bus.
    group_timeout : float, optional
        Seconds that a group may stay incomplete, from its first sample on; None for no limit.
    on_timeout : "wait" | "drop" | "partial"
        What happens to a group after that: it is kept, discarded and counted as "timeout", or
        delivered as it is. With `sample_retries` its missing samples are requested first.
    max_policy_lag : int, optional
        Groups whose oldest sample is more versions than this behind `policy_version` are dropped.
    stale_share : float, default 0
        Keep them while no more than this share, below 1, of each sample's trained tokens is so old,
        by its fields `token_versions` and `loss_mask`; one without counts by its oldest version.
    skip_zero_variance : bool
        Drop complete groups whose scores are all equal.
    duplicate : "drop" | "error"
        A second sample of an index: counted and dropped, or also raised as ProtocolError by the
        next `take`. The first sample stays, and so do all other groups.
    max_stash_bytes : int, optional
        Ring bytes that incomplete groups may occupy; None for no limit.
    on_overflow : "wait" | "drop" | "partial"
        What happens to the oldest incomplete groups above that.
    sample_retries : int
        How often a sample is requested again, alone (`Producer.requests`), after a producer
        reported that it failed, or when it is missing at its group's deadline.
    retry_timeout : float
        Seconds after which a retry request without an answer counts as a failed attempt, and that a
        group with a sample that failed for good waits for its other samples.
    retry_backoff : tuple of (float, float)
        Seconds before a failed sample is requested again: first, and at most. They double from
        attempt to attempt, with jitter. Where all samples that workers took of the request lane
        failed alike, they are also the time between two samples that are let through.
    on_failure : "drop" | "partial"
        What happens to a group with a sample that failed for good, once its other samples are
        there: it is discarded, or delivered without that sample.
    label : str, optional
        How messages of other processes name this one.
    rank, world_size : int
        Which of how many trainer processes share each step. More than one need the daemon.
    daemon : bool, optional
        True requires a daemon, False never asks for one, None takes one that is there.
    split : str, default "train"
        Whose groups it takes. Groups of another split, such as "eval", go to who asks for them, and
        never to training; until somebody does, they hold space of the ring. Without a daemon
        ``take(split=...)`` of the one consumer takes any split; with one, there may be a Consumer
        of another split beside ranks. `max_policy_lag` and `skip_zero_variance` are for "train".
    on_stall : "log" | "raise" | callable | None
        What happens each time that nothing was committed, acknowledged or dropped on the bus for
        `stall_timeout` seconds while `take` or `take_shard` waits, in one call or in several: a
        warning of the logger ``shmbus.stall``; a StallError; a call with the StallReport, whose
        exceptions end the wait; or nothing.
    stall_timeout : float, optional
        Those seconds. None is 60; and "raise" is a warning then until nobody can end the wait: no
        living worker has been attached for STALL_DEAD_S (600 s), or none that is has committed
        anything for STALL_SLOW_S (1,800 s). A paused bus is waited for without end.
    wait : float, optional
        Seconds to wait for the bus where there is none yet, and for its daemon where one is needed:
        None waits for ever, 0 does not wait for a bus.
    prompt_schema : mapping of str to dtype or (dtype, shape), optional
        The fields of a prompt that `request` offers, as for `Feeder`: lists are welcome then.

    Raises
    ------
    BusNotFoundError, LayoutMismatchError
        There is no such bus, also after `wait` seconds, or it has another layout.
    BusBusyError
        Another process reads this bus without a daemon, or has this rank; or ranks are attached and
        this Consumer has none, or the reverse.
    DaemonUnavailableError
        A daemon is needed and none answers, or the daemon of this bus died and was not restarted.
    ProtocolError
        The daemon runs another version of shmbus.
    TypeError, ValueError
        An option of a wrong type or value, or one that differs from the daemon's.

    Examples
    --------
    Groups one after the other; ``with group`` acknowledges, or gives back after an exception::

        with shmbus.Consumer("run1") as consumer:
            for group in consumer:
                with group:
                    train([t["tokens"] for t in group], [t.score for t in group])

    Many at a time, acknowledged together after the optimizer step::

        groups = consumer.take(max_groups=64, timeout=1.0)
        consumer.ack(groups)
    """

    # -- attaching ---------------------------------------------------------------------------------

    @names_options
    def __init__(
        self,
        name: str,
        *,
        group_timeout: float | None = limits.GROUP_TIMEOUT_S,
        on_timeout: Literal["wait", "drop", "partial"] = "drop",
        max_policy_lag: int | None = None,
        stale_share: float = 0.0,
        skip_zero_variance: bool = False,
        duplicate: Literal["drop", "error"] = "drop",
        max_stash_bytes: int | None = None,
        on_overflow: Literal["wait", "drop", "partial"] = "wait",
        sample_retries: int = 0,
        retry_timeout: float = limits.RETRY_TIMEOUT_S,
        retry_backoff: tuple[float, float] = limits.RETRY_BACKOFF_S,
        on_failure: Literal["drop", "partial"] = "drop",
        label: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        daemon: bool | None = None,
        split: str = TRAIN,
        on_stall: OnStall = "raise",
        stall_timeout: float | None = None,
        wait: float | None = 0.0,
        prompt_schema: Schema | None = None,
    ) -> None:
        self.name = check_name(name)
        check_choice("on_timeout", on_timeout, ("wait", "drop", "partial"))
        check_choice("on_overflow", on_overflow, ("wait", "drop", "partial"))
        check_choice("on_failure", on_failure, ("drop", "partial"))
        check_choice("duplicate", duplicate, ("drop", "error"))
        policy = StashPolicy(
            group_timeout_s=_or_none(check_period, "group_timeout", group_timeout),
            on_timeout=on_timeout,
            max_policy_lag=_or_none(check_count, "max_policy_lag", max_policy_lag, 0),
            stale_share=check_share(stale_share, max_policy_lag),
            skip_zero_variance=check_flag("skip_zero_variance", skip_zero_variance),
            max_stash_bytes=_or_none(check_count, "max_stash_bytes", max_stash_bytes, 1),
            on_overflow=on_overflow,
            sample_retries=check_count("sample_retries", sample_retries, 0),
            retry_timeout_s=check_period("retry_timeout", retry_timeout),
            retry_backoff_s=check_backoff("retry_backoff", retry_backoff),
            on_failure=on_failure,
        )
        label = None if label is None else check_label(label)
        rank, world_size = check_rank(rank, world_size)
        daemon = None if daemon is None else check_flag("daemon", daemon)
        if world_size > 1:
            if daemon is False:
                raise ValueError(
                    f"daemon=False: expected True or None with world_size={world_size}: without a "
                    "daemon a bus has one reader; leave daemon out, or world_size"
                )
            daemon = True
        split = check_split(split)
        if split != TRAIN and world_size > 1:
            raise ValueError(
                f"split={split!r}: expected {TRAIN!r} with world_size={world_size}: the steps that "
                "ranks share are those of training; leave rank and world_size out of the Consumer "
                "of another split"
            )
        self._options = AttachOptions(
            self.name,
            policy,
            duplicate,
            label,
            rank,
            world_size,
            daemon,
            check_timeout(wait, "wait"),
            split,
        )
        self._watch = Watch(name, on_stall, stall_timeout)
        #: In the form that pickles; who made the handle gets an error for a wrong one.
        self._prompt_schema = None if prompt_schema is None else mapping_of(parse(prompt_schema))
        self._begin()
        try:
            self._require_source()
        except BaseException:
            # The caller never gets it, and may keep the exception, which refers to it.
            self.close()
            raise

    def _begin(self) -> None:
        """Set what a new handle begins with, made or unpickled."""
        self._lock = _core.RecursiveLock()
        self._source: Collector | DaemonClient | None = None
        # The last one that this handle set.
        self._policy_version = 0
        self._closed = False
        self._loop_waits = LoopWaits()
        #: How many groups each task wants that waits.
        self._tasks: dict[object, int] = {}
        #: What the thread met that asks the daemon; the next task raises it.
        self._failure: Exception | None = None
        self._feeder: Feeder | None = None
        self._open_keys: OpenKeys | None = None

    def _require_source(self) -> Collector | DaemonClient:
        if self._closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this Consumer is closed; make a new one"
            )
        source = self._source
        if source is None:
            # An unpickled handle attaches in the first thread that uses it.
            with self._lock:
                source = self._source
                if source is None:
                    source = self._attach()
        source.require()
        return source

    @property
    def has_daemon(self) -> bool:
        """Whether it leases from a daemon; False where it reads the ring itself."""
        return isinstance(self._require_source(), DaemonClient)

    def _attach(self) -> Collector | DaemonClient:
        """Attach, or, after an exception, leave nothing attached."""
        opened: list[Collector | DaemonClient] = []
        try:
            source = attach(self._options, opened)
            if isinstance(source, Collector):
                self._split = _core.split_number(source.segment, self._options.split)
                self._intake = source.intake(Group, self._watch)
            self._source = source
        except BaseException:
            self._source = self._intake = None
            for each in opened:
                each.close()
            raise
        return source

    # -- taking ------------------------------------------------------------------------------------

    def _take(
        self, max_groups: int = 64, timeout: float | None = 0.1, *, split: str | None = None
    ) -> list[Group]:
        """Do what C leaves of `take` to Python: with a daemon, or other kinds of numbers."""
        # `ConsumerBase` is C; it takes plain numbers, from the ring, and documents `take`.
        max_groups = clamp_request("max_groups", max_groups)
        check_timeout(timeout)
        split = None if split is None else check_split(split)
        source = self._require_source()
        if not isinstance(source, DaemonClient):
            if split is not None:
                _core.split_number(source.segment, split)  # or the error that C leaves to this
            # The first call of an unpickled handle, or numbers of other kinds than int and float.
            return self.take(max_groups, None if timeout is None else float(timeout), split=split)
        if split not in (None, self._options.split):
            raise ValueError(
                f"take: split={split!r}, and this Consumer is of split {self._options.split!r}: "
                f"with a daemon each split has its own; make Consumer({self.name!r}, "
                f"split={split!r}) for it"
            )
        if self._options.world_size > 1:
            return self.take_shard(groups=max_groups, max_wait=0.0, timeout=timeout)
        watch = self._watch
        deadline = None if timeout is None else time.monotonic() + timeout
        if not source.receive(max_groups, watch.first_s(timeout)) and (
            timeout == 0
            or not watch.go_on(
                lambda slice_s: source.receive(max_groups, slice_s),
                source.segment,
                "a complete group",
                timeout,
            )
        ):
            return []
        # No variable has the groups: those that an exception keeps from the caller are ready again.
        return source.hand_out(Group, self, max_groups) or self._take(
            max_groups, seconds_left(deadline)
        )

    # Its errors name what was called.
    _take.__qualname__ = "Consumer.take"

    def take_shard(
        self,
        *,
        groups: int | None = None,
        tokens: int | None = None,
        max_wait: float | None = None,
        field: str = "tokens",
        timeout: float | None = None,
        only_full: bool = False,
    ) -> list[Group]:
        """Take this rank's shard of its next step, once there are groups for every rank.

        The shards of a step are disjoint, decided once, and balanced by the length of `field`. A
        rank that died and restarts first gets the groups again that it had not acknowledged. All
        ranks have to ask for a step with the same numbers. Blocks until then, or for `timeout`.

        Parameters
        ----------
        groups : int, optional
            How many groups each rank gets.
        tokens : int, optional
            Instead: as many whole groups as fit into this many elements of `field` for each rank.
            The only group of a rank may have more.
        max_wait : float, optional
            Seconds after the step's first group was complete, after which the step is formed with
            fewer groups, at least one for each rank. None waits until it is full.
        field : str
            The field whose length is the weight of a trajectory.
        timeout : float, optional
            Seconds to wait: None waits without limit, 0 does not wait.
        only_full : bool
            Never form a step that is not full, whatever `max_wait`: for a caller that prefetches.

        Returns
        -------
        list[Group]
            Leased to the caller. Empty at the timeout; the next call then asks for the same step.

        Raises
        ------
        ValueError
            The ranks ask for one step in different ways, both or neither of groups and tokens are
            given, or the Consumer has no ranks.
        StallError
            Nothing has moved for too long, under ``on_stall="raise"``.
        DaemonUnavailableError
            The daemon has not answered for CLIENT_WAIT_S (30 s).
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        if (groups is None) == (tokens is None):
            raise ValueError(
                f"take_shard: expected one of groups and tokens, got groups={groups!r} and "
                f"tokens={tokens!r}"
            )
        groups = None if groups is None else clamp_request("groups", groups)
        tokens = None if tokens is None else clamp_request("tokens", tokens)
        check_timeout(max_wait)
        check_timeout(timeout)
        source = self._require_source()
        if self._options.world_size == 1 or not isinstance(source, DaemonClient):
            raise ValueError("take_shard: expected a Consumer of world_size 2 or more; use take")

        step: dict[str, Any] = {
            "groups": groups, "tokens": tokens, "max_wait": max_wait, "field": field,
            "only_full": only_full,
        }  # fmt: skip

        def wait(slice_s: float | None) -> bool:
            return source.receive_step(timeout=slice_s, **step)

        watch = self._watch
        deadline = None if timeout is None else time.monotonic() + timeout
        if not wait(watch.first_s(timeout)) and not watch.go_on(
            wait, source.segment, "this rank's step", timeout
        ):
            return []
        return source.hand_out(Group, self, -1) or self.take_shard(
            timeout=seconds_left(deadline), **step
        )

    def __iter__(self) -> Iterator[Group]:
        """Yield complete groups one by one; blocks for the next, and ends when it is closed.

        Raises
        ------
        ProtocolError, StallError, DaemonUnavailableError
            As for `take`; the iteration may be started again.
        """
        return self._iterate(None)

    def iter(self, timeout: float | None = None) -> Iterator[Group]:
        """Yield complete groups one by one until `close`, and wait only so long for each.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for a group; None waits for ever.

        Yields
        ------
        Group

        Raises
        ------
        TimeoutError
            No group was complete in that time. It ends this iteration; another one goes on behind
            it.
        TypeError, ValueError
            `timeout` is no time.
        ProtocolError, StallError, DaemonUnavailableError
            As for `take`.
        """
        check_timeout(timeout)
        return self._iterate(timeout)

    def _iterate(self, timeout: float | None) -> Iterator[Group]:
        while not self._closed:
            try:
                groups = self.take(1, timeout)
            except errors.BusClosedError:
                if self._closed:
                    return
                raise
            if not groups and timeout is not None:
                raise TimeoutError(
                    f"bus {self.name!r}: no group was complete after {show_wait(timeout)}; "
                    f"`shmbus status {self.name}` says what it waits for"
                )
            yield from groups

    # -- taking in an event loop -------------------------------------------------------------------

    async def atake(self, max_groups: int = 64, timeout: float | None = 0.1) -> list[Group]:
        """Take complete groups as `take` does, without blocking the event loop.

        A task that is cancelled during the wait (CancelledError) has no group leased to it.
        """
        max_groups = clamp_request("max_groups", max_groups)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + float(timeout)
        if self._source is None and not self._closed:
            await asyncio.to_thread(self._require_source)
        source = self._require_source()
        task = object()
        self._tasks[task] = max_groups
        try:
            if isinstance(source, Collector):
                return await self._atake_here(source, max_groups, deadline)
            return await self._atake_leased(source, max_groups, deadline)
        except BaseException:
            self._tasks.pop(task, None)
            if isinstance(source, DaemonClient):
                self._leave_nothing(source)
            raise
        finally:
            self._tasks.pop(task, None)

    async def _atake_here(
        self, source: Collector, max_groups: int, deadline: float | None
    ) -> list[Group]:
        """Take from the ring: the thread sleeps until something is committed, and that is all."""
        began_s = checked_s = time.monotonic()
        while True:
            groups = self.take(max_groups, 0)
            left_s = seconds_left(deadline)
            if groups or left_s == 0:
                return groups
            source.segment.require_name()
            now = time.monotonic()
            sleep_s = min(limits.ASYNC_TAKE_S, source.wait_s(now, left_s))
            sleep = functools.partial(_sleep, source, sleep_s)
            await self._loop_waits.wait(sleep, sleep_s)
            checked_s = await self._check_stall(source, began_s, checked_s)

    async def _atake_leased(
        self, source: DaemonClient, max_groups: int, deadline: float | None
    ) -> list[Group]:
        """Take what the daemon grants: the thread asks it, for all tasks that wait."""
        began_s = checked_s = time.monotonic()
        by_step = self._options.world_size > 1
        asked = False
        while True:
            self._raise_failure()
            groups = source.hand_out(Group, self, -1 if by_step else max_groups)
            left_s = seconds_left(deadline)
            if groups or (asked and left_s == 0):
                return groups
            slice_s = limits.ASYNC_TAKE_S if left_s is None else min(limits.ASYNC_TAKE_S, left_s)
            # For all that wait here, in one question. All ranks ask for a step with one number.
            wanted = max_groups if by_step else sum(list(self._tasks.values()))
            ask = functools.partial(self._ask, source, wanted, slice_s, by_step)
            await self._loop_waits.wait(ask, slice_s)
            asked = True
            checked_s = await self._check_stall(source, began_s, checked_s)

    def _ask(self, source: DaemonClient, wanted: int, slice_s: float, by_step: bool) -> None:
        """Ask the daemon for groups, in a thread."""
        try:
            if by_step:
                source.receive_step(
                    groups=wanted, tokens=None, max_wait=0.0, field="tokens",
                    timeout=slice_s, only_full=False,
                )  # fmt: skip
            else:
                source.receive(min(wanted, limits.MAX_REQUESTED), slice_s)
        except Exception as error:
            self._failure = error
        if not self._tasks:
            _give_back_ready(source)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _leave_nothing(self, source: DaemonClient) -> None:
        """After a task was cancelled: what it was granted is for others, if none waits here."""
        if not self._tasks and source.leases.ready:
            with contextlib.suppress(RuntimeError):  # the loop is at its end; `close` gives back
                asyncio.get_running_loop().run_in_executor(None, _give_back_ready, source)

    async def _check_stall(
        self, source: Collector | DaemonClient, began_s: float, checked_s: float
    ) -> float:
        """Have the watchdog check, in a thread: a report takes longer than a loop may rest."""
        slice_s = self._watch.slice_s
        now = time.monotonic()
        if slice_s is None or now - checked_s < slice_s:
            return checked_s
        waited_s = now - began_s
        await asyncio.to_thread(self._watch.check, source.segment, "a complete group", waited_s)
        return now

    def __aiter__(self) -> AsyncIterator[Group]:
        """Yield complete groups one by one, as iteration does; ends when this is closed."""
        return _EachGroup(self)

    # -- the ends of leases ------------------------------------------------------------------------

    def ack(self, groups: Group | Iterable[Group]) -> None:
        """Acknowledge one group or several: the trainer is done with them, and their space is free.

        Each is atomic: all of its samples are acknowledged, or none, even if this process dies now.
        Does not wait for an answer.

        Without a daemon the groups are acknowledged when this returns. With one they are on their
        way to it: they take effect even if this process dies now, and, as long as this process
        lives, even if the daemon dies, since the next one is told. Only if both die before the
        daemon has read it is a group delivered again, as one that was never acknowledged.

        Parameters
        ----------
        groups : Group or iterable of Group
            Delivered by this consumer and still leased. A list is fastest.

        Raises
        ------
        ProtocolError
            One of them is not leased any more; those before it are acknowledged.
        TypeError
            Something is not a Group; those before it are acknowledged.
        DaemonUnavailableError
            The daemon has been unreachable for CLIENT_WAIT_S (30 s). The next one is still told.
        BusClosedError
            The consumer is closed, or was made before a fork.

        Examples
        --------
        One group, or several::

            groups = consumer.take(64, timeout=1.0)
            consumer.ack(groups[0])
            consumer.ack(groups[1:])
        """
        self._end("ack", groups, _core.ACKED, "acknowledged")

    def drop(
        self,
        groups: Group | Iterable[Group],
        *,
        reason: Literal["malformed", "filtered"] = "malformed",
    ) -> None:
        """Discard leased groups; the ledger counts their samples as malformed, or as filtered.

        Parameters
        ----------
        groups : Group or iterable of Group
            Delivered by this consumer and still leased.
        reason : "malformed" | "filtered"
            What the ledger counts them as; "filtered" where nothing is wrong with them, but there
            is nothing to learn from them.

        Raises
        ------
        TypeError, ValueError
            The reason is another, or something is not a Group; groups before it are dropped.
        ProtocolError, DaemonUnavailableError, BusClosedError
            As for `ack`; those before it are dropped.
        """
        check_choice("reason", reason, tuple(_DROP_REASONS))
        self._end("drop", groups, _DROP_REASONS[reason], "dropped")

    def _end(
        self, verb: str, groups: Group | Iterable[Group], reason: int, state: GroupState
    ) -> None:
        source = self._require_source()
        several = _several(verb, groups)
        with source.lock:
            try:
                # One C call ends all, or stops at the group that raises below.
                for group in several[source.end_groups(self, several, reason, state) :]:
                    source.end(self._leased(source, group, verb), reason)
                    group.state = state
            finally:
                source.flush()

    def give_back(self, group: Group) -> None:
        """End a lease without acknowledging; the group is the next to be delivered.

        With a daemon this may wait up to REPLY_GRACE_S (1 s), for groups that were asked ahead and
        are given back, too.

        Parameters
        ----------
        group : Group
            Delivered by this consumer and still leased.

        Raises
        ------
        ProtocolError, TypeError, DaemonUnavailableError, BusClosedError
            As for `ack`.
        """
        source = self._require_source()
        source.recall()
        with source.lock:
            if not source.give_back_group(self, group, "given_back"):
                source.give_back(self._leased(source, group, "give back"))
                group.state = "given_back"
            source.flush()

    def _leased(self, source: Source, group: Group, verb: str) -> Any:
        """Return the lease of a group that this Consumer holds."""
        if not isinstance(group, Group):
            raise TypeError(f"{verb}: expected a Group, got {type(group).__name__}")
        group.require_leased(verb)
        lease = group._lease
        if group._consumer is not self or not source.is_leased(lease):
            raise errors.ProtocolError(
                f"cannot {verb} group {group.instance_id!r} here, since another Consumer "
                "delivered it; use that one"
            )
        return lease

    # -- what was trained --------------------------------------------------------------------------

    def note_trained(self, groups: Iterable[Group], step: int) -> None:
        """Say that groups are trained, for the checkpoints of other ranks; without ranks a no-op.

        Does not wait for an answer.

        Parameters
        ----------
        groups : iterable of Group
            Delivered by this consumer and still leased.
        step : int
            The trainer's own count of steps, alike on all ranks; -1 where they are not trained.

        Raises
        ------
        ProtocolError, DaemonUnavailableError, BusClosedError
            As for `ack`.
        """
        source = self._require_source()
        leases = [self._leased(source, group, "note") for group in groups]
        source.note_trained(leases, step)

    def lasting_names(self, groups: Iterable[Group]) -> set[bytes]:
        """Return what samples are known by for good, for a checkpoint.

        Parameters
        ----------
        groups : iterable of Group
            Delivered by this consumer.

        Returns
        -------
        set of bytes
            One or two a sample, of 32 bytes: the identity of the bus that it was put onto, its
            producer id and sequence there. It is the same on a bus that is restored from a
            snapshot; a sample that a relay has brought has that of its source, too.

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        self._require_source()
        return set().union(
            *(name for group in groups for name in _core.lasting_origins(group.trajectories))
        )

    def trained_before(self, step: int) -> TrainedBefore:
        """Return what is trained and may come again, for a checkpoint.

        Parameters
        ----------
        step : int
            What was noted (`note_trained`), on any rank, as of an earlier step is trained.

        Returns
        -------
        TrainedBefore
            Of what was noted, and of what `end_trained` was told. What this consumer has trained
            and not noted is not in it; without ranks nothing is noted.

        Raises
        ------
        DaemonUnavailableError, BusClosedError
            As for `stats`.
        """
        return self._require_source().trained_before(step)

    def end_trained(self, names: Iterable[bytes]) -> None:
        """Acknowledge samples that a checkpoint counts as trained, now and whenever they come.

        No group has them any more. What comes late of a group with a round that has such a sample
        is surplus. Groups that this consumer holds stay as they are; give them back first. A second
        call takes the place of the first.

        Parameters
        ----------
        names : iterable of bytes
            Lasting names, as of `trained_before` and `lasting_names`.

        Raises
        ------
        DaemonUnavailableError, BusClosedError
            As for `stats`.
        """
        self._require_source().end_trained({*names})

    # -- prompts -----------------------------------------------------------------------------------

    def _feeding(self) -> Feeder:
        """Return the feeder of this consumer's process, which its first use opens."""
        self._require_source()
        with self._lock:
            if self._feeder is None or self._feeder.closed:
                on_stall, stall_timeout = self._watch.options
                self._feeder = Feeder(
                    self.name,
                    schema=self._prompt_schema,
                    on_stall=on_stall,
                    stall_timeout=stall_timeout,
                )
            return self._feeder

    def request(
        self,
        instance_id: str | int,
        *,
        group_size: int,
        need: int | None = None,
        round: int | None = None,
        split: str = TRAIN,
        priority: int = 0,
        meta: Any = None,
        timeout: float | None = None,
        **prompt: Any,
    ) -> int:
        """Offer one group to the workers; a full lane makes this wait, as a full bus does `put`.

        While this waits nothing is taken: give a `timeout`, or offer fewer groups than the lane has
        room for, where the same thread takes what makes room. `Feeder` offers from any process.

        Parameters
        ----------
        instance_id, group_size, need, round, split, priority, meta, timeout : object
            As for `Feeder.request`.
        **prompt : array
            The prompt, as for `Feeder.request`; by `prompt_schema`, where the Consumer has one.

        Returns
        -------
        int
            The request's number, as for `Feeder.request`.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError, BusFullError
            As for `Feeder.request`.
        BusClosedError, BusRemovedError, StallError
            As for `take`.
        """
        return self._feeding().request(
            instance_id,
            group_size=group_size,
            need=need,
            round=round,
            split=split,
            priority=priority,
            meta=meta,
            timeout=timeout,
            **prompt,
        )

    def open_requests(self) -> list[tuple[str, int | None, str]]:
        """Return which requests have not ended: those whose groups are open, or on their way.

        It reads the segment, and asks no daemon: one that has not heard of an acknowledgement yet
        has the request open still.

        Returns
        -------
        list of (str, int | None, str)
            Instance ids, rounds and splits, oldest request first.

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        with self._lock:
            return self._updated_keys().keys()

    def count_open_requests(
        self,
        split: str = "train",
        *,
        without: Mapping[tuple[str, int | None, str], int] | None = None,
    ) -> int:
        """Count the requests of a split that have not ended, without a list of them.

        Parameters
        ----------
        split : str
        without : mapping of (str, int | None, str) to int, optional
            Requests to leave out: how many of each instance id, round and split.

        Returns
        -------
        int

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        with self._lock:
            return self._updated_keys().count(split, without or {})

    def _updated_keys(self) -> OpenKeys:
        segment = self._feeding()._segment
        if self._open_keys is None or self._open_keys.segment is not segment:
            self._open_keys = OpenKeys(segment)
        _core.uninterrupted(self._open_keys.update)
        return self._open_keys

    def state_dict(self) -> RequestsState:
        """Return what was offered and not trained: every request whose group is not acknowledged.

        Save it with the weights, after the acknowledgement of what they were trained on.

        Returns
        -------
        RequestsState
            Plain values, oldest request first; it has the prompts, as large as they are.

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        DaemonUnavailableError
            The daemon does not answer: whether it knows of the last acknowledgements cannot be
            told. Nothing is lost; call this again once it is back.
        """
        segment = self._feeding()._segment
        if self.has_daemon:
            # It reads in order: with its answer it has ended the requests that were acknowledged.
            self._require_source().stats()
        return requests_state(segment)

    def load_state_dict(
        self, state: RequestsState, *, timeout: float | None = limits.RETRY_TIMEOUT_S
    ) -> RestoredRequests:
        """Offer again what a state has and the bus has not.

        On a bus that lives on, requests that are open still are not offered twice.

        Parameters
        ----------
        state : RequestsState
            What `state_dict` returned.
        timeout : float, optional
            Seconds to wait for room for each; None waits for ever.

        Returns
        -------
        RestoredRequests

        Raises
        ------
        ValueError
            It is no such state.
        BusFullError
            There was no room in time; call this again with the same state.
        BusClosedError, BusRemovedError, StallError
            As for `request`.
        """
        check_timeout(timeout)
        return restore_requests(self._feeding(), state, timeout)

    # -- state and end -----------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The current policy version, as producers see it: an int, 0 or more; settable.

        Reading never blocks. Setting it returns when producers see the new value; with a daemon
        that takes a round trip, and CLIENT_WAIT_S (30 s) at most. It never goes back, but by
        `reset_policy_version`. A rank that is behind the others may set its own, which changes
        nothing.

        Raises
        ------
        TypeError, ValueError
            When set: it is no int, negative, or less than before.
        DaemonUnavailableError
            When set: the daemon does not answer.
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        return self._require_source().policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        source = self._require_source()
        version = check_policy_version(version)
        current = source.policy_version
        if version < current:
            if self._options.world_size > 1 and version >= self._policy_version:
                self._policy_version = version
                return
            raise ValueError(
                f"policy_version: expected {current} or more, which it is now, got {version}; "
                f"remove the bus of an earlier run by `shmbus rm {self.name}` before a new run; "
                "else count on from there, or, to return to a checkpoint, call "
                "reset_policy_version (a handler's load_state_dict does)"
            )
        source.policy_version = self._policy_version = version

    def reset_policy_version(self, version: int) -> None:
        """Set the policy version, also to a lower one: the trainer returns to a checkpoint.

        Parameters
        ----------
        version : int
            0 or more. Samples of higher versions are delivered still.

        Raises
        ------
        TypeError, ValueError, DaemonUnavailableError, BusClosedError
            As for `policy_version`.
        """
        source = self._require_source()
        source.policy_version = self._policy_version = check_policy_version(version)

    def stats(self) -> Ledger:
        """Return the ledger: where every trajectory ever committed is now.

        With a daemon this waits for its answer, CLIENT_WAIT_S (30 s) at most.

        Returns
        -------
        Ledger
            Counts of one instant; `Ledger.balanced` is True.

        Raises
        ------
        DaemonUnavailableError
            The daemon does not answer.
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        return self._require_source().stats()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self) -> None:
        """Leave the bus; may be called twice.

        Threads that wait in `take` get BusClosedError, iterations end. Groups that are not
        acknowledged are delivered again, by the daemon or to the next consumer. A daemon that is
        away is waited for, 5 s at most, where it does not know yet of acknowledged groups. Arrays
        that are still referenced stay valid.
        """
        try:
            self._leave()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        self._closed = True
        if self._feeder is not None:
            self._feeder.close()
        if self._source is not None:
            self._source.close()

    def __reduce__(self) -> tuple[Callable[..., Consumer], tuple[Any, ...]]:
        return _rebuild, (type(self), self._options, self._watch.options, self._prompt_schema)

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r}{' closed' if self._closed else ''}>"


class _EachGroup:
    """Iterates over complete groups. No group is kept here while a task is suspended."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __aiter__(self) -> _EachGroup:
        return self

    async def __anext__(self) -> Group:
        consumer = self._consumer
        while not consumer._closed:
            try:
                groups = await consumer.atake(1, None)
            except errors.BusClosedError:
                if consumer._closed:
                    break
                raise
            if groups:
                return groups[0]
        raise StopAsyncIteration


def _sleep(source: Collector, sleep_s: float) -> None:
    with contextlib.suppress(errors.BusClosedError):  # the task finds it closed
        source.reader.wait(sleep_s)


def _give_back_ready(source: DaemonClient) -> None:
    # Without a daemon they stay ready, for the next take.
    with contextlib.suppress(errors.DaemonUnavailableError, errors.BusClosedError):
        source.recall()


def _several(verb: str, groups: object) -> list[Any]:
    if isinstance(groups, list):
        return groups
    if isinstance(groups, Group):
        return [groups]
    if not isinstance(groups, Iterable):
        raise TypeError(
            f"{verb}: expected a Group or an iterable of Groups, got {type(groups).__name__}"
        )
    return list(groups)


def seconds_left(deadline: float | None) -> float | None:
    """Return the seconds until a time of the monotonic clock, 0 after it; None for none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _rebuild(
    cls: type[Consumer],
    options: AttachOptions,
    stall: tuple[OnStall, float | None],
    prompt_schema: dict[str, Any] | None = None,
) -> Consumer:
    self = cls.__new__(cls)
    self.name = options.name
    self._options = options
    self._watch = Watch(options.name, *stall)
    self._prompt_schema = prompt_schema
    self._begin()
    return self


def _or_none(check: Callable[..., _T], name: str, value: object, *rest: object) -> _T | None:
    return None if value is None else check(name, value, *rest)
