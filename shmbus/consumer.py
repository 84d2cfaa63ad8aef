"""Consumer: reads the ring, stashes, and delivers complete groups under lease.

It joins three parts that do not know each other: the Reader (C: bytes and space), the Stash (pure:
which group is complete) and the clock. A lock serialises them; it is not held while sleeping, so
groups can be acknowledged from another thread while one waits for the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal

from shmbus import _segments, errors, limits
from shmbus.group import Group
from shmbus.ledger import REASONS, Ledger
from shmbus.producer import check_timeout, process_label
from shmbus.stash import Discard, Stash, StashPolicy
from shmbus_ext import _core

__all__ = ["Consumer"]

Trajectory = _core.Trajectory


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
        self._attach()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._reader: _core.Reader | None = None
        self._closed = False
        self._stash: Stash[Trajectory] = Stash(self._policy)
        self._errors: list[errors.ProtocolError] = []
        self._next_sweep_s = 0.0
        self._next_evacuation_s = 0.0

    def _attach(self) -> _core.Reader:
        segment = _segments.open_segment(self.name)
        try:
            self._reader = _core.Reader(segment, self._label or process_label())
        except BaseException:
            segment.close()
            raise
        self._segment = segment
        return self._reader

    def _require_reader(self) -> _core.Reader:
        if self._closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this Consumer is closed; make a new one"
            )
        reader = self._reader
        if reader is None:
            return self._attach()
        if self._segment.closed:
            raise errors.BusClosedError(
                f"bus {self.name!r}: this Consumer was made in another process, before a fork; "
                "make a new one in this process"
            )
        return reader

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
        now = time.monotonic()
        deadline = None if timeout is None else now + timeout
        woken = False
        while True:
            with self._lock:
                reader = self._require_reader()
                if not woken:
                    # Between a wake-up and the caller nothing is done that can wait.
                    self._keep_house(reader, now)
                more = self._pump(reader, max_groups, now)
                leased = self._lease(reader, max_groups)
                if leased:
                    return leased
                if more:
                    continue
                left = None if deadline is None else deadline - now
                if left is not None and left <= 0:
                    return []
                wait_s = self._wait_s(now, left)
            woken = reader.wait(wait_s)
            now = time.monotonic()

    def _lease(self, reader: _core.Reader, max_groups: int) -> list[Group]:
        stash = self._stash
        # What raises comes before the lease: nobody would know of a group leased then.
        if stash.discards or self._errors:
            self._settle(reader)
        leased = stash.lease(max_groups, self._segment.policy_version)
        if stash.discards:
            self._settle(reader)
        if leased:
            # The caller may not come back before a producer asks who holds the space.
            self._note(reader)
        return [Group(self, group) for group in leased]

    def _wait_s(self, now: float, left: float | None) -> float:
        """Until the caller's deadline, the stash's, or the next look for dead producers."""
        candidates = [self._next_sweep_s - now]
        if left is not None:
            candidates.append(left)
        group_deadline = self._stash.next_deadline_s()
        if group_deadline is not None:
            candidates.append(group_deadline - now)
        return max(1e-4, min(candidates))

    def _pump(self, reader: _core.Reader, wanted: int, now: float) -> bool:
        """Move what the ring has into the stash; True if there may be more at once."""
        more = False
        if self._stash.ready_groups < wanted:
            samples = reader.poll(limits.POLL_RECORDS)
            if samples:
                self._stash.add(samples, now)
                more = len(samples) == limits.POLL_RECORDS
        self._stash.expire(now)
        return more

    def _keep_house(self, reader: _core.Reader, now: float) -> None:
        """Look for the dead, and for space that can be won back, each at its interval."""
        self._note(reader)
        if now >= self._next_sweep_s:
            self._next_sweep_s = now + limits.SWEEP_INTERVAL_S
            reader.sweep()
        if now >= self._next_evacuation_s:
            self._next_evacuation_s = now + limits.EVACUATE_INTERVAL_S
            self._relieve(reader)

    def _relieve(self, reader: _core.Reader) -> None:
        """Housekeeping under pressure: make room where records that wait keep it."""
        reader.tidy()
        stash = self._stash
        segment = self._segment
        few = segment.extent_count * limits.EVACUATE_FREE_FRACTION
        if segment.space_wanted() or segment.free_extents() < few:
            reader.sweep()
            reader.evacuate(stash.waiting_samples())

    def _note(self, reader: _core.Reader) -> None:
        """Tell other processes what is held here, for their messages."""
        stash = self._stash
        reader.note(
            stash.leased_groups,
            stash.leased_records,
            0,
            stash.open_groups + stash.ready_groups,
            stash.open_records + stash.ready_records,
            0,
        )

    def _settle(self, reader: _core.Reader) -> None:
        """Release what the stash discarded, each with its reason."""
        if not self._stash.discards:
            if self._errors:
                raise self._errors.pop(0)
            return
        for discard in self._stash.take_discards():
            reader.release(discard.samples, REASONS.index(discard.reason))
            if discard.reason == "duplicate" and self._duplicate == "error":
                self._errors.append(_duplicate_error(discard))
        if self._errors:
            raise self._errors.pop(0)

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
        with self._lock:
            reader = self._require_reader()
            for group in _several("ack", groups):
                self._end(reader, group, "ack", _core.ACKED)
                group.state = "acknowledged"
            self._note(reader)

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
        with self._lock:
            reader = self._require_reader()
            for group in _several("drop", groups):
                self._end(reader, group, "drop", _core.DROP_MALFORMED)
                group.state = "dropped"
            self._note(reader)

    def _end(self, reader: _core.Reader, group: Group, verb: str, reason: int) -> None:
        open_group = self._leased(group, verb)
        reader.release(open_group.samples, reason)
        self._stash.end_lease(open_group)

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
        with self._lock:
            reader = self._require_reader()
            self._stash.give_back(self._leased(group, "give back"))
            group.state = "given_back"
            self._note(reader)
            reader.wake()

    def _leased(self, group: Group, verb: str) -> _core.Row[Trajectory]:
        if not isinstance(group, Group):
            raise TypeError(f"{verb}: expected a Group, got {type(group).__name__}")
        group.require_leased(verb)
        open_group = group._open
        if group._consumer is not self or not self._stash.is_leased(open_group):
            raise errors.ProtocolError(
                f"group {group.instance_id!r}: cannot {verb} it here, since another Consumer "
                "delivered it"
            )
        return open_group

    # -- state ----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The current policy version, as producers see it; settable."""
        self._require_reader()
        return self._segment.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._require_reader()
        self._segment.policy_version = _segments.check_policy_version(version)

    def stats(self) -> Ledger:
        """Return the ledger: where every trajectory ever committed is now."""
        with self._lock:
            reader = self._require_reader()
            reader.sweep()
            committed, in_ring = reader.count_unread()
            stash = self._stash
            segment = self._segment
            return Ledger.from_counts(
                segment.released(),
                committed=committed,
                in_ring=in_ring,
                leased=stash.leased_records,
                stashed=stash.open_records + stash.ready_records,
                groups_open=stash.open_groups,
                groups_ready=stash.ready_groups,
                groups_leased=stash.leased_groups,
                groups_timed_out=stash.timeouts,
                stash_overflows=stash.overflows,
                moved=reader.moves,
                policy_version=segment.policy_version,
                producers=sum(row[1] == _core.SLOT_ACTIVE for row in segment.producers()),
                capacity=segment.capacity,
                free=segment.free_extents() * segment.extent_bytes,
            )

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self) -> None:
        """Leave the bus. What is not acknowledged stays in the ring for the next consumer."""
        reader = self._reader
        self._closed = True
        if reader is not None:
            reader.wake()
            with self._lock:
                reader.close()

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


def _duplicate_error(discard: Discard[Trajectory]) -> errors.ProtocolError:
    sample = discard.samples[0]
    return errors.ProtocolError(
        f"trajectory {sample.instance_id!r}[{sample.index}] came twice, now from producer "
        f"{sample.producer_id}; the first was kept. Number the samples of a prompt once, or give "
        "each repetition its own epoch"
    )


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
