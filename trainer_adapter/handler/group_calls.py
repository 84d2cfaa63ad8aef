"""Callables on complete groups before batching: scoring, and additional columns.

Invariants:

- An exception of a group's call is raised after the wait for every call of the take, to keep the
  successful calls.
- The end of a wait leaves unfinished calls running. No group waits longer for another group's call.
- A group leaves with every sample scored and with its columns, or ends here, or waits here, leased,
  for the next attempt.
- Finished work is not repeated in this process. After a death the group is delivered again in its
  producers' form, and the work starts from scratch: a score is never lost apart from its group.
- Nothing here refers to the handler, since a waiting thread would keep the handler alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.batch.scores import are_equal
from shmbus.batch.uninterrupted import finalizer
from trainer_adapter.advantages import as_real
from trainer_adapter.batches.columns import check_columns
from trainer_adapter.batches.extra_fields import ExtraFields

logger = logging.getLogger(__name__)

#: Calls of a coroutine function per group before the drop: several helpers may answer.
CALL_ATTEMPTS: Final = 3
#: Longest wait of finished groups for the unfinished groups of their take, in seconds.
WORK_SLICE_S: Final = 0.2
#: Seconds between two reports of a slow call.
REPORT_S: Final = 60.0

#: Drops groups that no helper can serve; with several ranks no rank may.
Drop: TypeAlias = Callable[[list[shmbus.Group]], None]

#: Scores a group: a number per sample, or None to drop the group. May be a coroutine function.
ScoreGroup: TypeAlias = Callable[[shmbus.Group], Any]
#: Returns arrays per sample, by name. May be a coroutine function.
AnnotateGroup: TypeAlias = Callable[[shmbus.Group], Any]


class _Call(msgspec.Struct, eq=False):
    group: shmbus.Group
    future: concurrent.futures.Future[Any]
    attempts: int
    began_s: float


class GroupCalls:
    """Calls a function, or a coroutine function, with groups; a call outlives the wait for it."""

    def __init__(
        self,
        name: str,
        function: Callable[[shmbus.Group], Any],
        drop: Drop | None,
        call_timeout_s: float | None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"{name}: expected a callable, got {type(function).__name__}")
        self._name = name
        self._function = function
        self._drop = drop
        self._call_timeout_s = call_timeout_s
        called = getattr(function, "__call__", None)  # noqa: B004
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        self._loop = _LoopThread() if is_async else None
        self.is_async = is_async
        self._under_way: dict[int, _Call] = {}
        #: The latest call in a caller's thread.
        self._direct: _Call | None = None
        self._reported_s = time.monotonic()

    def run(
        self,
        groups: Sequence[shmbus.Group],
        settle: Callable[[shmbus.Group, Any], None],
        wait_s: float | None,
    ) -> None:
        """Call with each group, wait, and settle the results; calls under way wait for the next."""
        unlimited = wait_s is None and self._call_timeout_s is None
        if self._loop is None and unlimited and not self._under_way:
            try:
                for group in groups:
                    self._direct = _Call(group, concurrent.futures.Future(), 1, time.monotonic())
                    self._end(group, functools.partial(self._function, group), settle)
            finally:
                self._direct = None
            return
        deadline_s = math.inf if wait_s is None else time.monotonic() + wait_s
        if self._loop is not None:
            for group in groups:
                self._begin(group)
            self._wait(groups, deadline_s)
            self._settle(groups, settle)
            return
        for group in groups:  # sequentially
            self._begin(group)
            self._wait([group], deadline_s)
            self._settle([group], settle)
            if id(group) in self._under_way:
                return

    def _begin(self, group: shmbus.Group, attempts: int = 1) -> None:
        if attempts == 1 and id(group) in self._under_way:
            return
        future = (
            _in_thread(self._function, group)
            if self._loop is None
            else self._loop.begin(functools.partial(self._call, group))
        )
        self._under_way[id(group)] = _Call(group, future, attempts, time.monotonic())

    async def _call(self, group: shmbus.Group) -> Any:
        try:
            return await self._function(group)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit) as error:
            # Raised here, the first would mean the handler's end, and the rest end the event loop.
            return error

    def _wait(self, groups: Sequence[shmbus.Group], deadline_s: float) -> None:
        """Wait for the calls of these groups; cancel and repeat a call beyond its limit."""
        while True:
            running = [
                call for group in groups if not (call := self._under_way[id(group)]).future.done()
            ]
            now_s = time.monotonic()
            if not running or now_s >= deadline_s:
                return
            first = min(running, key=lambda call: call.began_s)
            self._report(first, now_s)
            due_s = min(deadline_s, now_s + REPORT_S)
            if self._call_timeout_s is not None:
                due_s = min(due_s, first.began_s + self._call_timeout_s)
                if now_s >= due_s:
                    self._repeat(first)
                    continue
            concurrent.futures.wait([call.future for call in running], due_s - now_s)

    def _repeat(self, call: _Call) -> None:
        call.future.cancel()
        if self._loop is None or call.attempts == CALL_ATTEMPTS:
            # A thread cannot be ended, so a function is not called twice.
            over: concurrent.futures.Future[Any] = concurrent.futures.Future()
            over.set_exception(
                shmbus.UnservedGroupError(
                    f"expected an answer within {self._call_timeout_s:g} s, got none in "
                    f"{call.attempts} calls"
                )
            )
            call.future = over
        else:
            self._begin(call.group, call.attempts + 1)

    def _report(self, call: _Call, now_s: float) -> None:
        """Report the longest-running call once a minute."""
        if now_s < max(call.began_s, self._reported_s) + REPORT_S:
            return
        self._reported_s = now_s
        if text := self.describe():
            logger.warning("%s", text)

    def describe(self) -> str:
        """Describe the longest-running call; empty without one."""
        running = [call for call in self._under_way.copy().values() if not call.future.done()]
        running += [] if self._direct is None else [self._direct]
        if not running:
            return ""
        first = min(running, key=lambda call: call.began_s)
        explain = getattr(self._function, "explain", None)
        why = f": {explain(first.group)}" if explain is not None else ""
        waited_s = time.monotonic() - first.began_s
        return f"{self._name}: group {first.group.instance_id!r} has waited {waited_s:.0f} s{why}"

    def _settle(
        self, groups: Sequence[shmbus.Group], settle: Callable[[shmbus.Group, Any], None]
    ) -> None:
        """Settle the ended calls, and raise the first error."""
        errors: list[BaseException] = []
        for group in groups:
            call = self._under_way[id(group)]
            if not call.future.done():
                continue
            del self._under_way[id(group)]
            if group.state != "leased":
                continue
            try:
                self._end(group, call.future.result, settle)
            except concurrent.futures.CancelledError:
                errors.append(shmbus.BusClosedError("this handler is closed"))
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _end(
        self,
        group: shmbus.Group,
        result: Callable[[], Any],
        settle: Callable[[shmbus.Group, Any], None],
    ) -> None:
        try:
            given = result()
            if isinstance(given, BaseException):
                raise RuntimeError(f"{self._name}: {group!r}: got {given!r}") from given
            settle(group, given)
        except shmbus.UnservedGroupError as error:
            if self._drop is None:
                raise
            logger.warning("%s: group %r is dropped: %s", self._name, group.instance_id, error)
            self._drop([group])

    def close(self) -> None:
        """End running calls and the thread; waiting callers get BusClosedError."""
        if self._loop is not None:
            self._loop.close()


def _in_thread(
    function: Callable[[shmbus.Group], Any], group: shmbus.Group
) -> concurrent.futures.Future[Any]:
    """Call a function in a separate thread, not awaited at process exit."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = function(group)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="shmbus-group", daemon=True).start()
    return future


