"""A lock for one update at a time in a process, whichever threads and event loops ask for it.

Invariant: who was cancelled while it waited does not have it.
"""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

__all__ = ["OneAtATime"]

#: Seconds between two tries; an update takes longer.
TRY_S = 0.01


class OneAtATime:
    """For an ``async with`` block. A lock of asyncio's would belong to one event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(TRY_S)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()
