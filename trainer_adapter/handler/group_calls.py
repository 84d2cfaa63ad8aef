"""Callables that work on complete groups before these go into a batch: they score, or add columns.

Invariants:

- What a group's call raises is raised once all calls of the take have ended, so that those that
  succeeded are kept.
- A group leaves here with all of its samples scored, and with its columns; or it ends here, or it
  waits here, leased, for the next attempt.
- What was done is not done again in this process. After a death the group is delivered again as its
  producers put it, and all is done anew: a score is never lost apart from its group.
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
from trainer_adapter.batches.columns import check_columns
from trainer_adapter.batches.extra_fields import ExtraFields

__all__ = ["AnnotateGroup", "GroupAnnotation", "GroupScoring", "ScoreGroup", "group_scoring"]

#: Scores a group: a number for each sample, or None to drop it. It may be a coroutine function.
ScoreGroup: TypeAlias = Callable[[shmbus.Group], Any]
#: Returns, by name, an array of each sample of a group. It may be a coroutine function.
AnnotateGroup: TypeAlias = Callable[[shmbus.Group], Any]


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


# -- scores ---------------------------------------------------------------------------------------


class GroupScoring:
    """Has a callable score what producers left open."""

    def __init__(
        self,
        score_group: ScoreGroup,
        drop: Callable[[list[shmbus.Group]], None] | None,
        *,
        drop_equal: bool,
    ) -> None:
        self._calls = GroupCalls("score_group", score_group)
        self._drop = drop
        self._drop_equal = drop_equal and drop is not None

    def score(self, groups: list[shmbus.Group], *, trained: bool = True) -> list[shmbus.Group]:
        """Score the samples of groups that have no score yet."""
        leased = [group for group in groups if group.state == "leased"]
        unscored = [g for g in leased if not all([t.scored for t in g.trajectories])]
        if not unscored:
            return leased
        self._calls.run(unscored, lambda group, given: self._settle(group, given, trained))
        return [group for group in leased if group.state == "leased"]

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
        """End what is under way; who waits for scores gets BusClosedError."""
        self._calls.close()


def group_scoring(
    score_group: ScoreGroup | None, consumer: shmbus.Consumer, world_size: int, *, drop_equal: bool
) -> GroupScoring | None:
    """Return what scores groups by a callable; None for None, TypeError for what is neither."""
    if score_group is None:
        return None
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


# -- columns --------------------------------------------------------------------------------------


class GroupAnnotation:
    """Has a callable add columns to groups that have none."""

    def __init__(
        self,
        annotate_group: AnnotateGroup | Sequence[AnnotateGroup],
        tokens: str,
        extra_fields: ExtraFields | None,
    ) -> None:
        given: Any = annotate_group
        passes = given if isinstance(given, Sequence) else [given]
        self._passes = [GroupCalls("annotate_group", one) for one in passes]
        #: Groups on their way, by identity, each with the passes that it has.
        self._begun: dict[int, tuple[shmbus.Group, int]] = {}
        self._tokens = tokens
        self._extra_fields = extra_fields

    def annotate(self, groups: list[shmbus.Group]) -> list[shmbus.Group]:
        """Add the columns of groups that have none yet."""
        leased = [group for group in groups if group.state == "leased"]
        for number, calls in enumerate(self._passes):
            due = [group for group in leased if self._count(group) == number]
            calls.run(due, self._settle)
        for group in leased:
            self._begun.pop(id(group), None)
        return leased

    def _count(self, group: shmbus.Group) -> int:
        """Return how many passes a group has had; all, where it has columns and none is due."""
        found = self._begun.get(id(group))
        return (len(self._passes) if group.annotated else 0) if found is None else found[1]

    def _settle(self, group: shmbus.Group, given: Any) -> None:
        count = self._count(group)
        columns = check_columns(group, given, self._tokens, self._extra_fields)
        self._begun[id(group)] = group, count + 1
        group.columns.update(columns)

    def close(self) -> None:
        """End what is under way; who waits for it gets BusClosedError."""
        for calls in self._passes:
            calls.close()
