"""Consumer: delivers complete groups under lease. The public face of whatever collects them.

Invariant: a group is checked here (that it is one, leased, and of this Consumer) before its source
hears of it, so no source ends a lease twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeVar

from shmbus import errors, limits
from shmbus._arguments import (
    check_choice,
    check_count,
    check_flag,
    check_label,
    check_policy_version,
    check_rank,
    check_seconds,
    check_timeout,
    clamp_request,
    process_label,
)
from shmbus.client.leases import DaemonClient
from shmbus.control.wire import DaemonUnreachable, socket_exists
from shmbus.group import Group, GroupState
from shmbus.ledger import Ledger
from shmbus.segment.names import check_name
from shmbus.source import Lease, Source
from shmbus.stall import OnStall, Watch
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

__all__ = ["Consumer"]

_T = TypeVar("_T")


class Consumer(_core.ConsumerBase[Group]):
    """Collects complete groups from a bus: of a daemon where one serves it, else by itself.

    Without a daemon there is one a bus, and a second one gets BusBusyError. With one (`shmbus serve
    NAME`) there may be many: each group goes to one of them, or, with ranks, each step is shared
    out among them. The policies of the stash are the daemon's then.

    What an earlier consumer had not acknowledged is delivered again. A handle pickles by name, and
    attaches when it is first used.

    Parameters
    ----------
    name : str
        The bus.
    group_timeout : float, optional
        Seconds that a group may stay incomplete; None for ever.
    on_timeout : "wait" | "drop" | "partial"
        What becomes of a group after that: kept, discarded, or delivered as it is.
    max_policy_lag : int, optional
        Groups whose oldest sample is more versions than this behind `policy_version` are dropped.
    skip_zero_variance : bool
        Drop complete groups whose scores are all equal.
    duplicate : "drop" | "error"
        A second sample of an index: counted and dropped, or also raised as ProtocolError by the
        next `take`. The first sample stays, and so do all other groups.
    max_stash_bytes : int, optional
        Ring bytes that incomplete groups may hold.
    on_overflow : "wait" | "drop" | "partial"
        What becomes of the oldest incomplete groups above that.
    sample_retries : int
        How often a sample that a producer reported as failed, or that is missing when its group's
        deadline has passed, is asked for again, alone (`Producer.wanted`).
    retry_timeout : float
        Seconds after which a request without an answer counts as a failed attempt, and that a group
        of which a sample failed for good waits for its others.
    on_failure : "drop" | "partial"
        What becomes of a group of which a sample failed for good, once its others are there:
        discarded, or delivered without it.
    label : str, optional
        How messages of other processes name this one.
    rank, world_size : int
        Which of how many trainer processes share each step; more than one need the daemon.
    daemon : bool, optional
        True insists on a daemon, False never asks one; None takes it where it is.
    on_stall : "log" | "raise" | callable | None
        What happens each time that nothing was committed, acknowledged or dropped on the bus for
        `stall_timeout` seconds while `take` or `take_step` waits, in one call or in several: a
        warning of the logger ``shmbus.stall``; a StallError; a call with the StallReport, whose
        exceptions end the wait; or nothing.
    stall_timeout : float
        Those seconds.

    Raises
    ------
    BusNotFoundError, BusBusyError, LayoutMismatchError
        There is no such bus, somebody reads it already or has this rank, or it is of another
        layout.
    DaemonUnavailableError
        The daemon that serves this bus has gone, and did not come back, or one is needed.
    ValueError
        Also where the daemon's policies differ from those asked for here.
    """

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
        on_failure: Literal["drop", "partial"] = "drop",
        label: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        daemon: bool | None = None,
        on_stall: OnStall = "log",
        stall_timeout: float = limits.STALL_TIMEOUT_S,
    ) -> None:
        self.name = check_name(name)
        check_choice("on_timeout", on_timeout, ("wait", "drop", "partial"))
        check_choice("on_overflow", on_overflow, ("wait", "drop", "partial"))
        check_choice("on_failure", on_failure, ("drop", "partial"))
        check_choice("duplicate", duplicate, ("drop", "error"))
        self._policy = StashPolicy(
            group_timeout_s=_or_none(check_seconds, "group_timeout", group_timeout),
            on_timeout=on_timeout,
            max_policy_lag=_or_none(check_count, "max_policy_lag", max_policy_lag, 0),
            skip_zero_variance=check_flag("skip_zero_variance", skip_zero_variance),
            max_stash_bytes=_or_none(check_count, "max_stash_bytes", max_stash_bytes, 1),
            on_overflow=on_overflow,
            sample_retries=check_count("sample_retries", sample_retries, 0),
            retry_timeout_s=check_seconds("retry_timeout", retry_timeout),
            on_failure=on_failure,
        )
        self._duplicate = duplicate
        self._label = None if label is None else check_label(label)
        self._rank, self._world_size = check_rank(rank, world_size)
        self._daemon = None if daemon is None else check_flag("daemon", daemon)
        if self._world_size > 1:
            if self._daemon is False:
                raise ValueError(
                    f"daemon=False: expected True or None with world_size={world_size}: without a "
                    "daemon a bus has one reader; leave daemon out, or world_size"
                )
            self._daemon = True
        self._watch = Watch(name, on_stall, stall_timeout)
        self._begin()
        self._require_source()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._closed = False

    def _require_source(self) -> Source:
        if self._closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this Consumer is closed; make a new one"
            )
        source = self._source
        if source is None:
            # A handle that came by pickle attaches in the first thread that uses it.
            with self._lock:
                source = self._source
                if source is None:
                    source = self._attach()
                    if isinstance(source, Collector):
                        self._intake = source.intake(Group, self._watch)
                    self._source = source
        source.require()
        return source

    def _attach(self) -> Source:
        """Find the daemon where there is one; become the collector where there is none."""
        if self._daemon is False:
            return Collector(self.name, self._policy, self._duplicate, self._label)
        deadline = time.monotonic() + limits.DAEMON_WAIT_S
        while True:
            try:
                return self._connect()
            except DaemonUnreachable as error:
                away = error
            if not socket_exists(self.name) and self._daemon is None:
                try:
                    return Collector(self.name, self._policy, self._duplicate, self._label)
                except errors.BusBusyError as error:
                    # A daemon holds the bus a moment before it listens.
                    if "shmbus serve" not in str(error) or time.monotonic() > deadline:
                        raise
            if time.monotonic() > deadline:
                raise errors.DaemonUnavailableError(
                    f"bus {self.name!r}: no daemon answers ({away}); start it with `shmbus serve "
                    f"{self.name}`{self._daemon_hint()}"
                ) from away
            time.sleep(limits.REDIAL_INTERVAL_S)

    def _daemon_hint(self) -> str:
        if self._world_size > 1:
            return (
                f", which rank={self._rank}, world_size={self._world_size} need: without it a bus "
                "has one reader"
            )
        return "" if self._daemon else ", or read the bus in this process by daemon=False"

    def _connect(self) -> Source:
        return DaemonClient(
            self.name,
            stash_options(self._policy, self._duplicate, only_set=True),
            self._label or process_label(),
            self._rank,
            self._world_size,
        )

    # -- taking ---------------------------------------------------------------------------------

    def _take(self, max_groups: int = 64, timeout: float | None = 0.1) -> list[Group]:
        """Do `take` where its base leaves it to this: a daemon's consumer, numbers of all kinds."""
        max_groups = clamp_request("max_groups", max_groups)
        check_timeout(timeout)
        source = self._require_source()
        if not isinstance(source, DaemonClient):
            # The first call, or numbers of other kinds than int and float.
            return self.take(max_groups, None if timeout is None else float(timeout))
        if self._world_size > 1:
            return self.take_step(groups=max_groups, max_wait=0.0, timeout=timeout)
        watch = self._watch
        leases = source.take(max_groups, watch.first_s(timeout))
        if not leases and timeout != 0:
            leases = watch.go_on(
                lambda slice_s: source.take(max_groups, slice_s),
                source.segment,
                "a complete group",
                timeout,
            )
        return Group.make(self, leases)

    def take_step(
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
        rank that died gets what it had not acknowledged again, before anything else.

        Parameters
        ----------
        groups : int, optional
            So many groups for each rank.
        tokens : int, optional
            Instead: as many whole groups as fit into this many elements of `field` a rank. A rank's
            only group may have more.
        max_wait : float, optional
            Seconds after the step's first group when it is formed though it is not full, as soon as
            each rank gets a group; None waits until it is full.
        field : str
            What a trajectory is weighed by.
        timeout : float, optional
            Seconds to wait: None waits for ever.
        only_full : bool
            Have no step formed before it is full, whatever `max_wait`: for one that asks ahead.

        Returns
        -------
        list[Group]
            Empty when the time is over. The same rank then asks for the same step again.

        Raises
        ------
        ValueError
            The ranks ask for one step in different ways, or there are no ranks.
        StallError
            As for `take`.
        """
        if (groups is None) == (tokens is None):
            raise ValueError("expected one of groups and tokens")
        groups = _or_none(clamp_request, "groups", groups)
        tokens = _or_none(clamp_request, "tokens", tokens)
        check_timeout(max_wait)
        check_timeout(timeout)
        source = self._require_source()
        if self._world_size == 1 or not isinstance(source, DaemonClient):
            raise ValueError("take_step: expected a Consumer of world_size 2 or more")

        def wait(slice_s: float | None) -> list[Any]:
            return source.take_step(
                groups=groups,
                tokens=tokens,
                max_wait=max_wait,
                field=field,
                timeout=slice_s,
                only_full=only_full,
            )

        watch = self._watch
        leases = wait(watch.first_s(timeout)) or watch.go_on(
            wait, source.segment, "this rank's step", timeout
        )
        return Group.make(self, leases)

    def __iter__(self) -> Iterator[Group]:
        """Complete groups for ever, until the consumer is closed."""
        while not self._closed:
            try:
                groups = self.take(1, None)
            except errors.BusClosedError:
                if self._closed:
                    return
                raise
            yield from groups

    # -- ending leases --------------------------------------------------------------------------

    def ack(self, groups: Group | Iterable[Group]) -> None:
        """Acknowledge one group or several; each is atomic, even if this process dies now.

        Without a daemon they are acknowledged when this returns. With one they are on their way to
        it: they take effect even if this process dies now, and, as long as it lives, even if the
        daemon does, since the next one is told. Only if both die before the daemon has read it is
        a group delivered again, as one that was never acknowledged.

        Parameters
        ----------
        groups : Group or iterable of Group
            Delivered by this consumer and still leased.

        Raises
        ------
        ProtocolError
            One of them is not leased any more; those before it are acknowledged.
        """
        self._end("ack", groups, _core.ACKED, "acknowledged")

    def drop(self, groups: Group | Iterable[Group]) -> None:
        """Discard leased groups; the ledger counts their samples as malformed.

        Parameters
        ----------
        groups : Group or iterable of Group
            Delivered by this consumer and still leased.

        Raises
        ------
        ProtocolError
            One of them is not leased any more.
        """
        self._end("drop", groups, _core.DROP_MALFORMED, "dropped")

    def _end(
        self, verb: str, groups: Group | Iterable[Group], reason: int, state: GroupState
    ) -> None:
        source = self._require_source()
        with source.lock:
            try:
                if isinstance(groups, list):
                    groups = groups[source.end_groups(self, groups, reason, state) :]
                for group in _several(verb, groups):
                    source.end(self._leased(source, group, verb), reason)
                    group.state = state
            finally:
                source.flush()

    def give_back(self, group: Group) -> None:
        """End a lease without acknowledging; the group is the next to be delivered.

        Parameters
        ----------
        group : Group
            Delivered by this consumer and still leased.

        Raises
        ------
        ProtocolError
            It is not leased any more.
        """
        source = self._require_source()
        with source.lock:
            source.give_back(self._leased(source, group, "give back"))
            group.state = "given_back"
            source.flush()

    def _leased(self, source: Source, group: Group, verb: str) -> Lease:
        if not isinstance(group, Group):
            raise TypeError(f"{verb}: expected a Group, got {type(group).__name__}")
        group.require_leased(verb)
        lease: Lease = group._lease
        if group._consumer is not self or not source.is_leased(lease):
            raise errors.ProtocolError(
                f"cannot {verb} group {group.instance_id!r} here, since another Consumer "
                "delivered it"
            )
        return lease

    # -- state ----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The current policy version, as producers see it; settable."""
        return self._require_source().policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        source = self._require_source()
        source.policy_version = check_policy_version(version)

    def stats(self) -> Ledger:
        """Return the ledger: where every trajectory ever committed is now."""
        return self._require_source().stats()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self) -> None:
        """Leave the bus. What is not acknowledged stays in the ring for the next consumer."""
        self._closed = True
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

    def __reduce__(self) -> tuple[Callable[..., Consumer], tuple[Any, ...]]:
        return _rebuild, (
            type(self), self.name, self._policy, self._duplicate, self._label,
            (self._rank, self._world_size, self._daemon), self._watch.options,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r}{' closed' if self._closed else ''}>"


