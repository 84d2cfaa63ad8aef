"""Calls that sleep in the kernel, awaited by an event loop: one thread for all tasks of a loop.

Invariant: nothing here keeps a loop alive, nor what belongs to one: a handle outlives many loops
where each of its calls is an `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable


class LoopWaits:
    """For each event loop, the one thread that sleeps for all of its tasks."""

    def __init__(self) -> None:
        # A future knows its loop; whoever waits holds it, and the thread until it is done.
        self._waiting: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, weakref.ref[asyncio.Future[object]]
        ] = weakref.WeakKeyDictionary()

    async def wait(self, sleep: Callable[[], object], wait_s: float | None) -> None:
        """Wait until `sleep()` returns, or the one that another task of this loop has under way."""
        loop = asyncio.get_running_loop()
        known = self._waiting.get(loop)
        waiting = None if known is None else known()
        if waiting is None or waiting.done():
            waiting = loop.run_in_executor(None, sleep)
            waiting.add_done_callback(_look_at)
            self._waiting[loop] = weakref.ref(waiting)
            wait_s = None
        await asyncio.wait([waiting], timeout=wait_s)


def _look_at(future: asyncio.Future[object]) -> None:
    """Have asyncio not report an exception as one that nobody has looked at."""
    if not future.cancelled():
        future.exception()
