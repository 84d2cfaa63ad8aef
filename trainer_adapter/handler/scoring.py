"""Scores of samples that were put without one, given before their groups go into a batch.

Invariants:

- A group leaves here with all of its samples scored, or it ends here, or it waits here, leased, for
  the next attempt.
- What was scored is not scored again in this process. After a death the group is delivered again as
  its producers put it, and scored anew: a score is never lost apart from its group.
- Nothing here refers to the handler, which a waiting thread would keep alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import shmbus
from trainer_adapter.handler.take import Take

__all__ = ["GroupScoring", "ScoreGroup", "group_scoring"]

#: Scores a group: a number for each sample, or None to drop it. It may be a coroutine function.
ScoreGroup: TypeAlias = Callable[[shmbus.Group], Any]


class GroupScoring:
    """Has a callable score what producers left open."""

    def __init__(
        self,
        score_group: ScoreGroup,
        drop: Callable[[list[shmbus.Group]], None] | None,
        *,
        drop_equal: bool,
    ) -> None:
        self._score_group = score_group
        self._drop = drop
        self._drop_equal = drop_equal and drop is not None
        called = getattr(score_group, "__call__", None)  # noqa: B004
        is_async = inspect.iscoroutinefunction(score_group) or inspect.iscoroutinefunction(called)
        self._loop = _LoopThread() if is_async else None

    def before(self, take: Take) -> Take:
        """Return a `Take` whose groups are scored."""
        waiting: list[shmbus.Group] = []

        def take_scored(seconds: float, awaited: bool) -> list[shmbus.Group]:
            nonlocal waiting
            waiting = waiting or take(seconds, awaited)
            scored = self.score(waiting)
            waiting = []
            return scored

        return take_scored

    def score(self, groups: list[shmbus.Group], *, trained: bool = True) -> list[shmbus.Group]:
        """Score the samples of groups that have no score yet."""
        leased = [group for group in groups if group.state == "leased"]
        unscored = [g for g in leased if not all([t.scored for t in g.trajectories])]
        if not unscored:
            return leased
        if self._loop is None:
            for group in unscored:
                self._settle(group, self._score_group(group), trained)
        else:
            found = self._loop.run(lambda: self._score_together(unscored))
            for group, given in zip(unscored, found, strict=True):
                if not isinstance(given, BaseException):
                    self._settle(group, given, trained)
            for given in found:
                if isinstance(given, BaseException):
                    raise given
        return [group for group in leased if group.state == "leased"]

    async def _score_together(self, groups: Sequence[shmbus.Group]) -> list[Any]:
        return await asyncio.gather(
            *(self._score_group(group) for group in groups), return_exceptions=True
        )

    def _settle(self, group: shmbus.Group, given: Any, trained: bool) -> None:
        """Give a group its scores, or end it."""
        if given is None and self._drop is not None:
            self._drop([group])
            return
        scores = _checked(group, given)
        for trajectory, score in zip(group.trajectories, scores.tolist(), strict=True):
            if not trajectory.scored:
                trajectory.score = score
        if self._drop_equal and trained and np.ptp(group.scores) == 0 and self._drop is not None:
            self._drop([group])

    def close(self) -> None:
        """End what is under way, and the thread; who waits for scores gets BusClosedError."""
        if self._loop is not None:
            self._loop.close()


def group_scoring(
    score_group: ScoreGroup | None, consumer: shmbus.Consumer, world_size: int, *, drop_equal: bool
) -> GroupScoring | None:
    """Return what scores groups by a callable; None for None, TypeError for what is neither."""
    if score_group is None:
        return None
    if not callable(score_group):
        raise TypeError(f"score_group: expected a callable, got {type(score_group).__name__}")
    drop = functools.partial(consumer.drop, reason="filtered")
    return GroupScoring(score_group, drop if world_size == 1 else None, drop_equal=drop_equal)


def _checked(group: shmbus.Group, given: Any) -> NDArray[np.float64]:
    count = len(group.trajectories)
    # A tensor may have a graph, or lie on a device.
    host = given.detach().cpu() if hasattr(given, "detach") else given
    try:
        scores = np.asarray(host, np.float64)
    except (TypeError, ValueError):
        scores = np.empty(0)
    if scores.shape != (count,) or not np.isfinite(scores).all():
        raise ValueError(
            f"score_group: expected {count} finite numbers for group {group.instance_id!r}, one a "
            f"sample, got {given!r}; with one rank, None drops a group that cannot be scored"
        )
    return scores


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
                target=_serve, args=(self._loop,), name="shmbus-score", daemon=True
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
