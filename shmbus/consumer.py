"""Consumer: delivers complete groups under lease, from a daemon or straight from the ring.

`take` is C (shmbus_ext/python/read); what it leaves to Python is here, every other verb in a base
class (shmbus/take).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeVar

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
    check_split,
    check_timeout,
    clamp_request,
    names_options,
)
from shmbus._format import show_wait
from shmbus._schema import Schema
from shmbus.client.daemon_client import DaemonClient
from shmbus.group import Group
from shmbus.ledger import Ledger
from shmbus.segment.names import check_name
from shmbus.source import AttachOptions
from shmbus.stall import OnStall, Watch
from shmbus.stash.stash import StashPolicy
from shmbus.take.asynchronous import AsynchronousTakes
from shmbus.take.attached import seconds_left
from shmbus.take.ending import LeaseEnds
from shmbus.take.requests import PromptRequests
from shmbus.take.steps import StepTakes
from shmbus_ext import _core

__all__ = ["Consumer"]

_T = TypeVar("_T")


class Consumer(AsynchronousTakes, LeaseEnds, StepTakes, PromptRequests):
    """Takes complete groups from a bus: from its daemon where there is one, else from the ring.

    Without a daemon a bus has one consumer, and a second one gets BusBusyError. With a daemon
    (`shmbus serve NAME`) there may be many: each group goes to one of them, or, with ranks, each
    step is shared out among them. The daemon's options of the stash apply then. Consumers with a
    rank and without one cannot be attached together: who comes later gets BusBusyError.

    With ranks, `take(max_groups)` is `take_step(groups=max_groups, max_wait=0)`: this rank's shard
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
        Seconds that a group may stay incomplete; None for no limit.
    on_timeout : "wait" | "drop" | "partial"
        What happens to a group after that: it is kept, discarded, or delivered as it is.
    max_policy_lag : int, optional
        Groups whose oldest sample is more versions than this behind `policy_version` are dropped.
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
        How often a sample is requested again, alone (`Producer.wanted`), after a producer reported
        that it failed, or when it is missing at its group's deadline.
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
        `stall_timeout` seconds while `take` or `take_step` waits, in one call or in several: a
        warning of the logger ``shmbus.stall``; a StallError; a call with the StallReport, whose
        exceptions end the wait; or nothing.
    stall_timeout : float
        Those seconds.
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

    @names_options
    def __init__(
        self,
        name: str,
        *,
        group_timeout: float | None = None,
        on_timeout: Literal["wait", "drop", "partial"] = "wait",
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
        on_stall: OnStall = "log",
        stall_timeout: float = limits.STALL_TIMEOUT_S,
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
        self._begin()
        self._begin_requests(prompt_schema)
        try:
            self._require_source()
        except BaseException:
            # The caller never gets it, and may keep the exception, which refers to it.
            self.close()
            raise

    # -- taking ---------------------------------------------------------------------------------

    def _take(
        self, max_groups: int = 64, timeout: float | None = 0.1, *, split: str | None = None
    ) -> list[Group]:
        """Do what `ConsumerBase.take` leaves to Python: with a daemon, or other kinds of numbers.

        `ConsumerBase` is C; it takes plain numbers, from the ring, and documents `take`.
        """
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
            return self.take_step(groups=max_groups, max_wait=0.0, timeout=timeout)
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

    # -- state ----------------------------------------------------------------------------------

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
                "count on from there, or, to return to a checkpoint, call reset_policy_version (a "
                "handler's load_state_dict does)"
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
        self._end_feeding()
        if self._source is not None:
            self._source.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Consumer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In this thread: it waits for nobody, and no cancellation can come before it.
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Consumer], tuple[Any, ...]]:
        return _rebuild, (type(self), self._options, self._watch.options, self._prompt_schema)

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r}{' closed' if self._closed else ''}>"


def _rebuild(
    cls: type[Consumer],
    options: AttachOptions,
    stall: tuple[OnStall, float],
    prompt_schema: Schema | None = None,
) -> Consumer:
    self = cls.__new__(cls)
    self.name = options.name
    self._options = options
    self._watch = Watch(options.name, *stall)
    self._begin()
    self._begin_requests(prompt_schema)
    return self


def _or_none(check: Callable[..., _T], name: str, value: object, *rest: object) -> _T | None:
    return None if value is None else check(name, value, *rest)
