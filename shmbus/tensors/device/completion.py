"""What has to happen once a device has got so far: in a thread, so that nobody waits for it.

Invariants:

- An action runs after its work, never before; one at a time, in order, and none after one that has
  raised, until that was told.
- What waits is the owner's own thread on the owner's own events. No process waits on an event of
  another one, whose death could keep it from ever happening.
- A thread keeps a processor busy for about as long as the copies take that it waits for. Where they
  follow other work, it looks now and then after that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

import torch

from shmbus.device_calls import DEVICE_NOT_READY, device_await
from shmbus.tensors.device.driver import address, check
from shmbus.tensors.device.streams import current_stream

__all__ = ["SPIN_BYTES", "Completion", "Work", "event"]

#: Bytes up to which the end of their copy is waited for without sleeping: half a millisecond of a
#: device of 2 TB/s. To be woken up takes a tenth of one.
SPIN_BYTES: Final = 1 << 30

#: Bytes a second of the slowest device, for how long a copy may take.
SLOW_BYTES_PER_S: Final = 1e12

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
    device : torch.device
        Of CUDA, in use already.

    Attributes
    ----------
    nbytes : int
        Of the copies, this time.
    handle : int
        What the driver knows their end by: an event to be recorded behind them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        self._ended = event(sleeps=False)
        self.end()  # the driver's event is made when it is recorded first
        self.handle = int(self._ended.cuda_event)
        self._query = address("cuEventQuery")

    def end(self) -> None:
        """Say that no more follow."""
        self._ended.record(current_stream(self.device))

    def attach(self) -> None:
        """Make torch's context of the device the calling thread's own; the driver asks for it."""
        self._ended.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until they have been made.

        Raises
        ------
        RuntimeError, CudaDriverError
            The device has failed.
        """
        busy_s = SOON_S + min(self.nbytes, SPIN_BYTES) / SLOW_BYTES_PER_S
        self._check(device_await(self._query, self.handle, busy_s, True))

    def is_made(self, within: float) -> bool:
        """Wait so many seconds, without sleeping; whether they have been made.

        Raises
        ------
        RuntimeError, CudaDriverError
            The device has failed.
        """
        status = device_await(self._query, self.handle, within, False)
        if status == DEVICE_NOT_READY:
            return False
        self._check(status)
        return True

    def _check(self, status: int) -> None:
        if status:
            self._ended.synchronize()  # torch has better words for it
            check("cuEventQuery", status)


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
        self._idle: list[Work] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Return how many actions are on their way."""
        return self._pending

    @property
    def failed(self) -> bool:
        """Return whether an action has raised, and nobody was told yet."""
        return self._error is not None

    def begin(self, device: torch.device, nbytes: int) -> Work | None:
        """Return what is to be recorded behind the copies of a step, on a device's current stream.

        Parameters
        ----------
        device : torch.device
            Always the same one.
        nbytes : int
            Of the copies.

        Returns
        -------
        Work | None
            For `after`; None for the CPU, which is always done.
        """
        if device.type != "cuda":
            return None
        work = self._idle.pop() if self._idle else Work(device)
        work.nbytes = nbytes
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
            Of `begin`, recorded behind the copies; None runs the action now, here.
        action : callable
            What it raises is raised by the next call of `after` or `settle`. Of the actions that
            were on their way behind it none is run.
        soon : bool
            Whether the copies are so small that they are waited for a moment, and the action is run
            here where they have been made by then.
        """
        self._settle(0 if work is None else self._depth - 1)
        if work is None:
            action()
            return
        if soon and not self._pending and work.is_made(SOON_S):
            self._idle.append(work)
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
        attached = False
        while True:
            task = self._queue.get()
            if task is None:
                return
            work, action = task
            error: BaseException | None = None
            try:
                if not attached:
                    work.attach()
                    attached = True
                work.wait()
                if self._error is None:
                    action()
            except BaseException as raised:  # settle raises it, where the caller is
                error = raised
            self._idle.append(work)
            del work, action, task
            with self._changed:
                self._error = self._error or error
                self._pending -= 1
                self._changed.notify_all()
            del error
