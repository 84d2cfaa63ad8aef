"""multiprocessing.Queue: pickle into a pipe, out of a pipe; the standard library's way."""

import contextlib
import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.contenders.base import Contender, Received, Receiver, Sender
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "MOST", "QueueReceiver", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="multiprocessing.Queue",
    title="multiprocessing.Queue",
    packages=("numpy",),
    per_second=28_000.0,
    copies=4,
    copied="into the pickle, into the pipe, out of the pipe, out of the pickle",
    favour="one tuple of three arrays a trajectory, without a dict; bounded by count only",
)

#: Limit of a POSIX semaphore, the counter of the queue.
MOST: Final = 32_767


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[Any]:
    """Make the queue."""
    yield multiprocessing.get_context("spawn").Queue(min(workload.room, MOST))


class _Sender(Sender):
    def __init__(self, address: Any, workload: Workload) -> None:
        self._put = address.put

    def send(self, instance_id: str, index: int, source: Source) -> None:
        self._put((instance_id, index, 1.0, 3, source))


class QueueReceiver(Receiver):
    """Takes single messages; the queue knows no batch call."""

    def __init__(self, address: Any) -> None:
        self._queue = address

    def get(self, timeout_s: float | None) -> Sequence[Any]:
        """Return the next message, or an empty sequence."""
        try:
            # No timeout without a deadline: spares a poll of the pipe.
            return (self._queue.get(timeout_s != 0, timeout_s),)
        except queue.Empty:
            return ()

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        """Return the next trajectory, or an empty sequence."""
        return [(one[0], one[1], one[-1]) for one in self.get(timeout_s)]


@contextlib.contextmanager
def sender(address: Any, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process."""
    yield _Sender(address, workload)
    address.close()
    address.join_thread()


@contextlib.contextmanager
def receiver(address: Any, workload: Workload) -> Iterator[QueueReceiver]:
    """Receive in this process."""
    yield QueueReceiver(address)
