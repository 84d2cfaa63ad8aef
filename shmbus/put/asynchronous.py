"""Waiting for space without blocking an event loop.

Invariant: a wait that is cancelled has put nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from shmbus import errors, limits
from shmbus._arguments import SECONDS, check_timeout
from shmbus._space import SpaceWaits
from shmbus.put.attached import WAITS_FOR_SPACE, AttachedWriter

__all__ = ["AsynchronousPuts"]

#: Seconds between two polls of `aput` for the successor of a removed bus.
_SUCCESSOR_POLL_S = 0.02


class AsynchronousPuts(AttachedWriter):
    """`aput` and `wait_ready`, and the waiting of every other verb that a loop awaits."""

    def _begin_waits(self) -> None:
        self._space = SpaceWaits()

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
        await asyncio.to_thread(self._watch.check, self._segment, WAITS_FOR_SPACE, waited_s)

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
