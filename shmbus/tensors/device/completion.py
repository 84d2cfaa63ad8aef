"""What has to happen once a device has got so far: in a thread, so that nobody waits for it.

Invariants:

- An action runs after its work, never before; one at a time, in order, and none after one that has
  raised, until that was told.
- What waits is the owner's own thread on the owner's own events. No process waits on an event of
  another one, whose death could keep it from ever happening.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

__all__ = ["Completion"]

#: Seconds that a caller waits itself for the end of a small copy: what a device takes to change
#: over from another process, and as much again.
SOON_S: Final = 0.00025

_Task: TypeAlias = tuple[torch.cuda.Event, Callable[[], None]]


class Completion:
    """Runs actions after copies."""

    def __init__(self, depth: int = 1) -> None:
        self._depth = depth
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._changed = threading.Condition(threading.Lock())
        self._pending = 0
        self._idle: list[torch.cuda.Event] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Return how many actions are on their way."""
        return self._pending

    def after(
        self, device: torch.device, action: Callable[[], None], *, soon: bool = False
    ) -> None:
        """Run an action once a device has done what its current stream was asked to do."""
        event = self._record(device)
        self._settle(0 if event is None else self._depth - 1)
        if event is None:
            action()
            return
        if soon and not self._pending and _is_soon(event):
            self._idle.append(event)
            action()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shmbus-device", daemon=True)
            self._thread.start()
        with self._changed:
            self._pending += 1
        self._queue.put((event, action))

    def _record(self, device: torch.device) -> torch.cuda.Event | None:
        """Return what happens when the device has got so far; None where it has already."""
        if device.type != "cuda":
            return None
        # To make an event takes longer than to record one again.
        event = self._idle.pop() if self._idle else _new_event()
        event.record(torch.cuda.current_stream(device))
        return event

    def settle(self) -> None:
        """Wait until nothing is on its way."""
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
            event, action = task
            error: BaseException | None = None
            try:
                event.synchronize()
                if self._error is None:
                    action()
            except BaseException as raised:  # settle raises it, where the caller is
                error = raised
            self._idle.append(event)
            del event, action, task
            with self._changed:
                self._error = self._error or error
                self._pending -= 1
                self._changed.notify_all()
            del error


def _new_event() -> torch.cuda.Event:
    """Return an event for which a thread sleeps."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _is_soon(event: torch.cuda.Event) -> bool:
    deadline = time.perf_counter() + SOON_S
    while time.perf_counter() < deadline:
        if event.query():  # type: ignore[no-untyped-call]
            return True
    return False
