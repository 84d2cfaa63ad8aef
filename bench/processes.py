"""Processes of a measurement: spawned, let go together, and never waited for without a deadline.

Invariants:

- Every process is a fresh interpreter (spawn), so none inherits threads, locks or warm memory.
- When `run_together` returns or raises, all processes that it started have ended.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from typing import Any, Final

__all__ = ["DEADLINE_S", "STALL_S", "MeasurementError", "Role", "run_alone", "run_together"]

#: Seconds after which a group of processes is given up: far more than any needs on a busy machine.
DEADLINE_S: Final = 300.0
#: Seconds that one call in a process may wait for another process, which may still import torch.
STALL_S: Final = 60.0

_context = multiprocessing.get_context("spawn")


class MeasurementError(Exception):
    """A process failed, or was not done in time; the message says which, and what it said."""


@dataclass(frozen=True)
class Role:
    """What one process does: ``function(start, *arguments)``, which calls ``start()`` when ready.

    The function is one of a module's top level; what it returns has to pickle.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def run_together(roles: Sequence[Role], deadline_s: float = DEADLINE_S) -> list[Any]:
    """Run each role in a process of its own, and return their results in the same order.

    Each calls ``start()`` once, which returns when all have called it.

    Raises
    ------
    MeasurementError
        One of them raised, died, or ran past the deadline.
    """
    barrier = _context.Barrier(len(roles))
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    try:
        for role in roles:
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(target=_child, args=(there, barrier, role), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        results = _collect(roles, pipes, time.monotonic() + deadline_s)
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


def _child(pipe: Connection, barrier: Barrier, role: Role) -> None:
    def start() -> None:
        barrier.wait(STALL_S)

    # A Ctrl-C reaches every process of the terminal; the parent ends its children by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pipe.send((True, role.function(start, *role.arguments)))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def _collect(roles: Sequence[Role], pipes: list[Connection], deadline: float) -> list[Any]:
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
                done, result = False, "it died without a word"
            if not done:
                name = roles[number].function.__qualname__
                raise MeasurementError(f"{name} failed: {result}")
            results[number] = result
    return [results[number] for number in range(len(roles))]
