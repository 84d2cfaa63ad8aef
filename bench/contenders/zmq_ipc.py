"""pyzmq: PUSH and PULL over an ipc socket, with msgspec."""

import contextlib
import importlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.contenders.base import Contender, Received, Receiver, Sender
from bench.contenders.packed_bytes import Decoder, Encoder
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "link", "receiver", "sender"]

CONTENDER: Final = Contender(
    name="pyzmq",
    title="pyzmq ipc PUSH/PULL, msgspec",
    packages=("pyzmq", "msgspec"),
    per_second=50_000.0,
    copies=5,
    copied="into a message, into zmq's, into the socket, out of the socket, out of zmq's",
    favour="one frame a trajectory; the high-water marks hold as many as the capacity does; "
    "the consumer drains what is there before it waits again",
)

#: Messages of a call: more than a full socket buffer holds.
DRAIN: Final = 64


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[str]:
    """Make a directory for the socket."""
    with tempfile.TemporaryDirectory(prefix="shmbus-zmq-") as directory:
        yield f"ipc://{Path(directory, 'socket')}"


def _zmq() -> Any:
    # Without an import statement: its types exist only beside an installation.
    return importlib.import_module("zmq")


class _Sender(Sender):
    def __init__(self, socket: Any, workload: Workload) -> None:
        self._send = socket.send
        self._encode = Encoder(workload).encode

    def send(self, instance_id: str, index: int, source: Source) -> None:
        self._send(self._encode(instance_id, index, source), copy=True)


class _Receiver(Receiver):
    def __init__(self, socket: Any, workload: Workload) -> None:
        zmq = _zmq()
        self._again = zmq.Again
        self._noblock = zmq.NOBLOCK
        self._socket = socket
        self._decode = Decoder().decode

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        received: list[Received] = []
        recv, decode, noblock = self._socket.recv, self._decode, self._noblock
        try:
            while len(received) < DRAIN:
                received.append(decode(recv(noblock)))
        except self._again:
            if not received and timeout_s != 0:
                wait_ms = None if timeout_s is None else timeout_s * 1000
                if self._socket.poll(wait_ms):
                    return self.receive(0.0)
        return received


@contextlib.contextmanager
def sender(address: str, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process."""
    zmq = _zmq()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = -1
        # The consumer may bind after this connect; the default retries every 100 ms.
        socket.reconnect_ivl = 1
        socket.sndhwm = max(1, workload.room // (2 * workload.producers))
        socket.connect(address)
        yield _Sender(socket, workload)


@contextlib.contextmanager
def receiver(address: str, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process."""
    zmq = _zmq()
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.rcvhwm = max(1, workload.room // (2 * workload.producers))
        socket.bind(address)
        yield _Receiver(socket, workload)