def _rebuild(
    cls: type[Consumer],
    name: str,
    policy: StashPolicy,
    duplicate: Any,
    label: str | None,
    place: tuple[int, int, bool | None],
    stall: tuple[OnStall, float],
) -> Consumer:
    self = cls.__new__(cls)
    self.name = name
    self._policy = policy
    self._duplicate = duplicate
    self._label = label
    self._rank, self._world_size, self._daemon = place
    self._watch = Watch(name, *stall)
    self._begin()
    return self


def _several(verb: str, groups: object) -> Iterable[Group]:
    if isinstance(groups, Group):
        return (groups,)
    if not isinstance(groups, Iterable):
        raise TypeError(
            f"{verb}: expected a Group or an iterable of Groups, got {type(groups).__name__}"
        )
    return groups


def stash_options(policy: StashPolicy, duplicate: str, *, only_set: bool = False) -> dict[str, Any]:
    """Return the stash's options by the names of Consumer; or those alone that are no default."""

    def named(policy: StashPolicy, duplicate: str) -> dict[str, Any]:
        return {
            "group_timeout": policy.group_timeout_s,
            "on_timeout": policy.on_timeout,
            "max_policy_lag": policy.max_policy_lag,
            "skip_zero_variance": policy.skip_zero_variance,
            "duplicate": duplicate,
            "max_stash_bytes": policy.max_stash_bytes,
            "on_overflow": policy.on_overflow,
            "sample_retries": policy.sample_retries,
            "retry_timeout": policy.retry_timeout_s,
            "on_failure": policy.on_failure,
        }

    options = named(policy, duplicate)
    usual = named(StashPolicy(), "drop")
    return {k: v for k, v in options.items() if not only_set or v != usual[k]}


def _or_none(check: Callable[..., _T], name: str, value: object, *rest: object) -> _T | None:
    return None if value is None else check(name, value, *rest)
