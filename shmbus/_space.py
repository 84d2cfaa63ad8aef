"""Waits for space in the ring that do not block an event loop.

Invariant: nothing here keeps a loop alive, nor what belongs to one: a Producer outlives many loops
where each of its calls is an `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

__all__ = ["SpaceWaits"]


class SpaceWaits:
    """For each event loop, the one thread that sleeps on the ring for all of its tasks."""

    def __init__(self) -> None:
        # A future knows its loop; whoever waits holds it, and the thread until it is done.
        self._waiting: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, weakref.ref[asyncio.Future[None]]
        ] = weakref.WeakKeyDictionary()

    async def wait(self, sleep: Callable[[int, float], None], ticket: int, wait_s: float) -> None:
        """Wait for `sleep(ticket, wait_s)`, or for the call of it that is under way already."""
        loop = asyncio.get_running_loop()
        known = self._waiting.get(loop)
        waiting = None if known is None else known()
        if waiting is None or waiting.done():
            waiting = loop.run_in_executor(None, sleep, ticket, wait_s)
            self._waiting[loop] = weakref.ref(waiting)
        await asyncio.wait([waiting], timeout=wait_s)
