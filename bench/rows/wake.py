"""Latency from put to a sleeping reader, beside a bare futex between two processes.

Both sides of the comparison sleep through the same random pauses, and take the same stamps by
CLOCK_MONOTONIC: right before the put (or the store and FUTEX_WAKE), and right after take (or
FUTEX_WAIT) returned. They take turns, so that a slow minute of the machine falls on both; a figure
is the median of the turns' percentiles.

A semaphore between two interpreters (`interpreters.py`) takes a turn too, with and without a load
beside: what the bus adds to it is the bus's own, and the rest is the kernel's and Python's.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import shmbus
from bench.bounds import Beside, Bound, interval, turns
from bench.native import PROGRAMS, CannotRun, compile_program, run
from bench.processes import STALL_S, MeasurementError, Role
from bench.rows import interpreters
from bench.rows.row import Row, Target
from bench.sending import temporary_bus
from bench.sizes import Sizes

__all__ = ["measure", "narrow", "pauses_ns", "put_after_pauses", "run_shmbus"]

#: Microseconds between two puts: long enough for the reader to be asleep again.
PAUSE_US: Final = (300.0, 1000.0)
#: The pauses are the same in every run of the benchmark.
SEED: Final = 20240229
#: Microseconds that the bus may add, at its p99, to the p99 of a bare wake-up.
ADDED_US: Final = 10.0
SOURCE: Final = PROGRAMS / "raw_futex.c"
#: A wake-up is no faster than the kernel's own.
SEMAPHORE: Final = Bound(name="a semaphore between two interpreters", unit="us", sense="cost")
FUTEX: Final = Bound(name="raw futex", unit="us", sense="cost")


def measure(sizes: Sizes, capacity: str) -> list[Row]:
    """Measure wake-ups in turns until both rows are narrow; one for p50 and one for p99."""
    pauses = pauses_ns(sizes)
    ours: list[NDArray[np.int64]] = []
    raw: list[NDArray[np.int64]] = []
    bare: list[NDArray[np.int64]] = []
    loaded: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    with tempfile.TemporaryDirectory(prefix="shmbus-bench-") as directory:
        program = Path(directory, "raw_futex")
        why_not = ""
        try:
            compile_program(SOURCE, program)
        except CannotRun as error:
            why_not = str(error)

        def rows() -> list[Row]:
            turned = list(zip(ours, bare, strict=True))
            return [
                *[_row(percent, ours, raw, why_not) for percent in (50, 99)],
                _added("wake-added-p99", "p99 of a wake-up", turned),
                _added("wake-loaded-p99", "p99 of a wake-up beside a load", loaded),
            ]

        for _ in turns(
            sizes.wake_turns, sizes.most_wake_turns, sizes.wakes_s, lambda: narrow(rows())
        ):
            if not why_not:
                said, _ = run([str(program)], "\n".join(map(str, pauses)))
                raw.append(np.array(said.split(), np.int64)[sizes.warm_up :])
            ours.append(run_shmbus(pauses, capacity)[sizes.warm_up :])
            bare.append(interpreters.measure(pauses)[sizes.warm_up :])
            under_load = run_shmbus(pauses, capacity, loaded=True)[sizes.warm_up :]
            beside = interpreters.measure(pauses, loaded=True)[sizes.warm_up :]
            loaded.append((under_load, beside))
        return rows()


def narrow(rows: Iterable[Row]) -> bool:
    """Whether no row needs a further turn."""
    return all(row.bound is None or row.bound.narrow for row in rows)


def pauses_ns(sizes: Sizes) -> list[int]:
    """Return the nanoseconds before each put, those of the warm-up first."""
    generator = random.Random(SEED)
    return [int(generator.uniform(*PAUSE_US) * 1000) for _ in range(sizes.warm_up + sizes.wakes)]


def _row(
    percent: int, ours: list[NDArray[np.int64]], raw: list[NDArray[np.int64]], why_not: str
) -> Row:
    ours_us = [float(np.percentile(turn, percent)) / 1000 for turn in ours]
    raw_us = [float(np.percentile(turn, percent)) / 1000 for turn in raw]
    middle = statistics.median(ours_us)
    bound = None
    if raw:
        bound = Beside(bound=FUTEX, values=tuple(ours_us), bounds=tuple((turn,) for turn in raw_us))
    return Row(
        name=f"wake-p{percent}",
        title=f"wake-up of a sleeping reader, one way, p{percent}",
        measured=f"{middle:.1f} us",
        value=statistics.median(bound.ratios) if bound else None,
        spread=interval(bound.ratios) if bound else None,
        bound=bound,
        target=Target("at most", 2.0, "times a raw futex"),
        skipped=f"raw futex: {why_not}" if why_not else "",
        figures={
            "wakes_by_turn": [len(turn) for turn in ours],
            "shmbus_us_by_turn": ours_us,
            "raw_futex_us_by_turn": raw_us,
        },
    )


def _added(name: str, what: str, turns: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Row:
    ours = [[float(np.percentile(turn, p)) / 1000 for p in (50, 99)] for turn, _ in turns]
    bare = [[float(np.percentile(turn, p)) / 1000 for p in (50, 99)] for _, turn in turns]
    added = [mine[1] - least[1] for mine, least in zip(ours, bare, strict=True)]
    return Row(
        name=name,
        title=f"{what}, added to a semaphore between two interpreters",
        measured=f"{statistics.median(mine[1] for mine in ours):.1f} us; semaphore "
        f"{statistics.median(least[1] for least in bare):.1f} us",
        value=statistics.median(added),
        spread=interval(added),
        bound=Beside(
            bound=SEMAPHORE,
            values=tuple(mine[1] for mine in ours),
            bounds=tuple((least[1],) for least in bare),
        ),
        target=Target("at most", ADDED_US, "us more"),
        figures={"shmbus_us_p50_p99_by_turn": ours, "semaphore_us_p50_p99_by_turn": bare},
    )


def run_shmbus(
    pauses: list[int],
    capacity: str,
    *,
    loaded: bool = False,
    beside: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> NDArray[np.int64]:
    """Return the nanoseconds from each put to take; `beside` serves the bus of that name."""
    with temporary_bus(capacity) as name, beside(name):
        roles = [
            Role(_sleep_until_put, (name, len(pauses))),
            Role(put_after_pauses, (name, pauses)),
        ]
        came, put = interpreters.beside_load(roles, loaded=loaded)
    return np.array(came, np.int64) - np.array(put, np.int64)


def put_after_pauses(
    start: Callable[[], None],
    name: str,
    pauses: list[int],
    cores: Collection[int] = (),
    awake: bool = False,
) -> list[int]:
    """Put a group of one after each pause; return the stamps from right before each put.

    They stay here: to set an item of an array takes an interpreter that just woke up as long as
    the half of a put, and is no part of it. With `cores`, the process keeps to those; `awake`, it
    counts the pauses out instead of sleeping through them.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    sample = np.zeros(1, np.int64)
    stamps = []
    with shmbus.Producer(name) as producer:
        start()
        for pause_ns in pauses:
            if awake:
                due = time.monotonic_ns() + pause_ns
                while time.monotonic_ns() < due:
                    pass
            else:
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
