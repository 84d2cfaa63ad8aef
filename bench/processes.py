"""Processes of a measurement: spawned, started together, each wait with a deadline.

Invariants:

- Every process is a fresh interpreter (spawn); tests fork processes from a template instead.
- `run_together` leaves no process behind, whether by return or exception.
- The module imports the standard library alone: every process of a measurement loads the module.
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

#: Deadline of a group of processes: far beyond the needs of a busy machine.
DEADLINE_S: Final = 300.0
#: Seconds a call in a process may wait for a second process, perhaps in its import of torch.
STALL_S: Final = 60.0
END_S: Final = 5.0
#: Modules of the template, by commas; empty: no template. An environment variable, to reach the
#: processes of contenders too.
TEMPLATE: Final = "SHMBUS_BENCH_TEMPLATE"


class MeasurementError(Exception):
    """A failed or late process; the message has its name and its output."""


def use_template(*modules: str) -> None:
    """Fork every process from a template with these modules: a fast start.

    Not for rows that time a start or a first touch of memory. Call before the first start.
    """
    os.environ[TEMPLATE] = ",".join(modules)


@cache
def context() -> SpawnContext | ForkServerContext:
    """Return the context of processes, shared events and counters."""
    modules = os.environ.get(TEMPLATE)
    if not modules:
        return multiprocessing.get_context("spawn")
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(modules.split(","))
    return forked


@dataclass(frozen=True)
class Role:
    """Role of a process: ``function(start, *arguments)``, which calls ``start()`` when ready.

    The function lies at the top level of a module; its result has to pickle.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


class Started:
    """A process with a role, running to its own end or to `end`."""

    def __init__(self, role: Role, barrier: Any = None, *, daemon: bool = True) -> None:
        self.name = role.function.__qualname__
        self.pipe, there = context().Pipe(duplex=False)
        self._process: BaseProcess = context().Process(
            target=_child, args=(there, barrier, role), daemon=daemon
        )
        # A Ctrl-C reaches every process of the terminal; the parent ends its children itself.
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
        """Whether the process still runs."""
        return self._process.is_alive()

    def result(self) -> Any:
        """Return the role's result once `pipe` is readable; raise the role's failure."""
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
        """Return the role's failure; "" without a failure."""
        try:
            if self.pipe.poll():
                self.result()
        except MeasurementError as error:
            return str(error)
        return ""

    def join(self, seconds: float) -> None:
        """Wait for the process to end by itself."""
        self._process.join(seconds)

    def stop(self) -> None:
        """End the process by SIGTERM, for a role that removes its own segments; then kill."""
        self._process.terminate()
        self._process.join(END_S)
        self.end()

    def end(self) -> None:
        """Kill the process by SIGKILL, and reap the remains."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def run_together(roles: Sequence[Role], deadline_s: float = DEADLINE_S) -> list[Any]:
    """Run each role in its own process; return the results in the order of the roles.

    Each role calls ``start()`` once; the call returns after the call of the last role.

    Raises
    ------
    MeasurementError
        A role raised, died, or ran past the deadline.
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
            one.stop()


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a role in its own process; return the result."""
    return run_together([Role(function, arguments)])[0]


def processor_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process, by the scheduler's count."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def sleeps(pid: int) -> bool:
    """Tell if a process sleeps, without a wish to run."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def descendants(root: int) -> list[int]:
    """Return the pids of a process's living descendants."""
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
