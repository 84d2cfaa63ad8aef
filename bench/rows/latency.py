"""Time from put to a sleeping reader, embedded and through the daemon.

By CLOCK_MONOTONIC, from right before put to right after the return of take in the second process;
random pauses are long enough for the reader to fall asleep again. Beside it, in turns and with the
same pauses: a bare futex between two C programs; for the daemon's two wake-ups, a semaphore passed
on by a third interpreter.
"""

import contextlib
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import numpy as np

import shmbus
from bench import native
from bench.levels import Level
from bench.processes import STALL_S, MeasurementError, Role, run_together
from bench.row import Row
from bench.sending import serving, temporary_bus
from bench.yardsticks import futex_us, passed_on_us

__all__ = ["daemon_wake", "pauses_ns", "wake"]

#: Microseconds between two puts.
PAUSE_US: Final = (300.0, 1000.0)
SEED: Final = 20240229
#: Uncounted first wake-ups: first calls, first touches.
WARM_UP: Final = 50


def pauses_ns(wakes: int) -> list[int]:
    """Return the nanoseconds before each put, warm-up first; always the same."""
    generator = random.Random(SEED)
    return [int(generator.uniform(*PAUSE_US) * 1000) for _ in range(WARM_UP + wakes)]


def wake(level: Level, capacity: str) -> Row:
    """Measure a wake-up beside a bare futex."""
    pauses = pauses_ns(level.wakes)
    ours, raw, why = [], [], ""
    for _ in range(level.repetitions):
        ours.append(_one_way_us(pauses, capacity))
        try:
            raw.append(futex_us(pauses, WARM_UP))
        except native.CannotRun as error:
            why = f"no raw futex beside it: {error}"
    return Row(
        name="wake",
        title="wake-up, one way, p50",
        unit="us",
        values=tuple(ours),
        beside="raw futex" if raw else "",
        beside_values=tuple(raw),
        note=why,
    )


def daemon_wake(level: Level, capacity: str) -> Row:
    """Measure one way through the daemon."""
    pauses = pauses_ns(level.wakes)
    turns = [
        (_one_way_us(pauses, capacity, daemon=True), passed_on_us(pauses, WARM_UP))
        for _ in range(level.repetitions)
    ]
    return Row(
        name="daemon-wake",
        title="wake-up through the daemon, p50",
        unit="us",
        values=tuple(ours for ours, _ in turns),
        beside="a semaphore passed on",
        beside_values=tuple(bare for _, bare in turns),
    )


def _one_way_us(pauses: list[int], capacity: str, *, daemon: bool = False) -> float:
    """Return the median microseconds of a turn."""
    came: list[int]
    put: list[int]
    with temporary_bus(capacity) as name:
        served: AbstractContextManager[object] = (
            serving(name) if daemon else contextlib.nullcontext()
        )
        with served:
            came, put = run_together(
                [Role(_sleep_until_put, (name, len(pauses))), Role(_put_after, (name, pauses))]
            )
    ways = [after - before for after, before in zip(came, put, strict=True)]
    return statistics.median(ways[WARM_UP:]) / 1e3


def _put_after(start: Callable[[], None], name: str, pauses: list[int]) -> list[int]:
    """Put a group of one after each pause; return the stamps from right before each put."""
    sample = np.zeros(1, np.int64)
    stamps = []
    with shmbus.Producer(name) as producer:
        start()
        for pause_ns in pauses:
            time.sleep(pause_ns / 1e9)
            stamp = time.monotonic_ns()
            producer.put("wake", group_size=1, index=0, sample=sample, timeout=STALL_S)
            stamps.append(stamp)
    return stamps


def _sleep_until_put(start: Callable[[], None], name: str, wakes: int) -> list[int]:
    stamps = []
    with shmbus.Consumer(name) as consumer:
        start()
        for _ in range(wakes):
            groups = consumer.take(1, STALL_S)
            stamp = time.monotonic_ns()
            if not groups:
                raise MeasurementError(f"no group within {STALL_S:g} s: {consumer.stats()}")
            stamps.append(stamp)
            consumer.ack(groups)
    return stamps
