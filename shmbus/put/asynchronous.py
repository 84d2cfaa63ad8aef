"""Waiting for space without blocking an event loop.

Invariant: a wait that is cancelled has put nothing.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shmbus import errors, limits
from shmbus._arguments import SECONDS, TRAIN, check_split, check_timeout
from shmbus._loop_waits import LoopWaits
from shmbus.put.attached import WAITS_FOR_SPACE, AttachedWriter, ProducerOptions
from shmbus.segment import lifecycle
from shmbus.segment.names import check_name
from shmbus_ext import _core

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from shmbus_ext._values import FieldValue, SupportsItem

__all__ = ["AsynchronousPuts"]

#: Seconds between two polls of `aput` for the successor of a removed bus.
_SUCCESSOR_POLL_S = 0.02


class AsynchronousPuts(AttachedWriter):
    """`aput` and `wait_ready`, and the waiting of every other verb that a loop awaits."""

    def _begin_waits(self) -> None:
        self._space = LoopWaits()

    @classmethod
    async def awaited(
        cls, name: str, *, wait: float | None = 60.0, **options: Unpack[ProducerOptions]
    ) -> Self:
        """Make a Producer once there is a bus of that name, without blocking the event loop.

        Parameters
        ----------
        name : str
            The bus.
        wait : float, optional
            Seconds to wait for it: None waits for ever, 0 does not wait.
        **options
            All others of `Producer`.

        Returns
        -------
        Producer

        Raises
        ------
        BusNotFoundError, BusBusyError, LayoutMismatchError, TypeError, ValueError
            As for `Producer`.
        asyncio.CancelledError
            The task was cancelled during the wait; nothing is attached.
        """
        wait = check_timeout(wait, "wait")
        for rest_s in lifecycle.until_there(check_name(name), wait):
            await asyncio.sleep(rest_s)
        made: Callable[..., Self] = cls
        return made(name, **options)

    async def aput(
        self,
        instance_id: str | int,
        *,
        group_size: int,
        index: int,
        score: float | SupportsItem | None = 0.0,
        policy_version: int | tuple[int, int] = 0,
        round: int | None = None,
        split: str | None = None,
        need: int | None = None,
        meta: Any = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
        **arrays: FieldValue,
    ) -> None:
        """Put without blocking the event loop: where the bus is full, other tasks run.

        Parameters
        ----------
        instance_id, group_size, index, score, policy_version, round, split, need, meta : object
            As for `put`.
        rows, **arrays
            As for `put`. The arrays must not change before this returns.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.

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
        put = functools.partial(
            self.put,
            instance_id,
            group_size=group_size,
            index=index,
            score=score,
            policy_version=policy_version,
            round=round,
            split=split,
            need=need,
            meta=meta,
            rows=rows,
            timeout=0,
            **arrays,
        )
        await self._retry(put, timeout)

    async def aput_many(
        self, items: Iterable[dict[str, Any]], *, timeout: float | None = None
    ) -> int:
        """Put a list as `put_many` does, without blocking the event loop.

        Parameters
        ----------
        items : iterable of dict
            As for `put_many`. The arrays must not change before this returns.
        timeout : float, optional
            Seconds to wait for space, for all of them together: None waits for ever, 0 does not
            wait.

        Returns
        -------
        int
            How many were put: all of them.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError
            As for `put_many`; nothing was put.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put_many`; `accepted` says how many items were committed, from the first on.
        asyncio.CancelledError
            The task was cancelled during the wait; it has `accepted`, too.
        """
        check_timeout(timeout)
        if not isinstance(items, Iterable):
            raise TypeError(f"items: expected an iterable of dicts, got {type(items).__name__}")
        rest = list(items)
        accepted = 0

        def put_rest() -> None:
            nonlocal accepted
            try:
                accepted += self.put_many(rest, timeout=0)
            except BaseException as error:
                done = getattr(error, "accepted", 0)
                accepted += done
                del rest[:done]
                raise

        try:
            await self._retry(put_rest, timeout)
        except BaseException as error:
            error.accepted = accepted  # type: ignore[attr-defined]
            raise
        return accepted

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
            await self._check_stall(began)
            ticket = None

    async def _space_freed(self, ticket: int, deadline: float | None) -> None:
        """Wait, with all other tasks of this loop, for one thread that sleeps on the ring."""
        wait_s = limits.SPACE_WAIT_S
        if deadline is not None:
            wait_s = min(wait_s, max(0.0, deadline - time.monotonic()))
        await self._space.wait(functools.partial(self._await_space, ticket, wait_s), wait_s)

    async def _check_stall(self, began: float, waits_for: str = WAITS_FOR_SPACE) -> None:
        """Have the watchdog check, in a thread: a report takes longer than a loop may rest."""
        waited_s = time.monotonic() - began
        await asyncio.to_thread(self._watch.check, self._segment, waits_for, waited_s)

    def pressure(self) -> float:
        """How near the bus is to making producers wait: 0 for empty, 1 for full or paused.

        A read of shared memory, a word for each extent: cheap beside a rollout, not beside a put.

        Returns
        -------
        float
            The part of the bus's extents that somebody holds, or 1.0 while the bus is paused, or
            while no group may begin (`max_lead`).
        """
        return self._pressure(None)

    def _pressure(self, group: tuple[str, int | None, int] | None) -> float:
        segment = self._here()
        if segment.paused() is not None:
            return 1.0
        limit, held, *_ = _core.lead_state(segment)
        if limit and held >= limit and not (group and _core.lead_knows(segment, *group)):
            return 1.0
        return 1.0 - segment.free_extents() / segment.extent_count

    async def wait_ready(
        self,
        below: float = limits.READY_PRESSURE,
        *,
        timeout: float | None = None,
        instance_id: str | None = None,
        round: int | None = None,
        split: str = TRAIN,
    ) -> bool:
        """Wait, with all other tasks of the loop, until the pressure is below a bound.

        Ask before a rollout is started, so that none is made for a bus that is full or paused, or
        for a group that may not begin yet.

        Parameters
        ----------
        below : float
            Above 0, at most 1.
        timeout : float, optional
            Seconds to wait: None waits for ever.
        instance_id : str, optional
            The prompt that is to be sampled. Give it where workers share groups: a sample of a
            group that others have begun need not wait for the bound on groups.
        round : int, optional
            Its round, as for `put`.
        split : str, default "train"
            Its split, as for `put`.

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
        number = _core.split_number(self._here(), check_split(split))
        group = None if instance_id is None else (instance_id, round, number)
        while self._pressure(group) >= below:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            ticket = self._want_space()
            if self._pressure(group) >= below:
                await self._space_freed(ticket, deadline)
                await self._check_stall(began)
        return True
