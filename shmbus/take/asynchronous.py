"""Complete groups for an event loop: `atake`, and iteration by ``async for``.

A group is leased by the loop's own thread, in a call that does not wait. What waits is one other
thread for all tasks of the loop; it leases nothing where this process reads the ring itself. Where
a daemon leases, that thread asks it, and what is granted is ready until a task takes it.

Invariant: groups that were granted after the last task has been cancelled go back to the daemon, so
no group is leased to nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator

from shmbus import errors, limits
from shmbus._arguments import check_timeout, clamp_request
from shmbus._loop_waits import LoopWaits
from shmbus.client.daemon_client import DaemonClient
from shmbus.group import Group
from shmbus.stash.collector import Collector
from shmbus.take.attached import AttachedConsumer, seconds_left

__all__ = ["AsynchronousTakes"]


class AsynchronousTakes(AttachedConsumer):
    """`atake` and ``async for``."""

    def _begin(self) -> None:
        super()._begin()
        self._loop_waits = LoopWaits()
        #: How many groups each task wants that waits.
        self._tasks: dict[object, int] = {}
        #: What the thread met that asks the daemon; the next task raises it.
        self._failure: Exception | None = None

    async def atake(self, max_groups: int = 64, timeout: float | None = 0.1) -> list[Group]:
        """Take complete groups as `take` does, without blocking the event loop.

        Parameters
        ----------
        max_groups : int
            As for `take`.
        timeout : float, optional
            Seconds to wait for the first: None waits for ever, 0 does not wait.

        Returns
        -------
        list[Group]
            Maybe empty. Each is leased to the caller until it is acknowledged or given back.

        Raises
        ------
        TypeError, ValueError
            `max_groups` is no int of 1 or more, or `timeout` is no time.
        ProtocolError, StallError, BusBusyError, BusClosedError, BusRemovedError
            As for `take`.
        DaemonUnavailableError
            The daemon has not answered for CLIENT_WAIT_S (30 s).
        asyncio.CancelledError
            The task was cancelled during the wait; no group is leased to it.
        """
        max_groups = clamp_request("max_groups", max_groups)
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + float(timeout)
        if self._source is None and not self._closed:
            await asyncio.to_thread(self._require_source)
        source = self._require_source()
        task = object()
        self._tasks[task] = max_groups
        try:
            if isinstance(source, Collector):
                return await self._atake_here(source, max_groups, deadline)
            return await self._atake_leased(source, max_groups, deadline)
        except BaseException:
            self._tasks.pop(task, None)
            if isinstance(source, DaemonClient):
                self._leave_nothing(source)
            raise
        finally:
            self._tasks.pop(task, None)

    async def _atake_here(
        self, source: Collector, max_groups: int, deadline: float | None
    ) -> list[Group]:
        """Take from the ring: the thread sleeps until something is committed, and that is all."""
        began_s = checked_s = time.monotonic()
        while True:
            groups = self.take(max_groups, 0)
            left_s = seconds_left(deadline)
            if groups or left_s == 0:
                return groups
            source.segment.require_name()
            now = time.monotonic()
            sleep_s = min(limits.ASYNC_TAKE_S, source.wait_s(now, left_s))
            sleep = functools.partial(_sleep, source, sleep_s)
            await self._loop_waits.wait(sleep, sleep_s)
            checked_s = await self._look_for_stall(source, began_s, checked_s)

    async def _atake_leased(
        self, source: DaemonClient, max_groups: int, deadline: float | None
    ) -> list[Group]:
        """Take what the daemon grants: the thread asks it, for all tasks that wait."""
        began_s = checked_s = time.monotonic()
        by_step = self._options.world_size > 1
        asked = False
        while True:
            self._raise_failure()
            groups = source.hand_out(Group, self, -1 if by_step else max_groups)
            left_s = seconds_left(deadline)
            if groups or (asked and left_s == 0):
                return groups
            slice_s = limits.ASYNC_TAKE_S if left_s is None else min(limits.ASYNC_TAKE_S, left_s)
            # For all that wait here, in one question. All ranks ask for a step with one number.
            wanted = max_groups if by_step else sum(list(self._tasks.values()))
            ask = functools.partial(self._ask, source, wanted, slice_s, by_step)
            await self._loop_waits.wait(ask, slice_s)
            asked = True
            checked_s = await self._look_for_stall(source, began_s, checked_s)

    def _ask(self, source: DaemonClient, wanted: int, slice_s: float, by_step: bool) -> None:
        """Ask the daemon for groups, in a thread."""
        try:
            if by_step:
                source.receive_step(
                    groups=wanted, tokens=None, max_wait=0.0, field="tokens",
                    timeout=slice_s, only_full=False,
                )  # fmt: skip
            else:
                source.receive(min(wanted, limits.MAX_REQUESTED), slice_s)
        except Exception as error:
            self._failure = error
        if not self._tasks:
            _give_back_ready(source)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _leave_nothing(self, source: DaemonClient) -> None:
        """After a task was cancelled: what it was granted is for others, if none waits here."""
        if not self._tasks and source.leases.ready:
            with contextlib.suppress(RuntimeError):  # the loop is at its end; `close` gives back
                asyncio.get_running_loop().run_in_executor(None, _give_back_ready, source)

    async def _look_for_stall(
        self, source: Collector | DaemonClient, began_s: float, checked_s: float
    ) -> float:
        """Let the watchdog look, in a thread: a report takes longer than a loop may stand still."""
        slice_s = self._watch.slice_s
        now = time.monotonic()
        if slice_s is None or now - checked_s < slice_s:
            return checked_s
        waited_s = now - began_s
        await asyncio.to_thread(self._watch.check, source.segment, "a complete group", waited_s)
        return now

    def __aiter__(self) -> AsyncIterator[Group]:
        """Yield complete groups one by one, as iteration does; ends when this is closed."""
        return _EachGroup(self)


class _EachGroup:
    """Iterates over complete groups. No group is kept here while a task is suspended."""

    def __init__(self, consumer: AsynchronousTakes) -> None:
        self._consumer = consumer

    def __aiter__(self) -> _EachGroup:
        return self

    async def __anext__(self) -> Group:
        consumer = self._consumer
        while not consumer._closed:
            try:
                groups = await consumer.atake(1, None)
            except errors.BusClosedError:
                if consumer._closed:
                    break
                raise
            if groups:
                return groups[0]
        raise StopAsyncIteration


def _sleep(source: Collector, sleep_s: float) -> None:
    with contextlib.suppress(errors.BusClosedError):  # the task finds it closed
        source.reader.wait(sleep_s)


def _give_back_ready(source: DaemonClient) -> None:
    # Without a daemon they stay ready, for the next take.
    with contextlib.suppress(errors.DaemonUnavailableError, errors.BusClosedError):
        source.recall()
