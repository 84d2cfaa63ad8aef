"""Updates as tasks: one at a time in a process, never cut short.

Invariant: a task cancelled during its wait for a turn never gets the turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")

#: Seconds between two tries; an update takes longer.
TRY_S = 0.01


class OneAtATime:
    """For an ``async with`` block. A lock of asyncio's would belong to one event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(TRY_S)

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._lock.release()


async def to_the_end(work: Coroutine[Any, Any, _T], *quiet: type[BaseException]) -> _T:
    """Finish work despite a cancellation; drop `quiet` errors then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(*quiet):
            await _uninterrupted(task)
        raise


async def _uninterrupted(task: asyncio.Future[Any]) -> None:
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    task.result()


async def close_all(servers: Sequence[Any]) -> None:
    """Close every server despite a cancellation."""
    closing = asyncio.gather(*(server.close() for server in servers))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await _uninterrupted(closing)
        raise
