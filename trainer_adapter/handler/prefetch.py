"""A thread that has the next batches packed, and on their device, while the step runs.

Invariants:

- One lock guards the groups that are held and the batches that are ready; the thread holds it
  while it packs, and never while it waits for groups. Acknowledging needs no such lock.
- What is ready is not out: it is in no state_dict, it is acknowledged by nobody, and `recall`
  makes groups of it again, in their order.
- Errors come out of `next` where their batch would have, in their order, and end nothing.
- The thread is made when the first batch is asked for, lives no longer than what it works for,
  and exists in one process only: a forked child never touches its lock.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import shmbus
from trainer_adapter.batches.batch import Batch

__all__ = ["TAKE_GROUPS", "Prefetcher", "Take"]

TAKE_SLICE_S: Final = 0.1
"""Seconds that the thread waits for groups at a time: how long `stop`, and a trainer that begins
to wait for a batch that is not full, may have to wait for it."""

TAKE_GROUPS: Final = 64
"""Groups that the thread takes at a time."""

IDLE_SLICE_S: Final = 0.5
"""Seconds after which an idle thread looks whether anybody still has the handler."""


#: Waits so many seconds for groups, for somebody who awaits a batch, or to have them ready.
Take: TypeAlias = Callable[[float, bool], "list[shmbus.Group]"]


class Maker(Protocol):
    """What the thread works with: the handler's own steps to a batch."""

    def take(self) -> Take:
        """Return what waits for groups, which is done without the lock."""
        ...

    def hold(self, groups: list[shmbus.Group]) -> None:
        """Keep groups for the next batches; may raise for one that is malformed."""
        ...

    def holds_any(self) -> bool:
        """Whether a group is held."""
        ...

    def holds_full(self) -> bool:
        """Whether no further group would go into the next batch."""
        ...

    def make(self) -> Batch | None:
        """Make a batch of what is held; None where what was held went away."""
        ...

    def unmake(self, batch: Batch) -> None:
        """Hold the groups of a batch again, before all others."""
        ...


