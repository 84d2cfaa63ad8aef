"""Consumer: delivers complete groups under lease, from a daemon or straight from the ring.

The fast path of `take` runs in C (shmbus_ext/python/read); its remainder is here. In an event loop
the loop's own thread leases groups, in a call that never waits. A second thread waits for all tasks
of the loop. Without a daemon the second thread leases no group. With a daemon it sends the
requests, and granted groups stay ready until a task takes them.

Invariants:

- An exception during attaching leaves nothing attached.
- No variable holds groups on their way to the caller: groups withheld by an exception become ready
  again. Groups granted after the last task's cancellation go back to the daemon, so every leased
  group belongs to a caller.
- Before a source ends a lease, the Consumer checks the group's type, its lease and its owner. So no
  source ends a lease twice. For a list of groups with a daemon, the call that ends them makes the
  check (`DaemonClient.end_groups`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

from shmbus import errors
from shmbus.base import limits
from shmbus.base.arguments import (
    TRAIN,
    check_backoff,
    check_choice,
    check_count,
    check_flag,
    check_label,
    check_period,
    check_policy_version,
    check_rank,
    check_split,
    check_timeout,
    clamp_request,
    names_options,
)
from shmbus.base.closing import ClosedByAnyWith
from shmbus.base.ledger import Ledger, TrainedBefore
from shmbus.base.loop_waits import LoopWaits
from shmbus.client.daemon_client import DaemonClient
from shmbus.data.schema import Schema, mapping_of, parse
from shmbus.handles.feeder import Feeder
from shmbus.handles.group import Group, GroupState
from shmbus.handles.open_requests import (
    OpenKeys,
    RequestsState,
    RestoredRequests,
    requests_state,
    restore_requests,
)
from shmbus.handles.source import AttachOptions, Source, attach
from shmbus.handles.stall import OnStall, Watch
from shmbus.segment.names import check_name
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

_T = TypeVar("_T")

#: Reasons of `drop`, by their counters in the ledger.
_DROP_REASONS: Final = {"malformed": _core.DROP_MALFORMED, "filtered": _core.DROP_FILTERED}


class Consumer(_core.ConsumerBase[Group], ClosedByAnyWith):
    """Takes complete groups from a bus: through its daemon if present, else from the ring.

    Without a daemon a bus has a single consumer, and a second consumer gets BusBusyError. With a
    daemon (`shmbus serve NAME`) there may be many. Each group goes to a single consumer, or, with
    ranks, each step is shared out among the consumers. The daemon's options of the stash apply
    then. Consumers with and without a rank cannot be attached together: the later consumer gets
    BusBusyError.

    With ranks, `take(max_groups)` means `take_shard(groups=max_groups, max_wait=0)`: this rank's
    shard of the next step. The step holds at most `max_groups` groups per rank, and forms as soon
    as every rank gets a group. All ranks must call `take` with the same number.

    A group stays leased until acknowledged, dropped or given back. Groups left unacknowledged by an
    earlier consumer are delivered again. A handle pickles by name and options, and attaches at its
    first use. Its methods are thread-safe.

    Attaching blocks for `wait` seconds at most. Beside a daemon that has just started or restarts,
    the limit rises to DAEMON_WAIT_S (5 s) if `wait` is shorter.

    Parameters
    ----------
    name : str
        The bus.
    group_timeout : float, optional
        Seconds that a group may stay incomplete, from its first sample on; None for no limit.
    on_timeout : "wait" | "drop" | "partial"
        Action on a late group: keep it, discard it counted as "timeout", or deliver it incomplete.
        With `sample_retries` its missing samples are requested first.
    max_policy_lag : int, optional
        Drop groups whose oldest sample lags more than this many versions behind `policy_version`.
    skip_zero_variance : bool
        Drop complete groups of equal scores.
    duplicate : "drop" | "error"
        Action on a second sample of an index: count and drop, or also raise ProtocolError in the
        next `take`. The first sample and all other groups stay.
    max_stash_bytes : int, optional
        Ring bytes that incomplete groups may occupy; None for no limit.
    on_overflow : "wait" | "drop" | "partial"
        Action on the oldest incomplete groups above that bound.
    sample_retries : int
        How often a sample is requested again, alone (`Producer.requests`), after a producer's
        failure report, or after its group's deadline.
    retry_timeout : float
        Seconds until an unanswered retry request counts as a failed attempt; also the time a group
        with a permanently failed sample waits for its other samples.
    retry_backoff : tuple of (float, float)
        Seconds before a failed sample is requested again: first and maximum. The backoff doubles
        from attempt to attempt, with jitter. If all samples taken from the request lane fail alike,
        the backoff also spaces the single samples let through.
    on_failure : "drop" | "partial"
        Action on a group with a permanently failed sample, once its other samples arrived: discard
        the group, or deliver it without that sample.
    label : str, optional
        Name of this consumer in messages of other processes.
    rank, world_size : int
        This trainer's rank, and the number of trainer processes that share each step. More than one
        need the daemon.
    daemon : bool, optional
        True requires a daemon, False never uses a daemon, None uses a daemon if present.
    split : str, default "train"
        The split to take. Groups of another split, such as "eval", go only to consumers of that
        split, never to training; until then they hold space of the ring. Without a daemon
        ``take(split=...)`` of the only consumer takes every split. With a daemon, a Consumer of
        another split may run beside ranks. `max_policy_lag` and `skip_zero_variance` apply to
        "train".
    on_stall : "log" | "raise" | callable | None
        Action after every `stall_timeout` seconds without a commit, acknowledgement or drop on the
        bus while `take` or `take_shard` waits, in a single call or in several: a warning of the
        logger ``shmbus.stall``; a StallError; a call with the StallReport, whose exceptions end the
        wait; or no action.
    stall_timeout : float, optional
        Those seconds. None means 60; "raise" then only warns, until no process can end the wait: no
        living worker was attached for STALL_DEAD_S (600 s), or no attached worker committed for
        STALL_SLOW_S (1,800 s). A wait on a paused bus never ends.
    wait : float, optional
        Seconds to wait for a missing bus, and for its daemon if required: None waits for ever, 0
        does not wait for a bus.
    prompt_schema : mapping of str to dtype or (dtype, shape), optional
        The fields of a prompt for `request`, as for `Feeder`: with a schema, lists are welcome.

    Raises
    ------
    BusNotFoundError, LayoutMismatchError
        The bus is missing after `wait` seconds, or has another layout.
    BusBusyError
        Another process reads this bus without a daemon, or holds this rank; or consumers with and
        without ranks meet.
    DaemonUnavailableError
        A required daemon does not answer, or the daemon of this bus died and was not restarted.
    ProtocolError
        The daemon runs another version of shmbus.
    TypeError, ValueError
        An option of a wrong type or value, or different from the daemon's.

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
        #: In picklable form; a wrong schema raises here, for the handle's maker.
        self._prompt_schema = None if prompt_schema is None else mapping_of(parse(prompt_schema))
        self._begin()
        try:
            self._require_source()
        except BaseException:
            # The caller never gets the handle, and may keep the exception, which refers to the
            # handle.
            self.close()
            raise

    def _begin(self) -> None:
        """Set the initial state of a new handle, made or unpickled."""
        self._lock = _core.RecursiveLock()
        self._source: Source | None = None
        # The last version set by this handle.
        self._policy_version = 0
        self._closed = False
        self._loop_waits = LoopWaits()
        #: Groups wanted, by waiting task.
        self._tasks: dict[object, int] = {}
        #: Exception of the thread that asks the daemon; the next task raises it.
        self._failure: Exception | None = None
        self._feeder: Feeder | None = None
        self._open_keys: OpenKeys | None = None

    def _require_source(self) -> Source:
        if self._closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this Consumer is closed; make a new one"
            )
        source = self._source
        if source is None:
            # An unpickled handle attaches in the first thread to use it.
            with self._lock:
                source = self._source
                if source is None:
                    source = self._attach()
        source.require()
        return source

    @property
    def has_daemon(self) -> bool:
        """True for leases from a daemon; False for reads straight from the ring."""
        return isinstance(self._require_source(), DaemonClient)

    def _attach(self) -> Source:
        """Attach, or, after an exception, leave nothing attached."""
        opened: list[Source] = []
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
        """Continue `take` off C's fast path: with a daemon, or for unusual number types."""
        # `ConsumerBase`, in C, takes plain numbers, from the ring, and documents `take`.
        max_groups = clamp_request("max_groups", max_groups)
        check_timeout(timeout)
        split = None if split is None else check_split(split)
        source = self._require_source()
        if not isinstance(source, DaemonClient):
            if split is not None:
                _core.split_number(source.segment, split)  # or the error C leaves to Python
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
        # No variable holds the groups: groups withheld by an exception become ready again.
        return source.hand_out(Group, self, max_groups) or self._take(
            max_groups, seconds_left(deadline)
        )

    # Errors name the public method.
    _take.__qualname__ = "Consumer.take"

    #: In C (shmbus_ext/python/read/take.c), with the documentation of shmbus_ext/_public.pyi.
    take = _core.ConsumerBase.take

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
        """Take this rank's shard of its next step, formed when groups exist for every rank.

        The shards of a step are disjoint, decided once, and balanced by the length of `field`. A
        restarted rank first gets its unacknowledged groups again. All ranks must ask for a step
        with the same numbers. Blocks until then, or for `timeout`.

        Parameters
        ----------
        groups : int, optional
            Groups per rank.
        tokens : int, optional
            Instead: as many whole groups as fit into this many elements of `field` per rank. The
            only group of a rank may exceed the number.
        max_wait : float, optional
            Seconds after the step's first complete group until the step forms with fewer groups, at
            least one per rank. None waits for a full step.
        field : str
            The field whose length weighs a trajectory.
        timeout : float, optional
            Seconds to wait: None waits without limit, 0 does not wait.
        only_full : bool
            Never form a partial step, regardless of `max_wait`: for a caller that prefetches.

        Returns
        -------
        list[Group]
            Leased to the caller. Empty at the timeout; the next call then asks for the same step.

        Raises
        ------
        ValueError
            The ranks ask for a step in different ways, `groups` and `tokens` are both given or both
            missing, or the Consumer runs without ranks.
        StallError
            The bus stalled for too long, under ``on_stall="raise"``.
        DaemonUnavailableError
            The daemon did not answer for CLIENT_WAIT_S (30 s).
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
        """Yield complete groups; block for the next group, and end when the consumer closes.

        Raises
        ------
        ProtocolError, StallError, DaemonUnavailableError
            As for `take`; a new iteration may start.
        """
        while not self._closed:
            try:
                groups = self.take(1, None)
            except errors.BusClosedError:
                if self._closed:
                    return
                raise
            yield from groups

    # -- taking in an event loop -------------------------------------------------------------------

    async def atake(self, max_groups: int = 64, timeout: float | None = 0.1) -> list[Group]:
        """Take complete groups as `take` does, without blocking the event loop.

        A task cancelled during the wait (CancelledError) holds no lease.
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
        """Take from the ring: the thread only sleeps until a commit."""
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
        """Take the daemon's grants: the thread asks on behalf of all waiting tasks."""
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
            # A single request for all waiting tasks. With steps, all ranks must ask with the same
            # number.
            wanted = max_groups if by_step else sum(list(self._tasks.values()))
            ask = functools.partial(self._ask, source, wanted, slice_s, by_step)
            await self._loop_waits.wait(ask, slice_s)
            asked = True
            checked_s = await self._check_stall(source, began_s, checked_s)

    def _ask(self, source: DaemonClient, wanted: int, slice_s: float, by_step: bool) -> None:
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
        """Return a cancelled task's grants to the daemon unless another task waits."""
        if not self._tasks and source.leases.borrower.ready:
            with contextlib.suppress(RuntimeError):  # the loop ends; `close` gives back
                asyncio.get_running_loop().run_in_executor(None, _give_back_ready, source)

    async def _check_stall(self, source: Source, began_s: float, checked_s: float) -> float:
        """Run the watchdog in a thread: a report takes longer than a loop may rest."""
        slice_s = self._watch.slice_s
        now = time.monotonic()
        if slice_s is None or now - checked_s < slice_s:
            return checked_s
        waited_s = now - began_s
        await asyncio.to_thread(self._watch.check, source.segment, "a complete group", waited_s)
        return now

    def __aiter__(self) -> AsyncIterator[Group]:
        """Yield complete groups asynchronously; end when the consumer closes."""
        return _EachGroup(self)

    # -- the ends of leases ------------------------------------------------------------------------

    def ack(self, groups: Group | Iterable[Group]) -> None:
        """Acknowledge trained groups; their space becomes free.

        Acknowledging a group is atomic: all its samples or none, even if this process dies now.
        Does not wait for an answer.

        Without a daemon the groups are acknowledged on return. With a daemon the acknowledgements
        are under way: they survive this process's death. While this process lives they also survive
        the daemon's death, because this process tells the next daemon. Only if both die before the
        daemon reads the acknowledgement is a group delivered again, as if never acknowledged.

        Parameters
        ----------
        groups : Group or iterable of Group
            Delivered by this consumer and still leased. A list is fastest.

        Raises
        ------
        ProtocolError
            A group is no longer leased; the groups before it are acknowledged.
        TypeError
            An item is not a Group; the groups before it are acknowledged.
        DaemonUnavailableError
            The daemon was unreachable for CLIENT_WAIT_S (30 s). The next daemon still learns of the
            groups.
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
            The ledger's counter; "filtered" for valid groups without a learning signal.

        Raises
        ------
        TypeError, ValueError
            The reason is invalid, or an item is not a Group; groups before it are dropped.
        ProtocolError, DaemonUnavailableError, BusClosedError
            As for `ack`; groups before the failed group are dropped.
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
                # A single C call ends all groups, or stops at the group that raises below.
                for group in several[source.end_groups(self, several, reason, state) :]:
                    source.end(self._leased(source, group, verb), reason)
                    group.state = state
            finally:
                source.flush()

    def give_back(self, group: Group) -> None:
        """End a lease without acknowledging; the group will be delivered next.

        With a daemon this may wait up to REPLY_GRACE_S (1 s), for prefetched groups that go back,
        too.

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

    # -- trained samples ---------------------------------------------------------------------------

    def note_trained(self, groups: Iterable[Group], step: int) -> None:
        """Mark groups as trained, for the checkpoints of other ranks; without ranks a no-op.

        Does not wait for an answer.

        Parameters
        ----------
        groups : iterable of Group
            Delivered by this consumer and still leased.
        step : int
            The trainer's own count of steps, alike on all ranks; -1 for untrained.

        Raises
        ------
        ProtocolError, DaemonUnavailableError, BusClosedError
            As for `ack`.
        """
        source = self._require_source()
        leases = [self._leased(source, group, "note") for group in groups]
        source.note_trained(leases, step)

    def lasting_names(self, groups: Iterable[Group]) -> set[bytes]:
        """Return the samples' lasting names, for a checkpoint.

        Parameters
        ----------
        groups : iterable of Group
            Delivered by this consumer.

        Returns
        -------
        set of bytes
            One or two per sample, of 32 bytes: the identity of the sample's first bus, its producer
            id and sequence there. A bus restored from a snapshot keeps the names; a sample brought
            by a relay also carries its source's name.

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
        """Return trained samples and groups that may come again, for a checkpoint.

        Parameters
        ----------
        step : int
            Samples a rank noted (`note_trained`) for earlier steps count as trained.

        Returns
        -------
        TrainedBefore
            Noted samples, and those given to `end_trained`. Samples this consumer trained but never
            noted are missing; without ranks no sample is noted.

        Raises
        ------
        DaemonUnavailableError, BusClosedError
            As for `stats`.
        """
        return self._require_source().trained_before(step)

    def end_trained(self, names: Iterable[bytes]) -> None:
        """Acknowledge samples a checkpoint counts as trained, now and whenever they come.

        Groups lose these samples. For a group with a round and such a sample, late samples become
        surplus. Groups held by this consumer stay as they are; give them back first. A second call
        replaces the first.

        Parameters
        ----------
        names : iterable of bytes
            Lasting names, from `trained_before` and `lasting_names`.

        Raises
        ------
        DaemonUnavailableError, BusClosedError
            As for `stats`.
        """
        self._require_source().end_trained({*names})

    # -- prompts -----------------------------------------------------------------------------------

    def _feeding(self) -> Feeder:
        """Return the feeder of this consumer's process, opened at its first use."""
        source = self._require_source()
        with self._lock:
            if self._feeder is None or self._feeder.closed:
                source.segment.require_name()  # the name may lead to a new bus
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
        split: str | None = None,
        priority: int = 0,
        meta: Any = None,
        timeout: float | None = None,
        **prompt: Any,
    ) -> int:
        """Offer a group to the workers; block while the lane is full, like `put` for a full bus.

        The thread takes nothing while blocked here. If the same thread takes the groups that make
        room, give a `timeout`, or offer fewer groups than the lane holds. `Feeder` offers from
        every process.

        Parameters
        ----------
        instance_id, group_size, need, round, split, priority, meta, timeout : object
            As for `Feeder.request`; the split is this Consumer's by default.
        **prompt : array
            The prompt, as for `Feeder.request`; checked by the Consumer's `prompt_schema`, if
            given.

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
            split=self._options.split if split is None else split,
            priority=priority,
            meta=meta,
            timeout=timeout,
            **prompt,
        )

    def open_requests(self) -> list[tuple[str, int | None, str]]:
        """Return the open requests: those whose groups are open, or on their way.

        Reads the segment without a call to the daemon: a request stays open until the daemon reads
        its acknowledgement.

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
        split: str | None = None,
        *,
        without: Mapping[tuple[str, int | None, str], int] | None = None,
    ) -> int:
        """Count the open requests of a split without a list.

        Parameters
        ----------
        split : str, optional
            By default this Consumer's.
        without : mapping of (str, int | None, str) to int, optional
            Number of requests to leave out, by instance id, round and split.

        Returns
        -------
        int

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        with self._lock:
            split = self._options.split if split is None else split
            return self._updated_keys().count(split, without or {})

    def _updated_keys(self) -> OpenKeys:
        segment = self._feeding()._segment
        if self._open_keys is None or self._open_keys.segment is not segment:
            self._open_keys = OpenKeys(segment)
        self._open_keys.update()
        return self._open_keys

    def state_dict(self) -> RequestsState:
        """Return every request whose group is not acknowledged: offered and not trained.

        Save the state with the weights, after acknowledging the groups those weights trained on.

        Returns
        -------
        RequestsState
            Plain values, oldest request first, with the full prompts.

        Raises
        ------
        BusClosedError
            The consumer is closed, or was made before a fork.
        DaemonUnavailableError
            The daemon does not answer, so the last acknowledgements may be unread. Nothing is lost;
            call this again when the daemon is back.
        """
        segment = self._feeding()._segment
        if self.has_daemon:
            # The daemon reads in order: by its answer, acknowledged requests have ended.
            self._require_source().stats()
        return requests_state(segment)

    def load_state_dict(
        self, state: RequestsState, *, timeout: float | None = limits.RETRY_TIMEOUT_S
    ) -> RestoredRequests:
        """Offer again the state's requests missing from the bus.

        On a surviving bus, open requests are not offered twice.

        Parameters
        ----------
        state : RequestsState
            A state from `state_dict`.
        timeout : float, optional
            Seconds to wait for room for each; None waits for ever.

        Returns
        -------
        RestoredRequests

        Raises
        ------
        ValueError
            The state is invalid.
        BusFullError
            The lane stayed full; call this again with the same state.
        BusClosedError, BusRemovedError, StallError
            As for `request`.
        """
        check_timeout(timeout)
        return restore_requests(self._feeding(), state, timeout)

    # -- state and end -----------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The current policy version, as producers see it: an int, 0 or more; settable.

        Reading never blocks. Setting returns when producers see the new value; with a daemon that
        takes a round trip, and CLIENT_WAIT_S (30 s) at most. Only `reset_policy_version` lowers the
        version. A rank behind the others may set its own version, without effect.

        Raises
        ------
        TypeError, ValueError
            When set: no int, negative, or below the previous version.
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

    def stats(self, timeout: float | None = None) -> Ledger:
        """Return the ledger: where every trajectory ever committed is now.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for a daemon's answer; None for CLIENT_WAIT_S (30 s).

        Returns
        -------
        Ledger
            Counts of a single instant; `Ledger.balanced` is True.

        Raises
        ------
        DaemonUnavailableError
            The daemon does not answer.
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        return self._require_source().stats(check_timeout(timeout))

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._closed

    def close(self) -> None:
        """Leave the bus; may be called twice.

        Threads waiting in `take` get BusClosedError, iterations end. Unacknowledged groups are
        delivered again, by the daemon or to the next consumer. If an absent daemon does not know
        yet of acknowledged groups, `close` waits for it, 5 s at most. Arrays still referenced stay
        valid.
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
    """Iterator over complete groups. A suspended task keeps no group here."""

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
    with contextlib.suppress(errors.BusClosedError):  # the task finds the consumer closed
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
    """Return the seconds until a time of the monotonic clock, 0 after it; None without deadline."""
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
