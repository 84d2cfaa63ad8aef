"""What has to happen once a device has got so far: in a thread, so that nobody waits for it.

Invariants:

- An action runs after its work, never before; one at a time, in order, and none after one that has
  raised, until that was told.
- What waits is the owner's own thread on the owner's own events. No process waits on an event of
  another one, whose death could keep it from ever happening.
- A thread sleeps while a device does what it was asked to do before, and keeps a processor busy
  for no longer than the copies take that it waits for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from trainer_adapter.device.streams import current_stream

__all__ = ["SPIN_BYTES", "Completion", "Work", "event"]

#: Bytes up to which the end of their copy is waited for without sleeping: half a millisecond of a
#: device of 2 TB/s. To be woken up takes a tenth of one.
SPIN_BYTES: Final = 1 << 30

#: Seconds that a caller waits itself for the end of a small copy: what a device takes to change
#: over from another process, and as much again. To hand it to a thread costs a third of that.
SOON_S: Final = 0.00025


def event(*, sleeps: bool) -> torch.cuda.Event:
    """Return an event, for which a thread sleeps or keeps a processor busy."""
    return torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]


class Work:
    """Copies that a device is asked to make on its current stream, again and again.

    Parameters
    ----------
    kind : (torch.device, bool)
        Which device, and whether a thread sleeps until they have been made.
    """

    def __init__(self, kind: tuple[torch.device, bool]) -> None:
        self.kind = kind
        self._began = event(sleeps=True)
        self._ended = event(sleeps=kind[1])
        self._behind = False

    def begin(self) -> None:
        """Say that they follow."""
        stream = current_stream(self.kind[0])
        # Where nothing has to end before them, to sleep until they begin takes longer than they do.
        self._behind = not stream.query()
        if self._behind:
            self._began.record(stream)

    def end(self) -> None:
        """Say that no more follow."""
        self._ended.record(current_stream(self.kind[0]))

    def wait(self) -> None:
        """Wait until they have been made."""
        if self._behind:
            self._began.synchronize()
        self._ended.synchronize()

    def is_made(self, within: float) -> bool:
        """Wait so many seconds, without sleeping; whether they have been made."""
        until = time.perf_counter() + within
        while not self._ended.query():  # type: ignore[no-untyped-call]
            if time.perf_counter() > until:
                return False
        return True


_Task: TypeAlias = tuple[Work, Callable[[], None]]


class Completion:
    """Runs actions after copies.

    Parameters
    ----------
    depth : int
        How many may be on their way.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition(threading.Lock())
        self._pending = 0
        # Of actions that are done: to make an event takes longer than to record one again.
        self._idle: dict[tuple[torch.device, bool], list[Work]] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Return how many actions are on their way."""
        return self._pending

    def begin(self, device: torch.device, nbytes: int) -> Work | None:
        """Say that the copies of a step follow, on the current stream of a device.

        Parameters
        ----------
        device : torch.device
        nbytes : int
            Of the copies.

        Returns
        -------
        Work | None
            For `after`; None for the CPU, which is always done.
        """
        if device.type != "cuda":
            return None
        kind = device, nbytes > SPIN_BYTES
        idle = self._idle.setdefault(kind, [])
        work = idle.pop() if idle else Work(kind)
        work.begin()
        return work

    def after(
        self,
        work: Work | None,
        action: Callable[[], None],
        *,
        soon: bool = False,
    ) -> None:
        """Run an action once the copies have been made; returns before that.

        Parameters
        ----------
        work : Work | None
            Of `begin`, after which the copies were begun; None runs the action now, here.
        action : callable
            What it raises is raised by the next call of `after` or `settle`. Of the actions that
            were on their way behind it none is run.
        soon : bool
            Whether the copies are so small that they are waited for a moment, and the action is run
            here where they have been made by then.
        """
        if work is not None:
            work.end()
        self._settle(0 if work is None else self._depth - 1)
        if work is None:
            action()
            return
        if soon and not self._pending and work.is_made(SOON_S):
            self._idle.setdefault(work.kind, []).append(work)
            action()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shmbus-device", daemon=True)
            self._thread.start()
        with self._changed:
            self._pending += 1
        self._queue.put((work, action))

    def settle(self) -> None:
        """Wait until nothing is on its way.

        Raises
        ------
        BaseException
            What an action has raised, once.
        """
        self._settle(0)

    def check(self) -> None:
        """Raise what an action has raised, without waiting where none has."""
        if self._error is not None:
            self._settle(0)

    def _settle(self, most: int) -> None:
        if self._pending > most or self._error is not None:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._pending <= (most if self._error is None else 0)
                )
                error, self._error = self._error, None
            if error is not None:
                raise error

    def close(self) -> None:
        """Wait for what is on its way, and end the thread; may be called twice."""
        try:
            self.settle()
        finally:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
                thread.join()

    def _run(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            work, action = task
            error: BaseException | None = None
            try:
                work.wait()
                if self._error is None:
                    action()
            except BaseException as raised:  # settle raises it, where the caller is
                error = raised
            self._idle.setdefault(work.kind, []).append(work)
            del work, action, task
            with self._changed:
                self._error = self._error or error
                self._pending -= 1
                self._changed.notify_all()
            del error
