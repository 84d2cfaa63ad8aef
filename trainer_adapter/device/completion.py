"""What has to happen once a device has got so far: in a thread, so that nobody waits for it.

Invariants:

- An action runs after its event, never before; one at a time, in order, and none after one that
  has raised, until that was told.
- What waits is the owner's own thread on the owner's own event. No process waits on an event of
  another one, whose death could keep it from ever happening.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

import torch

__all__ = ["Completion", "recorded"]

_Work: TypeAlias = tuple[torch.cuda.Event, Callable[[], None]]


def recorded(device: torch.device) -> torch.cuda.Event | None:
    """Record an event on the current stream of a device; None for the CPU, which is always done.

    Parameters
    ----------
    device : torch.device

    Returns
    -------
    Event | None
        One that lets a thread sleep until then.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class Completion:
    """Runs actions after events.

    Parameters
    ----------
    depth : int
        How many may be on their way.
    """

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._changed = threading.Condition(threading.Lock())
        self._pending = 0
        # Of actions that are done: to make an event takes longer than to record one again.
        self._events: list[torch.cuda.Event] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Return how many actions are on their way."""
        return self._pending

    def recorded(self, device: torch.device) -> torch.cuda.Event | None:
        """Record an event as `recorded` does; it is used again once its action has run."""
        if device.type != "cuda" or not self._events:
            return recorded(device)
        event = self._events.pop()
        event.record(torch.cuda.current_stream(device))
        return event

    def after(self, event: torch.cuda.Event | None, action: Callable[[], None]) -> None:
        """Run an action once an event has happened; returns before that.

        Parameters
        ----------
        event : Event | None
            None runs it now, here.
        action : callable
            What it raises is raised by the next call of `after` or `settle`. Of the actions that
            were on their way behind it none is run.
        """
        self._settle(0 if event is None else self._depth - 1)
        if event is None:
            action()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shmbus-device", daemon=True)
            self._thread.start()
        with self._changed:
            self._pending += 1
        self._queue.put((event, action))

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
            work = self._queue.get()
            if work is None:
                return
            event, action = work
            error: BaseException | None = None
            try:
                event.synchronize()
                if self._error is None:
                    action()
            except BaseException as raised:  # settle raises it, where the caller is
                error = raised
            self._events.append(event)
            del event, action, work
            with self._changed:
                self._error = self._error or error
                self._pending -= 1
                self._changed.notify_all()
            del error
