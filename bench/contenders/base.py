"""What every contender says of itself, and the two ends that it gives to the harness.

A contender is one module of this package with

- ``CONTENDER``: a `Contender`, which describes it;
- ``link(workload)``: a context manager around whatever lies between the processes (a queue, a
  server); it yields what its ends need to find each other, which has to survive `spawn`;
- ``sender(address, workload, number)`` and ``receiver(address, workload)``: context managers that
  yield a `Sender` and a `Receiver`, in processes of their own;
- where its own loop is a better one, ``measure(workload)``, which returns a `Timed`;
  `bench.contest.moving` has the loop for all others;
- where links take long to begin, ``host()``: a context manager around what they have in common.

Invariants: what was sent before the sender's context ends arrives; nothing that a link started
outlives it.
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

#: One trajectory as it arrives: instance id, index, and its arrays: tokens, loss_mask, logprobs.
#: Valid until the next call of `Receiver.done`.
Received: TypeAlias = tuple[str, int, tuple[NDArray[Any], ...]]

#: Seconds that a server gets to begin, and to end by itself.
SERVER_START_S: Final = 60.0
SERVER_END_S: Final = 10.0
#: Seconds between looks whether it has begun.
SERVER_POLL_S: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A contender, for the table."""

    name: str
    title: str
    #: Distributions with printed versions, the contender's own first.
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
    """The producer's end; one that holds nothing back inherits `flush`, which does nothing."""

    def send(self, instance_id: str, index: int, source: Source) -> None:
        """Send one trajectory."""

    def flush(self) -> None:
        """Hand over what was sent and is still held back to be sent with more."""
        return


class Receiver(Protocol):
    """The consumer's end; where what was received is its own, it inherits `done`."""

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        """Return what is there, waiting for the first so long (None: for ever, 0: not at all)."""

    def done(self) -> None:
        """Give back all that was received: acknowledge it, free its memory."""
        return


def free_port() -> int:
    """Find a port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def started(
    argv: Sequence[str], ready: Callable[[], bool], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the context, from when ``ready()`` first returns true.

    Its output goes to a file without a name, and is shown if it fails to begin.
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
