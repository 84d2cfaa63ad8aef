"""Description of a contender, and its two ends in the hands of the harness.

A contender is a module of this package with

- ``CONTENDER``: its `Contender`;
- ``link(workload)``: a context manager around the parts between the processes (a queue, a server);
  yields a picklable address for the ends;
- ``sender(address, workload, number)`` and ``receiver(address, workload)``: context managers that
  yield a `Sender` and a `Receiver`, in processes of their own;
- optional, for a faster loop than `bench.contest.moving`: ``measure(workload)``, which returns a
  `Timed`;
- optional, for slow starts: ``host()``, a context manager around the common part of links.

Invariants: trajectories sent before the end of the sender's context arrive; processes of a link end
with the link.
"""

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from numpy.typing import NDArray

from bench.processes import MeasurementError
from bench.workload import Source

__all__ = ["Contender", "Received", "Receiver", "Sender", "free_port", "started"]

#: An arrived trajectory: instance id, index, and its arrays: tokens, loss_mask, logprobs.
#: Valid until the next call of `Receiver.done`.
Received: TypeAlias = tuple[str, int, tuple[NDArray[Any], ...]]

#: Seconds for a server to begin, and to end by itself.
SERVER_START_S: Final = 60.0
SERVER_END_S: Final = 10.0
#: Seconds between looks at a starting server.
SERVER_POLL_S: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Description of a contender, for the table."""

    name: str
    title: str
    #: Distributions with printed versions; first the contender itself.
    packages: tuple[str, ...]
    #: Expected trajectories of 2,048 tokens a second: only sizes the runs.
    per_second: float
    #: Copies of a payload byte from the producer's array to the consumer's, kernel included.
    copies: int
    copied: str
    #: Settings in the contender's favour.
    favour: str
    #: Virtual environment of ``make bench-contenders``; "" for the benchmark's own.
    environment: str = ""
    #: Whether a producer's trajectories arrive in order.
    ordered: bool = True


class Sender(Protocol):
    """The producer's end; a sender without a buffer inherits the empty `flush`."""

    def send(self, instance_id: str, index: int, source: Source) -> None:
        """Send one trajectory."""

    def flush(self) -> None:
        """Send trajectories held back for a larger batch."""
        return


class Receiver(Protocol):
    """The consumer's end; a receiver without borrowed memory inherits the empty `done`."""

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        """Return arrived trajectories after a wait for the first (None: for ever, 0: no wait)."""

    def done(self) -> None:
        """Give back every received trajectory: acknowledge, free memory."""
        return


def free_port() -> int:
    """Find a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def started(
    argv: Sequence[str], ready: Callable[[], bool], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the context; enter after the first true ``ready()``.

    Its output goes to an unnamed file, and into the message of a failed start.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options
        )
        try:
            deadline = time.monotonic() + SERVER_START_S
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    said = output.read().decode(errors="replace")
                    raise MeasurementError(f"{argv[0]} did not begin: {said}")
                time.sleep(SERVER_POLL_S)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(SERVER_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
