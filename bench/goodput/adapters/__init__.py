"""The contenders of `bench.goodput`, a file each, through their own public interfaces.

A file defines ``ABOUT``; ``link(scenario, root)``, a context manager around the transport, yielding
a `Link`; ``work(address, stub)``, a worker's life: deliver answers of `party.Stub`, and write each
down right after delivery; ``train(address, stub, state)``, a context manager yielding the trainer's
`End`. Invariant: a link leaves no process and no file.
"""

import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from bench.processes import descendants

__all__ = ["ADAPTERS", "About", "End", "Link", "QueueEnd", "Server", "fixed_port", "kill",
           "kill_one", "served"]  # fmt: skip

#: Seconds that a server gets to begin.
SERVER_START_S: Final = 60.0
SERVER_POLL_S: Final = 0.05
PORTS: Final = range(20_000, 30_000)

#: In the order of the table.
ADAPTERS: Final = (
    "shmbus_embedded",
    "shmbus_daemon",
    "shmbus_relay",
    "mp_queue",
    "pyzmq",
    "ray_queue",
    "atropos",
    "transfer_queue",
    "trl",
)


@dataclass(frozen=True, kw_only=True)
class About:
    """A contender, for the table."""

    title: str
    #: Distributions with printed versions, the contender's own first.
    packages: tuple[str, ...]
    #: Settings, and what the contender never promised.
    fairness: str
    #: Environment of ``make bench-contenders``, or below ``build/peers``; "" for the benchmark's.
    environment: str = ""
    #: Whether the trainer offers prompts; else each worker has prompts of its own.
    offers: bool = False
    #: Whether workers are processes of their own; else the trainer starts them.
    workers: bool = True
    #: Seconds added to the patience: a start that imports a whole trainer.
    start_s: float = 0.0


@dataclass
class Link:
    """A running transport: an address for `spawn`, and its mortal parts.

    A part's function kills and restarts the part; the argument: the trainer's process id.
    """

    address: Any
    parts: dict[str, Callable[[int], None]] = field(default_factory=dict)


class End(Protocol):
    """The trainer's end."""

    def take(self, timeout_s: float) -> list[NDArray[Any]]:
        """Return the tokens of answers, [] after the time; EOFError after the last prompt."""

    def state(self) -> Any:
        """Return the contender's part of a checkpoint of all taken answers."""
        return None

    def saved(self) -> None:
        """Acknowledge the answers taken before `state`: the checkpoint is on disk."""
        return


class QueueEnd(End):
    """The end of a queue of whole groups."""

    def __init__(self, get: Callable[[float], Any]) -> None:
        self._get = get

    def take(self, timeout_s: float) -> list[NDArray[Any]]:
        """Return one group."""
        try:
            answers: list[NDArray[Any]] = self._get(timeout_s)
            return answers
        except queue.Empty:
            return []


class Server:
    """A server process, started again after each kill; output goes to ``root/NAME.log``."""

    def __init__(self, argv: Sequence[str], log: Path, ready: Callable[[], bool]) -> None:
        self._argv, self._log, self._ready = argv, log, ready
        self.start()

    def start(self) -> None:
        """Start, and wait until ready."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        limit = time.monotonic() + SERVER_START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > limit:
                self.kill()
                raise OSError(f"{self._argv[1:3]} did not begin: {self._log.read_text()[-500:]}")
            time.sleep(SERVER_POLL_S)

    def kill(self) -> None:
        """Kill with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def again(self, _: int = 0) -> None:
        """Kill, and start again."""
        self.kill()
        self.start()


def fixed_port() -> int:
    """Find a port below the ephemeral ones: no connection takes the port of a dead server."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"expected a free port in {PORTS}, found none")


@contextlib.contextmanager
def served(argv: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[Server]:
    """Run a server for a while."""
    server = Server(argv, log, ready)
    try:
        yield server
    finally:
        server.kill()


def kill_one(name: bytes) -> None:
    """Kill one of this process's descendants whose command line has a name, as an actor has."""
    for pid in sorted(descendants(os.getpid())):
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_bytes():
                kill(pid)
                return


def kill(pid: int) -> None:
    """Kill a process with SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
