"""A thread packs the next batches, onto their device, during the step.

Invariants:

- One lock guards the planner's waiting groups and ready batches; the thread holds it while packing,
  and never while waiting for groups. Acknowledging does not need the lock.
- A ready batch is not out: absent from state_dict, unacknowledged, and recallable by the planner.
- An error takes the place of its batch, in order, and ends neither the thread nor the iteration. If
  memory fails in the thread's own steps, the thread ends: the next wait without a batch raises the
  error, and each wait starts a missing thread, which continues with the last thread's groups.
- The thread waiting for a batch uses locks and queues of C only, and keeps no state meanwhile: an
  exception of a signal handler leaves nothing held and nothing begun.
- The thread starts with the first request for a batch and ends with its handler. It exists in one
  process only: a forked child never touches its lock.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

import shmbus
from shmbus.batch.uninterrupted import call_uninterrupted
from trainer_adapter.batches.batch import Batch
from trainer_adapter.handler.planner import BatchPlanner
from trainer_adapter.handler.take import Look, Take

TAKE_SLICE_S: Final = 0.1
"""Seconds that the thread waits for groups at a time. `stop`, and a trainer that begins to wait for
a batch that is not full, may have to wait so long for the thread."""

GRACE_S: Final = 1.0
"""Seconds behind a timeout in which a batch that is due may still be packed."""

IDLE_SLICE_S: Final = 0.5
"""Seconds after which an idle thread checks whether its handler still exists, and one that waits
for a batch whether another took its notice."""


class Prefetcher:
    """Keeps up to `depth` batches ready."""

    def __init__(
        self,
        planner: BatchPlanner[Batch],
        depth: int,
        take: Take,
        admit: Callable[[], None],
        make: Callable[[], None],
    ) -> None:
        self._planner = planner
        self._depth = depth
        self._take = take
        self._admit = admit
        self._make = make
        self._pid = os.getpid()
        #: Guards the planner's waiting groups and ready batches.
        self.lock = threading.RLock()
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: BaseException | None = None
        self._failure: BaseException | None = None
        self._taken: list[shmbus.Group] | BaseException = []
        self._stopping = False
        self._awaited = False
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> int:
        """Number of batches, and errors in their place, to hand out."""
        return len(self._planner.ready)

    @property
    def forked(self) -> bool:
        """True in a forked child of the thread's process."""
        return os.getpid() != self._pid

    def require_own_process(self) -> None:
        """Raise BusClosedError in a forked child, which lacks thread and reader."""
        if self.forked:
            raise shmbus.BusClosedError(
                "this handler was made in another process, before a fork; make a new one in this "
                "process"
            )

    def wait(
        self, timeout: float | None, note_s: float, note: Callable[[], None], look: Look
    ) -> bool:
        """Wait until a batch, or an error in its place, is ready; call without the lock."""
        began_s = noted_s = time.monotonic()
        deadline_s = None if timeout is None else began_s + timeout
        if self._thread is None:
            call_uninterrupted(self._start)
        try:
            self._awaited = True
            _empty(self._changes)
            self.wake()
            look_s = look(False, deadline_s)
            while not self._planner.ready:
                if self._ended is not None:
                    raise self._ended
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                now_s = time.monotonic()
                waits_s = [note_s, IDLE_SLICE_S]
                if deadline_s is not None:
                    if now_s >= deadline_s and not self._is_soon(now_s - deadline_s):
                        return False
                    waits_s.append(deadline_s - now_s if now_s < deadline_s else TAKE_SLICE_S)
                if look_s is not None:
                    waits_s.append(look_s)
                if now_s >= noted_s + note_s:
                    noted_s = now_s
                    note()
                # Another waiting thread may have cleared the flag.
                self._awaited = True
                _wait_for(self._changes, min(waits_s))
                look_s = look(True, deadline_s)
        finally:
            self._awaited = False
        return True

    def _is_soon(self, late_s: float) -> bool:
        """Return True if the thread owes a batch and is not late yet."""
        return late_s < GRACE_S and self._planner.due(time.monotonic())

    def wake(self) -> None:
        """Wake the thread, after a hand-out or a recall."""
        self._requests.put(None)

    def stop(self) -> None:
        """End the thread, and wait for its end; a call inside `wait` gets BusClosedError."""
        if self.forked:
            return
        with self.lock:
            self._stopping = True
            self._ended = self._ended or shmbus.BusClosedError("this handler is closed")
            self.wake()
            self._changes.put(None)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        with self.lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=_work, args=(weakref.ref(self),), name="shmbus-prefetch", daemon=True
                )
                self._thread.start()

    def turn(self) -> _Wait | None:
        """Make every due batch; return the next wait, or None to end the thread."""
        with self.lock:
            if not self._receive():
                return None
            _empty(self._requests)
            while not self._stopping and len(self._planner.ready) < self._depth and self._due():
                self._work(self._make)
                self._planner.restart_wait(time.monotonic())
            if self._stopping:
                return None
            if len(self._planner.ready) >= self._depth:
                return _Wait(None, self._requests, IDLE_SLICE_S, False)
            return _Wait(self._take, self._requests, self._slice_s(), self._awaited)

    def resume(self, taken: list[shmbus.Group] | BaseException) -> bool:
        """Admit the groups of a wait, or keep its error; False if the bus was closed."""
        with self.lock:
            self._taken = taken
            return self._receive()

    def _receive(self) -> bool:
        taken = self._taken
        if isinstance(taken, shmbus.BusClosedError):
            self._ended = taken
            self._changes.put(None)
            return False
        if isinstance(taken, BaseException):
            self._planner.add_error(taken)
            self._changes.put(None)
        elif taken:
            # After a memory failure below, the inbox already holds some groups.
            self._planner.adopt(taken)
            self._work(self._admit)
        self._taken = []
        return True

    def fail(self, error: BaseException) -> None:
        """Have the next wait raise the error and start another thread."""
        self._failure = error
        self._thread = None
        self._changes.put(None)

    def _work(self, work: Callable[[], None]) -> None:
        """Run some work under the lock, and keep its error in the place of a batch."""
        ready = len(self._planner.ready)
        try:
            work()
        except BaseException as error:
            self._planner.add_error(error)
        if len(self._planner.ready) != ready:
            self._changes.put(None)

    def _due(self) -> bool:
        return self._planner.due(time.monotonic(), awaited=self._awaited)

    def _slice_s(self) -> float:
        left_s = self._planner.left_s(time.monotonic()) if self._awaited else None
        return TAKE_SLICE_S if left_s is None else min(TAKE_SLICE_S, max(left_s, 0.0))


