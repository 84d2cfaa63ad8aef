"""What has to happen once a device has got so far: in a thread, so that nobody waits for it.

Invariants:

- An action runs after its event, never before; one at a time, in order.
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
    """Runs actions after events; at most one is on its way."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def after(self, event: torch.cuda.Event | None, action: Callable[[], None]) -> None:
        """Run an action once an event has happened; returns before that.

        Parameters
        ----------
        event : Event | None
            None runs it now, here.
        action : callable
            What it raises is raised by the next `settle`.
        """
        self.settle()
        if event is None:
            action()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shmbus-device", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._queue.put((event, action))

    def settle(self) -> None:
        """Wait until nothing is on its way.

        Raises
        ------
        BaseException
            What the last action has raised, once.
        """
        self._idle.wait()
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
            try:
                event.synchronize()
                action()
            except BaseException as error:  # settle raises it, where the caller is
                self._error = error
            finally:
                del event, action, work
                self._idle.set()
