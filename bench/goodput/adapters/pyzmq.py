"""pyzmq: PUSH and PULL, the sockets of prime-rl's ZMQ transport, with a high-water mark."""

import contextlib
import importlib
import pickle
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.goodput.adapters import About, Link, QueueEnd
from bench.goodput.party import Stub
from bench.goodput.scenario import Scenario

__all__ = ["ABOUT", "link", "train", "work"]

ABOUT: Final = About(
    title="pyzmq PUSH/PULL, as in prime-rl", packages=("pyzmq", "numpy"),
    fairness="a group a message; the trainer binds, workers connect again by themselves; promises "
    "no delivery after a disconnection",
)  # fmt: skip


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Name the socket."""
    yield Link(f"ipc://{root}/socket")


def _socket(kind: str, stub: Stub) -> Any:
    zmq: Any = importlib.import_module("zmq")
    made = zmq.Context.instance().socket(getattr(zmq, kind))
    # Half of the room at each end.
    made.sndhwm = made.rcvhwm = max(1, stub.scenario.ahead_groups // 2)
    return made


def work(address: Any, stub: Stub) -> None:
    """Send groups."""
    socket = _socket("PUSH", stub)
    socket.connect(address)
    for _, answers in stub.groups():
        socket.send(pickle.dumps(answers))
        stub.handed(*answers)
    socket.close(linger=-1)
    importlib.import_module("zmq").Context.instance().term()


@contextlib.contextmanager
def train(address: Any, stub: Stub, state: Any) -> Iterator[QueueEnd]:
    """Receive groups."""
    socket = _socket("PULL", stub)
    socket.bind(address)

    def get(timeout_s: float) -> Any:
        if not socket.poll(1000 * timeout_s):
            raise queue.Empty
        return pickle.loads(socket.recv())

    yield QueueEnd(get)
    socket.close(linger=0)
