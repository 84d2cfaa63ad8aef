"""Producer: what a rollout worker writes trajectories with.

`put` and `put_many` are C from end to end (shmbus_ext/python); this file adds what needs no
speed: attaching, reservations by field names, and waiting without blocking an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

import msgspec

from shmbus import errors, limits
from shmbus._arguments import (
    SECONDS,
    check_choice,
    check_count,
    check_flag,
    check_int,
    check_label,
    check_timeout,
)
from shmbus._fields import FieldSpec, check_sizes, parse_field
from shmbus._space import SpaceWaits
from shmbus.segment import lifecycle
from shmbus.segment.names import check_name
from shmbus.stall import OnStall, Watch
from shmbus_ext import _core

__all__ = ["Producer", "ProducerStats", "WantedSample"]

#: What a producer waits for, in a report of a stall.
_SPACE = "space in the ring"

#: Seconds between two polls of `aput` for the successor of a removed bus.
_SUCCESSOR_POLL_S = 0.02


class ProducerStats(msgspec.Struct, frozen=True):
    """What a Producer has done since it attached.

    Attributes
    ----------
    producer_id : int
        Its number, unique on the bus.
    committed : int
        Trajectories committed.
    aborted : int
        Reservations ended without a commit.
    bytes : int
        Ring bytes of what was committed, headers and padding included.
    full_waits : int
        How often it found the bus full.
    """

    producer_id: int
    committed: int
    aborted: int
    bytes: int
    full_waits: int


class WantedSample(msgspec.Struct, frozen=True):
    """A sample that the collector asks for again: `put` it as any other, or `fail` it.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    epoch : int | None
        Where its producers gave one.
    index : int
        Which sample of its group.
    group_size : int | None
        Samples in a complete group; None where all that is known of the group are failures that did
        not say it.
    attempt : int
        1 for the first time that it is asked for.
    reason : str
        Why it is asked for: what `fail` was told, or who died, or how long it has been missing.
    """

    instance_id: str
    epoch: int | None
    index: int
    group_size: int | None
    attempt: int
    reason: str


class Producer(_core.Writer):
    """Writes trajectories into a bus. Safe from several threads; one handle a process.

    `put` copies one trajectory, `put_many` a list, `reserve` has its arrays filled in place, `aput`
    waits without blocking an event loop, and `fail` reports that a sample will not come.

    A handle pickles by name, so it can be sent to a spawned process or a Ray actor, where it
    attaches again. After a fork the child's copy raises BusClosedError; make a new one there.

    Parameters
    ----------
    name : str
        The bus.
    checksum : bool
        Also protect the payload by a CRC-32C, which the consumer verifies; the header always is.
    label : str, optional
        How messages of other processes name this one; the script's name by default.
    on_stall : "log" | "raise" | callable | None
        What happens each time that nothing has moved on the bus for `stall_timeout` seconds while
        `put`, `put_many`, `reserve`, `aput` or `wait_ready` waits for space, as for `Consumer`.
    stall_timeout : float
        Those seconds.
    attach : "same" | "successor"
        What happens once the bus was removed: every put raises BusRemovedError; or `put`,
        `put_many`, `reserve`, `fail` and `aput` wait, up to their timeout, for a new bus of that
        name, and go on in it. Open reservations are aborted then; what was committed into the old
        bus stays there, for the Consumer that holds it.

    Raises
    ------
    BusNotFoundError
        There is no such bus.
    BusBusyError
        All producer slots are taken.
    LayoutMismatchError
        The segment is of another layout, or damaged.
    """

    def __init__(
        self,
        name: str,
        *,
        checksum: bool = False,
        label: str | None = None,
        on_stall: OnStall = "log",
        stall_timeout: float = limits.STALL_TIMEOUT_S,
        attach: Literal["same", "successor"] = "same",
    ) -> None:
        self.name = check_name(name)
        check_choice("attach", attach, ("same", "successor"))
        self._attach: Literal["same", "successor"] = attach
        self._watch = Watch(name, on_stall, stall_timeout)
        self._taken: dict[tuple[str, int | None, int], WantedSample] = {}
        self._taking = _core.RecursiveLock()
        self._checksum = check_flag("checksum", checksum)
        self._label = label
        shown = check_label(label)
        self._space = SpaceWaits()
        segment = lifecycle.open_segment(name)
        try:
            super().__init__(segment, shown, self._checksum)
        except BaseException:
            segment.close()
            raise
        self._watch_space(segment)
        if self._attach == "successor":
            self._follow()

    def _watch_space(self, segment: _core.Segment) -> None:
        if self._watch.slice_s is not None:
            # Nothing here refers to this Producer, which so ends with its last reference.
            look = functools.partial(self._watch.check, segment, _SPACE)
            self._watch_waits(look, self._watch.slice_s)

    def _successor(self) -> _core.Segment | None:
        """Open the bus that has taken the place of the removed one; C moves there."""
        segment = lifecycle.open_if_there(self.name)
        if segment is not None:
            self._watch_space(segment)
            self._taken.clear()  # of the removed bus
        return segment

    def _here(self) -> _core.Segment:
        """Return the segment to read: the successor's, where there is one and this may follow."""
        if self._attach == "successor" and self._segment.removed:
            with contextlib.suppress(errors.BusRemovedError):
                self._go_on(0)
        return self._segment

    def reserve(
        self,
        instance_id: str,
        *,
        group_size: int,
        index: int,
        fields: Mapping[str, FieldSpec],
        score: float = 0.0,
        policy_version: int = 0,
        epoch: int | None = None,
        meta: Any = None,
        meta_room: int = limits.META_ROOM_BYTES,
        timeout: float | None = None,
    ) -> _core.Reservation:
        """Reserve a record whose arrays are filled in place, for as long as that takes.

        Nobody waits for an open reservation: not this producer's other records, nor anybody
        else's. Leaving the ``with`` block commits; an exception aborts.

        Parameters
        ----------
        instance_id : str
            The prompt's key, as for `put`.
        group_size : int
            Samples in a complete group, 1 to 16384.
        index : int
            Which sample of its group this is, 0 to group_size - 1.
        fields : mapping of str to (dtype, shape)
            The arrays; shape is an int or a tuple of int. Their content starts uninitialised.
            ``slot.resize(name, n)`` cuts the first dimension to what was really written.
        score : float, default 0.0
            The reward, finite; ``slot.score = ...`` sets it later.
        policy_version : int, default 0
            As for `put`; ``slot.policy_version = ...`` sets it later.
        epoch : int, optional
            Which repetition of the prompt this is, as for `put`.
        meta : object, optional
            As for `put`; ``slot.meta = ...`` sets it later.
        meta_room : int, default 1024
            Bytes kept for a meta that is set later: 0 to 2 GiB.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.

        Returns
        -------
        Reservation
            ``slot[name]`` is a writable view of the ring, until the commit.

        Raises
        ------
        TypeError
            `fields` is no mapping of str to (dtype, shape), a dtype holds Python objects, or as for
            `put`.
        ValueError
            A size is negative, a field has the name of an argument, or as for `put`.
        RecordTooLargeError
            The fields need more than `record_limit`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`.

        Notes
        -----
        This blocks for space only, as `put` does. After an exception nothing is reserved. A
        reservation that is not ended ends with the producer or its last reference, as an abort.
        """
        head = {
            "instance_id": instance_id,
            "group_size": group_size,
            "index": index,
            "score": score,
            "policy_version": policy_version,
            "epoch": epoch,
            "meta": meta,
            "timeout": timeout,
        }
        if not isinstance(fields, Mapping):
            raise TypeError(
                f"fields: expected a mapping of names to (dtype, shape), got "
                f"{type(fields).__name__}"
            )
        meta_room = check_int("meta_room", meta_room)
        if not 0 <= meta_room < 2**31:
            raise ValueError(f"meta_room: expected 0 to 2 GiB, got {meta_room}")
        parsed = [parse_field(field, spec) for field, spec in fields.items()]
        check_sizes(self.name, self.record_limit, dict(zip(fields, parsed, strict=True)))
        return self._reserve(
            head,
            tuple(fields),
            tuple(dtype for dtype, _ in parsed),
            tuple(shape for _, shape in parsed),
            meta_room,
        )

    def fail(
        self,
        instance_id: str,
        index: int,
        reason: str,
        *,
        group_size: int | None = None,
        epoch: int | None = None,
        policy_version: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Report that a sample failed: its group need not wait for it in vain.

        The report is a small record of the ring, in order with what this producer puts, and as safe
        from any death. The consumer asks for the sample again (`wanted`) as often as its
        `sample_retries` says, and then gives its group up, as its `on_failure` says. The ledger
        counts reports as committed, and in the end as dropped with the reason "failed".

        Parameters
        ----------
        instance_id : str
            The prompt's key, as for `put`.
        index : int
            Which sample of its group failed, from 0.
        reason : str
            What operators and the next producer of the sample are told; its first 500 characters.
        group_size : int, optional
            Samples in a complete group; None where this producer does not know.
        epoch : int, optional
            Which repetition of the prompt this is, as for `put`.
        policy_version : int, default 0
            Version of the policy that was to sample it.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.

        Raises
        ------
        TypeError, ValueError
            The reason is no str, the index is no int of 0 or more, or as for `put`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`, which also says when this blocks.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason: expected a str, got {type(reason).__name__}")
        reason = reason[: limits.FAIL_REASON_CHARS].encode("utf-8", "replace").decode()
        index = check_count("index", index, 0)
        with self._taking:
            request = self._taken.get((instance_id, epoch, index))
        if group_size is None and request is not None:
            group_size = request.group_size
        (self._fail_unsized if group_size is None else self._fail)(
            instance_id,
            group_size=index + 1 if group_size is None else group_size,
            index=index,
            score=0.0 if request is None else float(request.attempt),
            policy_version=policy_version,
            epoch=epoch,
            meta=reason,
            timeout=timeout,
        )

    def wanted(self, limit: int | None = None) -> list[WantedSample]:
        """Take samples that the consumer asks for again, each handed to one producer at a time.

        Where nothing is asked for, this reads one word of shared memory. What is taken here is
        asked of others when this producer closes without an answer, and counts as failed once more
        when it dies, or does not answer within the consumer's `retry_timeout`.

        Parameters
        ----------
        limit : int, optional
            How many at the most; None for all. Workers that share the work take few at a time.

        Returns
        -------
        list[WantedSample]
            Those that nobody has taken, in the order of asking. None of them is handed out again.
        """
        if limit is not None:
            limit = check_count("limit", limit, 1)
        segment = self._here()
        found: list[WantedSample] = []
        if not _core.retry_noted(segment)[0]:
            return found
        mine = set()
        with self._taking:
            for row, number, claimant, id_, epoch, size, index, attempt, reason, _ in sorted(
                _core.retry_requests(segment), key=lambda row: row[1]
            ):
                at = (id_, epoch, index)
                if claimant == self.producer_id + 1:
                    mine.add(at)
                elif (
                    not claimant
                    and (limit is None or len(found) < limit)
                    and _core.retry_claim(segment, row, number, self.producer_id)
                ):
                    found.append(WantedSample(id_, epoch, index, size or None, attempt, reason))
                    self._taken[at] = found[-1]
                    mine.add(at)
            for at in self._taken.keys() - mine:
                del self._taken[at]  # answered, or asked of another
        return found

    def close(self) -> None:
        """Abort open reservations and leave the bus; what was committed stays."""
        if not self.closed:
            # What it was asked for and has not done is for others now.
            for row, _, claimant, *_ in _core.retry_requests(self._segment) if self._taken else ():
                if claimant == self.producer_id + 1:
                    _core.retry_unclaim(self._segment, row, self.producer_id)
        super().close()

    def __del__(self) -> None:
        if getattr(self, "_taken", None):
            self.close()

    async def aput(
        self, instance_id: str, *, timeout: float | None = None, **arguments: Any
    ) -> None:
        """Put without blocking the event loop: where the bus is full, other tasks run.

        Parameters
        ----------
        instance_id : str
            The prompt's key, as for `put`.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.
        **arguments
            All others of `put`, arrays too. The arrays must not change before this returns.

        Raises
        ------
        TypeError, ValueError
            As for `put`.
        RecordTooLargeError, BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`.
        asyncio.CancelledError
            The task was cancelled during the wait; nothing was put.
        """
        check_timeout(timeout)
        await self._retry(lambda: self.put(instance_id, timeout=0, **arguments), timeout)

    async def _retry(self, attempt: Callable[[], Any], timeout: float | None) -> None:
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        ticket: int | None = None
        while True:
            try:
                attempt()
                return
            except errors.BusFullError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            except errors.BusRemovedError:
                if self._attach == "same" or (deadline is not None and time.monotonic() > deadline):
                    raise
                await asyncio.sleep(_SUCCESSOR_POLL_S)
                continue
            if ticket is None:
                # Announced first and tried again: what is freed in between is not slept through.
                ticket = self._want_space()
                continue
            await self._space_freed(ticket, deadline)
            await self._look(began)
            ticket = None

    async def _space_freed(self, ticket: int, deadline: float | None) -> None:
        """Wait, with all other tasks of this loop, for one thread that sleeps on the ring."""
        wait_s = limits.SPACE_WAIT_S
        if deadline is not None:
            wait_s = min(wait_s, max(0.0, deadline - time.monotonic()))
        await self._space.wait(self._await_space, ticket, wait_s)

    async def _look(self, began: float) -> None:
        """Let the watchdog look, in a thread: a report takes longer than a loop may stand still."""
        waited_s = time.monotonic() - began
        await asyncio.to_thread(self._watch.check, self._segment, _SPACE, waited_s)

    def pressure(self) -> float:
        """How near the bus is to making producers wait: 0 for empty, 1 for full or paused.

        A read of shared memory, a word for each extent: cheap beside a rollout, not beside a put.

        Returns
        -------
        float
            The part of the bus's extents that somebody holds, or 1.0 while the bus is paused.
        """
        segment = self._here()
        if segment.paused() is not None:
            return 1.0
        return 1.0 - segment.free_extents() / segment.extent_count

    async def wait_ready(
        self, below: float = limits.READY_PRESSURE, *, timeout: float | None = None
    ) -> bool:
        """Wait, with all other tasks of the loop, until the pressure is below a bound.

        Ask before a rollout is started, so that none is made for a bus that is full or paused.

        Parameters
        ----------
        below : float
            Above 0, at most 1.
        timeout : float, optional
            Seconds to wait: None waits for ever.

        Returns
        -------
        bool
            False where the time was over first.

        Raises
        ------
        TypeError, ValueError
            `below` is no number, or out of its range; or `timeout` is.
        StallError
            As for `put`.
        """
        check_timeout(timeout)
        if isinstance(below, bool) or not isinstance(below, SECONDS):
            raise TypeError(f"below: expected a number, got {type(below).__name__}")
        if not 0 < below <= 1:
            raise ValueError(f"below: expected more than 0, at most 1, got {below!r}")
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        while self.pressure() >= below:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            ticket = self._want_space()
            if self.pressure() >= below:
                await self._space_freed(ticket, deadline)
                await self._look(began)
        return True

    @property
    def paused(self) -> str | None:
        """Why producers shall wait, maybe empty; None where the bus is not paused."""
        pause = self._here().paused()
        return None if pause is None else pause[0]

    @property
    def policy_version(self) -> int:
        """The trainer's current policy version; a read of shared memory, no call to anybody."""
        return self._here().policy_version

    @property
    def record_limit(self) -> int:
        """Bytes of the largest record that this bus takes, header and padding included."""
        return self._here().record_limit

    def stats(self) -> ProducerStats:
        """Return what this Producer has done since it attached.

        Returns
        -------
        ProducerStats
            Its own counts; `Bus.stats` has those of all producers. Where it went on in a successor
            they go on, and `producer_id` is that of the present bus.
        """
        return ProducerStats(self.producer_id, *self._counts())

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Producer], tuple[Any, ...]]:
        return _rebuild, (
            type(self), self.name, self._checksum, self._label, self._watch.options, self._attach,
        )  # fmt: skip

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"producer_id={self.producer_id}"
        return f"<Producer {self.name!r} {state}>"


def _rebuild(
    cls: type[Producer],
    name: str,
    checksum: bool,
    label: str | None,
    stall: tuple[OnStall, float],
    attach: Literal["same", "successor"],
) -> Producer:
    return cls(
        name,
        checksum=checksum,
        label=label,
        on_stall=stall[0],
        stall_timeout=stall[1],
        attach=attach,
    )
