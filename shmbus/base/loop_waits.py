"""Sleeping kernel calls, awaited by an event loop: a single thread for all tasks of a loop.

Invariant: nothing here keeps a loop or its objects alive. A handle outlives many loops if every
call runs in its own `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable


class LoopWaits:
    """Sleeping threads by event loop: a single thread for the tasks of a loop."""

    def __init__(self) -> None:
        # A future knows its loop. The waiting task holds the future, and the thread until the end.
        self._waiting: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, weakref.ref[asyncio.Future[object]]
        ] = weakref.WeakKeyDictionary()

    async def wait(self, sleep: Callable[[], object], wait_s: float | None) -> None:
        """Wait for `sleep()`, or for the call another task of this loop has under way."""
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
    """Retrieve the exception, to stop asyncio's report of an unretrieved exception."""
    if not future.cancelled():
        future.exception()
