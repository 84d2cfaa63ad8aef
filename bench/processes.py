"""Processes of a measurement: spawned, started together, each wait with a deadline.

Invariants:

- Every process is a fresh interpreter (spawn); tests fork processes from a template instead.
- When `run_together` returns or raises, all processes that it started have ended.
- Imports nothing beside the standard library, since every process of a measurement does.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

__all__ = [
    "DEADLINE_S",
    "STALL_S",
    "MeasurementError",
    "Role",
    "Started",
    "context",
    "descendants",
    "processor_s",
    "run_alone",
    "run_together",
    "sleeps",
    "use_template",
]

#: Seconds after which a group of processes is given up: far more than any needs on a busy machine.
DEADLINE_S: Final = 300.0
#: Seconds that one call in a process may wait for another process, which may still import torch.
STALL_S: Final = 60.0
END_S: Final = 5.0
#: Modules that the template has imported, by commas; no template without it. In the environment,
#: so that the processes of contenders have it too.
TEMPLATE: Final = "SHMBUS_BENCH_TEMPLATE"


class MeasurementError(Exception):
    """A process failed, or was not done in time; the message says which, and what it said."""


def use_template(*modules: str) -> None:
    """Fork all processes from a template with these modules, which is quick.

    Not where a start or a first touch of memory is timed. Has to be called before the first process
    is started.
    """
    os.environ[TEMPLATE] = ",".join(modules)


@cache
def context() -> SpawnContext | ForkServerContext:
    """Return the context of all processes, of which shared events and counters are made too."""
    modules = os.environ.get(TEMPLATE)
    if not modules:
        return multiprocessing.get_context("spawn")
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(modules.split(","))
    return forked


@dataclass(frozen=True)
class Role:
    """What one process does: ``function(start, *arguments)``, which calls ``start()`` when ready.

    The function is one of a module's top level; what it returns has to pickle.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


class Started:
    """A process with a role of its own, which runs until it ends or is ended."""

    def __init__(self, role: Role, barrier: Any = None, *, daemon: bool = True) -> None:
        self.name = role.function.__qualname__
        self.pipe, there = context().Pipe(duplex=False)
        self._process: BaseProcess = context().Process(
            target=_child, args=(there, barrier, role), daemon=daemon
        )
        # A Ctrl-C reaches every process of the terminal; the parent ends its children by itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid or 0

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def result(self) -> Any:
        """Return what its role returned, once `pipe` has something; raise what it failed with."""
        try:
            done, result = self.pipe.recv()
        except EOFError:
            self._process.join(END_S)
            code = self._process.exitcode or 0
            by = f", of {signal.Signals(-code).name}" if code < 0 else ""
            done, result = False, f"it died without a word{by}"
        if not done:
            raise MeasurementError(f"{self.name} failed: {result}")
        return result

    def failure(self) -> str:
        """Return what it failed with; nothing if it has not."""
        try:
            if self.pipe.poll():
                self.result()
        except MeasurementError as error:
            return str(error)
        return ""

    def join(self, seconds: float) -> None:
        """Wait until it has ended by itself."""
        self._process.join(seconds)

    def end(self) -> None:
        """End it by SIGKILL, and reap it."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def run_together(roles: Sequence[Role], deadline_s: float = DEADLINE_S) -> list[Any]:
    """Run each role in a process of its own, and return their results in the same order.

    Each calls ``start()`` once, which returns when all have called it.

    Raises
    ------
    MeasurementError
        One of them raised, died, or ran past the deadline.
    """
    barrier = context().Barrier(len(roles))
    started: list[Started] = []
    deadline = time.monotonic() + deadline_s
    try:
        for role in roles:
            started.append(Started(role, barrier))
        results: dict[int, Any] = {}
        while len(results) < len(roles):
            left = [number for number in range(len(roles)) if number not in results]
            pipes = [started[number].pipe for number in left]
            ready = wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(started[number].name for number in left)
                raise MeasurementError(f"not done in {deadline_s:g} s: {names}")
            for number in left:
                if started[number].pipe in ready:
                    results[number] = started[number].result()
        for one in started:
            one.join(END_S)
        return [results[number] for number in range(len(roles))]
    finally:
        for one in started:
            one.end()


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run one role in a process of its own, and return its result."""
    return run_together([Role(function, arguments)])[0]


def processor_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process, as the scheduler counts them."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def sleeps(pid: int) -> bool:
    """Tell if a process neither runs nor wants to."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def descendants(root: int) -> list[int]:
    """Return the pids of all living descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.name))
    return list(_below(root, children))


def _below(root: int, children: dict[int, list[int]]) -> Iterator[int]:
    for child in children.get(root, []):
        yield child
        yield from _below(child, children)


def _child(pipe: Connection, barrier: Any, role: Role) -> None:
    def start() -> None:
        barrier.wait(STALL_S)

    try:
        arguments = (start, *role.arguments) if barrier is not None else role.arguments
        pipe.send((True, role.function(*arguments)))
    except (MeasurementError, OSError, MemoryError) as error:
        pipe.send((False, str(error) or type(error).__name__))
    except Exception:
        pipe.send((False, traceback.format_exc()))
