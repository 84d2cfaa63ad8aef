"""Callables that work on complete groups: one after the other, or all at once in an event loop.

Invariant: what a group's call raises is raised once all calls of the take have ended, so that those
that succeeded are kept.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import shmbus

__all__ = ["GroupCalls"]


class GroupCalls:
    """Calls a function, or a coroutine function, with groups."""

    def __init__(self, name: str, function: Callable[[shmbus.Group], Any]) -> None:
        if not callable(function):
            raise TypeError(f"{name}: expected a callable, got {type(function).__name__}")
        self._function = function
        called = getattr(function, "__call__", None)  # noqa: B004
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        self._loop = _LoopThread() if is_async else None

    def run(
        self, groups: Sequence[shmbus.Group], settle: Callable[[shmbus.Group, Any], None]
    ) -> None:
        """Call it with each group, and settle what it returns."""
        if self._loop is None:
            for group in groups:
                settle(group, self._function(group))
            return
        found = self._loop.run(lambda: self._together(groups))
        for group, given in zip(groups, found, strict=True):
            if not isinstance(given, BaseException):
                settle(group, given)
        for given in found:
            if isinstance(given, BaseException):
                raise given

    async def _together(self, groups: Sequence[shmbus.Group]) -> list[Any]:
        return await asyncio.gather(
            *(self._function(group) for group in groups), return_exceptions=True
        )

    def close(self) -> None:
        """End what is under way, and the thread; who waits for it gets BusClosedError."""
        if self._loop is not None:
            self._loop.close()


class _LoopThread:
    """One event loop in a thread of its own, begun by the first use."""

    # Clients of servers belong to the loop in which they were first used, so there is one for all
    # calls; and the caller's thread may have a loop that runs, as in a notebook.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._under_way: set[concurrent.futures.Future[list[Any]]] = set()
        self._closed = False

    def run(self, begin: Callable[[], Awaitable[list[Any]]]) -> list[Any]:
        async def work() -> list[Any]:
            return await begin()

        with self._lock:
            if self._closed:
                raise shmbus.BusClosedError("this handler is closed")
            future = asyncio.run_coroutine_threadsafe(work(), self._started())
            self._under_way.add(future)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise shmbus.BusClosedError("this handler is closed") from None
        except BaseException:
            # A signal's handler has raised.
            future.cancel()
            raise
        finally:
            self._under_way.discard(future)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_serve, args=(self._loop,), name="shmbus-groups", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _stop, self._loop)
        return self._loop

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for future in self._under_way.copy():
                future.cancel()
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            _stop(loop)
            if thread is not threading.current_thread():
                thread.join()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped; what is under way then ends by its cancellation."""
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
