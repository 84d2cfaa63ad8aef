"""Yardsticks of rows: memory, a semaphore, Python's queue.

A yardstick runs in processes of its own, beside the row.
"""

import ctypes
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import native
from bench.processes import STALL_S, MeasurementError, Role, context, run_alone, run_together

__all__ = ["futex_us", "memcpy", "passed_on_us", "queue_us"]

#: Size and number of a yardstick's turns; the median turn counts.
CALLS: Final = 1000
TURNS: Final = 9


def memcpy(size: int, repetitions: int) -> float:
    """Return bytes a second of a copy of `size` bytes from memory to memory, by a core."""
    return float(run_alone(_copy, size, repetitions))


def queue_us() -> float:
    """Return the microseconds of a dict into Python's own queue and out again, in one process."""
    return float(run_alone(_through_queue))


def futex_us(pauses_ns: Sequence[int], warm_up: int) -> float:
    """Return the median microseconds of a bare futex's wake-up between two C programs.

    Raises
    ------
    native.CannotRun
        There is no compiler.
    """
    with tempfile.TemporaryDirectory(prefix="shmbus-bench-") as directory:
        program = Path(directory, "raw_futex")
        native.compile_program(native.PROGRAMS / "raw_futex.c", program)
        said, _ = native.run([str(program)], "\n".join(map(str, pauses_ns)))
    return statistics.median(int(each) for each in said.split()[warm_up:]) / 1e3


def passed_on_us(pauses_ns: Sequence[int], warm_up: int, between: int = 1) -> float:
    """Return the median microseconds of a semaphore's way through so many interpreters."""
    count = len(pauses_ns)
    bells = [context().Semaphore(0) for _ in range(between + 1)]
    roles = [
        Role(_acquire, (bells[-1], count)),
        Role(_release_after_pauses, (bells[0], list(pauses_ns))),
        *[Role(_pass_on, (bells[i], bells[i + 1], count)) for i in range(between)],
    ]
    came: list[int]
    stamps: list[int]
    came, stamps, *_ = run_together(roles)
    ways = [after - before for after, before in zip(came, stamps, strict=True)]
    return statistics.median(ways[warm_up:]) / 1e3


def _copy(start: Callable[[], None], size: int, repetitions: int) -> float:
    # Written, to create every page before the clock starts.
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    start()
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, size)
        seconds.append(time.perf_counter() - began)
    return size / statistics.median(seconds)


def _through_queue(start: Callable[[], None]) -> float:
    one: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    start()
    us = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(CALLS):
            one.put({"instance_id": "a", "index": 0})
            one.get()
        us.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(us)


def _await(semaphore: Any) -> None:
    if not semaphore.acquire(True, STALL_S):
        raise MeasurementError(f"nobody released the semaphore within {STALL_S:g} s")


def _acquire(start: Callable[[], None], semaphore: Any, count: int) -> list[int]:
    came = []
    start()
    for _ in range(count):
        _await(semaphore)
        came.append(time.monotonic_ns())
    return came


def _pass_on(start: Callable[[], None], heard: Any, rung: Any, count: int) -> None:
    start()
    for _ in range(count):
        _await(heard)
        rung.release()


def _release_after_pauses(
    start: Callable[[], None], semaphore: Any, pauses_ns: list[int]
) -> list[int]:
    stamps = []
    start()
    for pause_ns in pauses_ns:
        time.sleep(pause_ns / 1e9)
        stamps.append(time.monotonic_ns())
        semaphore.release()
    return stamps
