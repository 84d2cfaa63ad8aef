"""Processes of a measurement: spawned, started together, each wait with a deadline.

Invariants:

- Every process is a fresh interpreter (spawn), so none inherits threads, locks or warm memory;
  but where figures mean nothing, they are forked from a template that has imported what they need.
- A process imports what its role needs, and not the program that started it.
- When `run_together` returns or raises, all processes that it started have ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier, Event, Semaphore
from typing import Any, Final

__all__ = [
    "DEADLINE_S",
    "STALL_S",
    "MeasurementError",
    "Role",
    "Started",
    "new_counters",
    "new_event",
    "new_semaphore",
    "run_alone",
    "run_together",
    "start_role",
    "use_template",
]

#: Seconds after which a group of processes is given up: far more than any needs on a busy machine.
DEADLINE_S: Final = 300.0
#: Seconds that one call in a process may wait for another process, which may still import torch.
STALL_S: Final = 60.0
#: Seconds until a process that has closed its pipe is gone.
END_S: Final = 5.0
#: Seconds between two checks of watched processes, and of whether they are ready.
WATCH_S: Final = 0.02
READY_POLL_S: Final = 0.01

#: Modules that the template has imported, by commas; no template without it. In the environment,
#: so that the processes of contenders have it too.
TEMPLATE: Final = "SHMBUS_BENCH_TEMPLATE"


def use_template(*modules: str) -> None:
    """Fork all processes from a template with these modules: quick, and nothing to time by.

    Has to be called before the first process is started.
    """
    os.environ[TEMPLATE] = ",".join(modules)


@cache
def _context() -> SpawnContext | ForkServerContext:
    modules = os.environ.get(TEMPLATE)
    if not modules:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules.split(","))
    return context


class MeasurementError(Exception):
    """A process failed, or was not done in time; the message says which, and what it said."""


@dataclass(frozen=True)
class Role:
    """What one process does: ``function(start, *arguments)``, which calls ``start()`` when ready.

    The function is one of a module's top level; what it returns has to pickle.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def run_together(
    roles: Sequence[Role],
    deadline_s: float = DEADLINE_S,
    watch: Callable[[Sequence[int]], None] | None = None,
) -> list[Any]:
    """Run each role in a process of its own, and return their results in the same order.

    Each calls ``start()`` once, which returns when all have called it. `watch` is called with
    their pids right before that, and then every `WATCH_S` while all of them run.

    Raises
    ------
    MeasurementError
        One of them raised, died, or ran past the deadline.
    """
    barrier = _context().Barrier(len(roles) + (watch is not None))
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for role in roles:
            here, there = _context().Pipe(duplex=False)
            process = _process(there, barrier, role)
            _begin(process, role)
            there.close()
            processes.append(process)
            pipes.append(here)
        deadline = time.monotonic() + deadline_s
        if watch:
            _watch(watch, processes, pipes, barrier, deadline)
        results = _collect(roles, processes, pipes, deadline)
        for process in processes:
            process.join()
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def run_alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run one role in a process of its own, and return its result."""
    return run_together([Role(function, arguments)])[0]


class Started:
    """A process that starts immediately and runs until it is ended."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def end(self) -> None:
        """End it by SIGKILL, and reap it."""
        self._process.kill()
        self._process.join()

    def failure(self) -> str:
        """Return what it failed with; nothing if it has not."""
        try:
            if self._pipe.poll():
                done, result = self._pipe.recv()
                return "" if done else str(result)
        except EOFError:
            pass
        return ""


def start_role(role: Role) -> Started:
    """Begin ``function(*arguments)`` in a process of its own, which waits for no other."""
    here, there = _context().Pipe(duplex=False)
    process = _process(there, None, role)
    _begin(process, role)
    there.close()
    return Started(process, here)


def new_event() -> Event:
    """Make an event that roles can share."""
    return _context().Event()


def new_semaphore() -> Semaphore:
    """Make a semaphore that roles can share, of which there are none yet."""
    return _context().Semaphore(0)


def new_counters(count: int) -> Any:
    """Make so many integers that roles can share, without a lock: one writer each."""
    return _context().RawArray("q", count)


def _begin(process: BaseProcess, role: Role) -> None:
    """Start a process that does not import this program, where its role has nothing of that.

    The program's imports take as long as those of most roles.
    """
    # A Ctrl-C reaches every process of the terminal, and the parent ends its children by itself:
    # one that still imports would print where it was.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _start(process, role)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(process: BaseProcess, role: Role) -> None:
    if _of_program(role):
        process.start()
        return
    main = sys.modules["__main__"]
    # By either of them `spawn` would find the program.
    spec, path = main.__spec__, main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        process.start()
    finally:
        main.__spec__ = spec
        if path is not None:
            main.__file__ = path


def _of_program(one: object) -> bool:
    """Whether something is, or holds, what the program itself defines."""
    if isinstance(one, Role):
        return any(map(_of_program, (one.function, *one.arguments)))
    return "__main__" in (getattr(one, "__module__", ""), type(one).__module__)


def _process(pipe: Connection, barrier: Barrier | None, role: Role) -> BaseProcess:
    return _context().Process(target=_child, args=(pipe, barrier, role), daemon=True)


def _child(pipe: Connection, barrier: Barrier | None, role: Role) -> None:
    def start() -> None:
        assert barrier is not None
        barrier.wait(STALL_S)

    # A Ctrl-C reaches every process of the terminal; the parent ends its children by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        arguments = (start, *role.arguments) if barrier else role.arguments
        pipe.send((True, role.function(*arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _watch(
    watch: Callable[[Sequence[int]], None],
    processes: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    barrier: Barrier,
    deadline: float,
) -> None:
    """Wait until all are ready, watch, let them begin, and watch until the first has ended."""
    pids = [process.pid for process in processes if process.pid is not None]
    while barrier.n_waiting < len(processes):
        if wait(pipes, READY_POLL_S) or time.monotonic() > deadline:
            return
    watch(pids)
    barrier.wait(STALL_S)
    while not wait(pipes, WATCH_S) and time.monotonic() < deadline:
        watch(pids)


def _collect(
    roles: Sequence[Role],
    processes: Sequence[BaseProcess],
    pipes: list[Connection],
    deadline: float,
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(roles):
        open_pipes = [pipe for number, pipe in enumerate(pipes) if number not in results]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        names = [roles[pipes.index(pipe)].function.__qualname__ for pipe in open_pipes]
        if not ready:
            raise MeasurementError(f"not done in time: {', '.join(names)}")
        for pipe in open_pipes:
            if pipe not in ready:
                continue
            number = pipes.index(pipe)
            try:
                done, result = pipe.recv()
            except EOFError:
                done, result = False, f"it died without a word{_of(processes[number])}"
            if not done:
                name = roles[number].function.__qualname__
                raise MeasurementError(f"{name} failed: {result}")
            results[number] = result
    return [results[number] for number in range(len(roles))]


def _of(process: BaseProcess) -> str:
    """Say of which signal a process has died, where it is one."""
    process.join(END_S)
    code = process.exitcode
    if code is None or code >= 0:
        return ""
    hint = ", as where /dev/shm has no room left" if -code == signal.SIGBUS else ""
    return f", of {signal.Signals(-code).name}{hint}"