class Prefetcher:
    """Has up to `depth` batches ready.

    Parameters
    ----------
    maker : Maker
    depth : int
        1 or more.
    max_wait_s : float or None
        How long a batch that is not full waits for more once it has a group, while somebody waits
        for it; None until it is full. While nobody waits, only full batches are made.
    """

    def __init__(self, maker: Maker, depth: int, max_wait_s: float | None) -> None:
        self._maker = maker
        self._depth = depth
        self._max_wait_s = max_wait_s
        self._pid = os.getpid()
        self._changed = threading.Condition(threading.RLock())
        self._wanted = threading.Event()
        self._ready: deque[Batch | BaseException] = deque()
        self._ended: BaseException | None = None
        self._stopping = False
        self._waiting = 0
        self._first_came_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def lock(self) -> threading.Condition:
        """What guards the held groups; to enter by ``with``."""
        return self._changed

    @property
    def ready(self) -> int:
        """How many batches, and errors, wait to be asked for."""
        return len(self._ready)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that has the thread."""
        return os.getpid() != self._pid

    def require_own_process(self) -> None:
        """Raise BusClosedError in a forked child, where neither thread nor reader exists."""
        if self.forked:
            raise shmbus.BusClosedError(
                "this handler was made in another process, before a fork; make a new one in this "
                "process"
            )

    def next(self, timeout: float | None, note_s: float, note: Callable[[], None]) -> Batch | None:
        """Wait for the next batch, and pass it on; or raise the error that came instead.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait for its first group.
        note_s : float
            Seconds between two calls of `note` while nothing comes.
        note : callable

        Returns
        -------
        Batch or None
            None after the timeout.
        """
        began_s = noted_s = time.monotonic()
        with self._changed:
            self._start()
            self._waiting += 1
            self._wanted.set()
            try:
                while not self._ready:
                    if self._ended is not None:
                        raise self._ended
                    now_s = time.monotonic()
                    left_s = None if timeout is None else began_s + timeout - now_s
                    if left_s is not None and left_s <= 0 and not self._maker.holds_any():
                        return None
                    if now_s >= noted_s + note_s:
                        noted_s = now_s
                        note()
                    waits_s = [TAKE_SLICE_S if left_s is not None and left_s <= 0 else note_s]
                    if left_s is not None and left_s > 0:
                        waits_s.append(left_s)
                    self._changed.wait(min(waits_s))
            finally:
                self._waiting -= 1
            first = self._ready.popleft()
            self._wanted.set()
        if isinstance(first, BaseException):
            raise first
        return first

    def put_back(self, batch: Batch) -> None:
        """Undo a `next` whose batch did not arrive."""
        with self._changed:
            self._ready.appendleft(batch)

    def recall(self) -> None:
        """Make groups of all batches that are ready, in their order; call it under the lock."""
        errors = [item for item in self._ready if isinstance(item, BaseException)]
        batches = [item for item in self._ready if isinstance(item, Batch)]
        for batch in reversed(batches):
            self._maker.unmake(batch)
        self._ready = deque(errors)
        self._wanted.set()

    def stop(self) -> None:
        """End the thread, and wait for that; whoever waits in `next` gets BusClosedError."""
        if self.forked:
            return
        with self._changed:
            self._stopping = True
            self._ended = self._ended or shmbus.BusClosedError("this handler is closed")
            self._wanted.set()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(
                target=_work, args=(weakref.ref(self),), name="shmbus-prefetch", daemon=True
            )
            self._thread.start()

    def turn(self) -> _Wait | None:
        """Make all batches that can be made now; return what to wait for, None when it is over."""
        with self._changed:
            self._wanted.clear()
            while not self._stopping and len(self._ready) < self._depth and self._may_cut():
                self._append(self._maker.make)
                self._first_came_s = time.monotonic() if self._maker.holds_any() else None
            if self._stopping:
                return None
            if len(self._ready) >= self._depth:
                return _Wait(None, self._wanted, IDLE_SLICE_S, False)
            return _Wait(self._maker.take(), self._wanted, self._slice_s(), self._waiting > 0)

    def came(self, groups: list[shmbus.Group] | BaseException) -> bool:
        """Keep what came of a wait; False when nothing will come any more."""
        with self._changed:
            if isinstance(groups, shmbus.BusClosedError):
                self._ended = groups
                self._changed.notify_all()
                return False
            if isinstance(groups, BaseException):
                self._ready.append(groups)
                self._changed.notify_all()
            elif groups:
                self._append(lambda: self._maker.hold(groups))
                self._first_came_s = self._first_came_s or time.monotonic()
        return True

    def _append(self, work: Callable[[], Batch | None]) -> None:
        """Do some work under the lock, and keep the batch or the error that comes of it."""
        try:
            result: Batch | BaseException | None = work()
        except BaseException as error:
            result = error
        if result is not None:
            self._ready.append(result)
            self._changed.notify_all()

    def _may_cut(self) -> bool:
        if self._maker.holds_full():
            return True
        left_s = self._left_s()
        return self._maker.holds_any() and left_s is not None and left_s <= 0

    def _left_s(self) -> float | None:
        """Seconds until a batch that is not full is due; None while it need not be."""
        if not self._waiting or self._max_wait_s is None or self._first_came_s is None:
            return None
        return self._first_came_s + self._max_wait_s - time.monotonic()

    def _slice_s(self) -> float:
        left_s = self._left_s()
        return TAKE_SLICE_S if left_s is None else min(TAKE_SLICE_S, max(left_s, 0.0))


class _Wait:
    """What the thread waits for, without a reference to what it works for.

    Parameters
    ----------
    take : callable or None
        What waits for groups; None to wait until something is wanted.
    wanted : threading.Event
    seconds : float
    awaited : bool
        Whether somebody waits for a batch.
    """

    def __init__(
        self, take: Take | None, wanted: threading.Event, seconds: float, awaited: bool
    ) -> None:
        self._take = take
        self._wanted = wanted
        self._seconds = seconds
        self._awaited = awaited

    def __call__(self) -> list[shmbus.Group] | BaseException:
        if self._take is None:
            self._wanted.wait(self._seconds)
            return []
        try:
            return self._take(self._seconds, self._awaited)
        except BaseException as error:
            return error


def _work(reference: weakref.ref[Prefetcher]) -> None:
    """Run the thread. While it waits, it keeps nothing alive but what it waits with."""
    while True:
        prefetcher = reference()
        wait = None if prefetcher is None else prefetcher.turn()
        if wait is None:
            return
        del prefetcher
        groups = wait()
        del wait
        prefetcher = reference()
        if prefetcher is None or not prefetcher.came(groups):
            return
        del prefetcher, groups