class _LoopThread:
    """One event loop in a separate thread, started by the first use."""

    # Clients of servers belong to the loop of their first use, so every call shares a single loop.
    # The caller's thread may run its own loop, as in a notebook.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._under_way: set[concurrent.futures.Future[Any]] = set()
        self._closed = False

    def begin(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> concurrent.futures.Future[Any]:
        with self._lock:
            if self._closed:
                raise shmbus.BusClosedError("this handler is closed")
            future = asyncio.run_coroutine_threadsafe(call(), self._started())
            self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            self._end = weakref.finalize(self, _stop, loop)  # at the process's end
            self._loop = loop
            self._thread = threading.Thread(
                target=_serve, args=(loop,), name="shmbus-groups", daemon=True
            )
            self._thread.start()
        return self._loop

    @finalizer
    def __del__(self) -> None:
        if loop := vars(self).get("_loop"):
            _stop(loop)
            self._end.detach()
        # In here: finalizers of loop and thread would swallow the pending exception.
        vars(self).clear()

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
    """Run the loop until it stops; then cancel the remaining calls."""
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
    """Scores samples left open by producers, through a callable."""

    def __init__(
        self,
        score_group: ScoreGroup,
        drop: Drop | None,
        *,
        drop_equal: bool,
        call_timeout_s: float | None,
    ) -> None:
        self.calls = [GroupCalls("score_group", score_group, drop, call_timeout_s)]
        self._drop = drop
        self._drop_equal = drop_equal and drop is not None

    @property
    def is_async(self) -> bool:
        """True if another thread computes the scores."""
        return self.calls[0].is_async

    def run(
        self, groups: list[shmbus.Group], wait_s: float | None = None, *, trained: bool = True
    ) -> None:
        """Score the samples of groups without a score."""
        unscored = [group for group in groups if not self.is_done(group)]
        if unscored:
            settle = functools.partial(self._settle, trained=trained)
            self.calls[0].run(unscored, settle, wait_s)

    def is_done(self, group: shmbus.Group) -> bool:
        """Return True if every sample is scored or the group ended."""
        return group.state != "leased" or all([t.scored for t in group.trajectories])

    def _settle(self, group: shmbus.Group, given: Any, *, trained: bool) -> None:
        """Store a group's scores, or end the group."""
        if given is None and self._drop is not None:
            self._drop([group])
            return
        scores = _checked(group, given)
        for trajectory, score in zip(group.trajectories, scores.tolist(), strict=True):
            if not trajectory.scored:
                trajectory.score = score
        if self._drop_equal and trained and self._drop is not None:
            every = group.scores
            if are_equal(np.min(every), np.max(every)):
                self._drop([group])

    def close(self) -> None:
        """End running calls; callers waiting for scores get BusClosedError."""
        self.calls[0].close()


def _checked(group: shmbus.Group, given: Any) -> NDArray[np.float64]:
    count = len(group.trajectories)
    scores = as_real(given)
    if scores is None or scores.shape != (count,) or not np.isfinite(scores).all():
        raise ValueError(
            f"score_group: expected {count} finite numbers for group {group.instance_id!r}, one a "
            f"sample, got {given!r}; with one rank, None drops a group that cannot be scored"
        )
    return scores


# -- columns --------------------------------------------------------------------------------------


class GroupAnnotation:
    """Adds missing columns to groups, through callables."""

    def __init__(
        self,
        annotate_group: AnnotateGroup | Sequence[AnnotateGroup],
        drop: Drop | None,
        tokens: str,
        extra_fields: ExtraFields,
        call_timeout_s: float | None,
    ) -> None:
        given: Any = annotate_group
        passes = given if isinstance(given, Sequence) else [given]
        self.calls = [GroupCalls("annotate_group", one, drop, call_timeout_s) for one in passes]
        #: Groups in progress, by identity, each with its count of finished passes.
        self._begun: dict[int, tuple[shmbus.Group, int]] = {}
        self._tokens = tokens
        self._extra_fields = extra_fields

    @property
    def is_async(self) -> bool:
        """True if another thread computes every column."""
        return all(calls.is_async for calls in self.calls)

    def run(self, groups: list[shmbus.Group], wait_s: float | None) -> None:
        """Add missing columns to groups."""
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        for number, calls in enumerate(self.calls):
            due = [g for g in groups if g.state == "leased" and self._count(g) == number]
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            calls.run(due, self._settle, left_s)

    def is_done(self, group: shmbus.Group) -> bool:
        """Return True if the group's columns are complete or the group ended."""
        if group.state == "leased" and self._count(group) < len(self.calls):
            return False
        self._begun.pop(id(group), None)
        return True

    def _count(self, group: shmbus.Group) -> int:
        """Return a group's count of finished passes; the maximum if its columns are complete."""
        found = self._begun.get(id(group))
        return (len(self.calls) if group.annotated else 0) if found is None else found[1]

    def _settle(self, group: shmbus.Group, given: Any) -> None:
        count = self._count(group)
        columns = check_columns(group, given, self._tokens, self._extra_fields)
        self._begun[id(group)] = group, count + 1
        group.columns.update(columns)

    def close(self) -> None:
        """End running calls; waiting callers get BusClosedError."""
        for calls in self.calls:
            calls.close()
