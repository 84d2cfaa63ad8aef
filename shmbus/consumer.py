"""Consumer: delivers complete groups under lease. The public face of whatever collects them.

Invariant: a group is checked here (that it is one, leased, and of this Consumer) before its source
hears of it, so no source ends a lease twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal

from shmbus import _segments, errors
from shmbus.collector import Collector
from shmbus.group import Group, GroupState
from shmbus.ledger import Ledger
from shmbus.producer import check_timeout
from shmbus.source import Lease, Source
from shmbus.stash import StashPolicy
from shmbus_ext import _core

__all__ = ["Consumer"]


class Consumer:
    """Collects complete groups from a bus. One a bus; a second one gets BusBusyError.

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
    label : str, optional
        How messages of other processes name this one.

    Raises
    ------
    BusNotFoundError, BusBusyError, LayoutMismatchError
        There is no such bus, somebody reads it already, or it is of another layout.
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
        label: str | None = None,
    ) -> None:
        self.name = _segments.check_name(name)
        _check_choice("on_timeout", on_timeout, ("wait", "drop", "partial"))
        _check_choice("on_overflow", on_overflow, ("wait", "drop", "partial"))
        _check_choice("duplicate", duplicate, ("drop", "error"))
        _check_number("group_timeout", group_timeout, (int, float), above=0)
        _check_number("max_policy_lag", max_policy_lag, (int,), above=-1)
        _check_number("max_stash_bytes", max_stash_bytes, (int,), above=0)
        self._policy = StashPolicy(
            group_timeout_s=group_timeout,
            on_timeout=on_timeout,
            max_policy_lag=max_policy_lag,
            skip_zero_variance=bool(skip_zero_variance),
            max_stash_bytes=max_stash_bytes,
            on_overflow=on_overflow,
        )
        self._duplicate = duplicate
        self._label = label
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
                    source = self._source = self._attach()
        source.require()
        return source

    def _attach(self) -> Source:
        return Collector(self.name, self._policy, self._duplicate, self._label)

    # -- taking ---------------------------------------------------------------------------------

    def take(self, max_groups: int = 64, timeout: float | None = 0.1) -> list[Group]:
        """Take complete groups, in the order of completion, as soon as there is one.

        Parameters
        ----------
        max_groups : int
            How many at the most.
        timeout : float, optional
            Seconds to wait for the first: None waits for ever, 0 does not wait.

        Returns
        -------
        list[Group]
            Maybe empty. Each is leased to the caller until it is acknowledged or given back.

        Raises
        ------
        ProtocolError
            A duplicate came, under ``duplicate="error"``; once for each, with nothing lost.
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        if isinstance(max_groups, bool) or not isinstance(max_groups, int):
            raise TypeError(f"max_groups: expected an int, got {type(max_groups).__name__}")
        if max_groups < 1:
            raise ValueError(f"max_groups: expected 1 or more, got {max_groups}")
        check_timeout(timeout)
        leases = self._require_source().take(max_groups, timeout)
        return [Group(self, lease) for lease in leases]

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
        lease = group._lease
        if group._consumer is not self or not source.is_leased(lease):
            raise errors.ProtocolError(
                f"group {group.instance_id!r}: cannot {verb} it here, since another Consumer "
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
        source.policy_version = _segments.check_policy_version(version)

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
        return _rebuild, (type(self), self.name, self._policy, self._duplicate, self._label)

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r}{' closed' if self._closed else ''}>"


def _rebuild(
    cls: type[Consumer], name: str, policy: StashPolicy, duplicate: Any, label: str | None
) -> Consumer:
    self = cls.__new__(cls)
    self.name = name
    self._policy = policy
    self._duplicate = duplicate
    self._label = label
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


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {choices}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")


def _check_number(name: str, value: object, kinds: tuple[type, ...], above: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(
            f"{name}: expected {' or '.join(k.__name__ for k in kinds)} or None, got "
            f"{type(value).__name__}"
        )
    if not value > above:  # type: ignore[operator]
        raise ValueError(f"{name}: expected more than {above:g}, got {value}")
