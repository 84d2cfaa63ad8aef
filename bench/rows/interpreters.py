"""The least that a wake-up costs between two Python processes: a semaphore, which is a bare futex.

A bare futex between two C programs has little to warm up again after a pause, and an interpreter
has much. What the bus adds is told by a bound that pays for the interpreters too: one process
releases a semaphore after each pause, another acquires it, with the stamps and pauses of the row
that it bounds. A load, where one is asked for, is a third process that copies a trajectory's bytes
at an even rate, and has nothing to do with what is measured. Where a process stands between the
two, as a daemon does, one that acquires and releases stands there here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.failures import MeasurementError
from bench.processes import STALL_S, Role, new_event, new_semaphore, run_together

__all__ = ["LOAD_BYTES", "LOAD_PER_S", "beside_load", "measure"]

#: Copies a second of the load, and what each copies: a trajectory of 2,048 tokens.
LOAD_PER_S: Final = 5000.0
LOAD_BYTES: Final = 2048 * 9


def measure(
    pauses_ns: Sequence[int], *, loaded: bool = False, between: int = 0
) -> NDArray[np.int64]:
    """Return the nanoseconds of each wake-up, with so many processes between the two."""
    count = len(pauses_ns)
    bells = [new_semaphore() for _ in range(between + 1)]
    roles = [
        Role(_acquire, (bells[-1], count)),
        Role(_release_after_pauses, (bells[0], list(pauses_ns))),
        *[Role(_pass_on, (bells[i], bells[i + 1], count)) for i in range(between)],
    ]
    came, stamps, *_ = beside_load(roles, loaded=loaded)
    return np.array(came, np.int64) - np.array(stamps, np.int64)


def beside_load(roles: Sequence[Role], *, loaded: bool) -> list[Any]:
    """Run roles together, with the load beside them if it is asked for; the first ends it."""
    over = new_event()
    first = Role(_then_set, (over, roles[0]))
    beside = [Role(_load, (over,))] if loaded else []
    return run_together([first, *roles[1:], *beside])[: len(roles)]


def _then_set(start: Callable[[], None], over: Any, role: Role) -> Any:
    try:
        return role.function(start, *role.arguments)
    finally:
        over.set()


def _acquire(start: Callable[[], None], semaphore: Any, count: int) -> list[int]:
    came = []
    start()
    for _ in range(count):
        if not semaphore.acquire(True, STALL_S):
            raise MeasurementError(f"nobody released the semaphore within {STALL_S:g} s")
        came.append(time.monotonic_ns())
    return came


def _pass_on(start: Callable[[], None], heard: Any, rung: Any, count: int) -> None:
    start()
    for _ in range(count):
        if not heard.acquire(True, STALL_S):
            raise MeasurementError(f"nobody released the semaphore within {STALL_S:g} s")
        rung.release()


def _release_after_pauses(
    start: Callable[[], None], semaphore: Any, pauses_ns: list[int]
) -> list[int]:
    stamps = []
    start()
    for pause_ns in pauses_ns:
        time.sleep(pause_ns / 1e9)
        stamp = time.monotonic_ns()
        semaphore.release()
        stamps.append(stamp)
    return stamps


def _load(start: Callable[[], None], over: Any) -> None:
    source, target = np.ones(LOAD_BYTES, np.uint8), np.empty(LOAD_BYTES, np.uint8)
    start()
    began, number = time.monotonic(), 0
    while not over.is_set():
        pause_s = began + number / LOAD_PER_S - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)
        np.copyto(target, source)
        number += 1