class _Wait:
    """One wait of the thread: for groups, or for a request. Holds no reference to the handler."""

    def __init__(
        self, take: Take | None, requests: queue.SimpleQueue[None], seconds: float, awaited: bool
    ) -> None:
        self._take = take
        self._requests = requests
        self._seconds = seconds
        self._awaited = awaited

    def __call__(self) -> list[shmbus.Group] | BaseException:
        if self._take is None:
            _wait_for(self._requests, self._seconds)
            return []
        try:
            return self._take(self._seconds, self._awaited)
        except BaseException as error:
            return error


def _wait_for(notices: queue.SimpleQueue[None], seconds: float) -> None:
    try:
        notices.get(timeout=max(seconds, 0.0))
    except queue.Empty:
        return


def _empty(notices: queue.SimpleQueue[None]) -> None:
    try:
        while True:
            notices.get_nowait()
    except queue.Empty:
        return


def _work(reference: weakref.ref[Prefetcher]) -> None:
    """Run the thread. While waiting, it refers to its `_Wait` alone, so the handler can end."""
    try:
        while True:
            prefetcher = reference()
            wait = None if prefetcher is None else prefetcher.turn()
            if wait is None:
                return
            del prefetcher
            taken = wait()
            del wait
            prefetcher = reference()
            if prefetcher is None or not prefetcher.resume(taken):
                return
            del prefetcher, taken
    except BaseException as error:
        if (prefetcher := reference()) is not None:
            # Its frames would keep the handler.
            prefetcher.fail(error.with_traceback(None))
