"""Processes of a measurement: spawned, started together, each wait with a deadline.

Invariants:

- Every process is a fresh interpreter (spawn), so none inherits threads, locks or warm memory;
  but where figures mean nothing, they are forked from a template that has imported what they need.
- A process imports what its role needs, and not the program that started it.
- A signal that ends the program ends no process half way into its start, which would print where.
- When `run_together` returns or raises, all processes that it started have ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier, Event, Semaphore
from typing import Any, Final

from bench.failures import MeasurementError, sentence

__all__ = [
    "DEADLINE_S",
    "END_S",
    "STALL_S",
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
#: What ends a program, by its terminal or by who began it.
ENDS: Final = (signal.SIGINT, signal.SIGTERM)
#: Said of a process that a signal has ended.
HINTS: Final = {
    signal.SIGBUS: ", as where /dev/shm has no room left",
    signal.SIGKILL: ", as where the kernel ends a process because there is no more memory",
}

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
    # It removes the semaphores of a program that dies, so it is there before the first of them.
    resource_tracker.ensure_running()
    modules = os.environ.get(TEMPLATE)
    if not modules:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules.split(","))
    return context


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
            processes.append(process)
            pipes.append(here)
            _begin(process, role)
            there.close()
        deadline = time.monotonic() + deadline_s
        if watch:
            _watch(watch, processes, pipes, barrier, deadline)
        results = _collect(roles, processes, pipes, deadline)
        for process in processes:
            process.join()
        return results
    finally:
        for process in processes:
            if process.pid is not None:
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

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended by itself."""
        self._process.join(timeout_s)

    def ended(self) -> str:
        """Say how one ended that was to run on; nothing while it does."""
        if self.running:
            return ""
        return self.failure() or f"it died without a word{_of(self._process)}"

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
    try:
        with _put_off():
            _start(process, role)
    except EOFError as error:
        raise MeasurementError(
            f"{role.function.__qualname__} cannot be started: the process that all are forked from "
            "has died, as where no further process may be started, or there is no more memory "
            "(ulimit -u and -v, and the control group)"
        ) from error


@contextmanager
def _put_off() -> Iterator[None]:
    """Put off an interrupt and SIGTERM; what is started meanwhile has them blocked.

    A Ctrl-C reaches every process of the terminal, and the parent ends its children by itself: one
    that still imports would print where it was. So would one whose start was cut short.
    """
    came: list[int] = []
    handlers = {}
    # Only there a handler may be set, and only there it runs. To block is not enough: where there
    # are other threads, one of them hears the signal.
    if threading.current_thread() is threading.main_thread():
        found = {each: signal.getsignal(each) for each in ENDS}
        handlers = {each: handler for each, handler in found.items() if callable(handler)}
    for each in handlers:
        signal.signal(each, lambda number, _: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in came[:1]:
            signal.raise_signal(number)


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
    # Blocked while this process was started; what it starts is ended by it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    try:
        arguments = (start, *role.arguments) if barrier else role.arguments
        pipe.send((True, role.function(*arguments)))
    except Exception as error:
        pipe.send((False, sentence(error) or traceback.format_exc()))


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
    number = signal.Signals(-code)
    return f", of {number.name}{HINTS.get(number, '')}"
