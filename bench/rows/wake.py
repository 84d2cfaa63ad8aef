"""Latency from put to a sleeping reader, beside a bare futex between two processes.

Both sides of the comparison sleep through the same random pauses, and take the same stamps by
CLOCK_MONOTONIC: right before the put (or the store and FUTEX_WAKE), and right after take (or
FUTEX_WAIT) returned. They take turns, so that a slow minute of the machine falls on both. The p50
is the median of the turns'.

A semaphore between two interpreters (`interpreters.py`) takes a turn too, with and without a load
beside: what the bus adds to it is the bus's own, and the rest is the kernel's and Python's.

A p99 is that of a block of consecutive wake-ups (batch quantiles: Seila, Management Science 28(5),
1982); a figure is the median over all blocks. One stall of the host then spoils one block and not a
turn. What is judged is the difference of two blocks of one turn, by the sign test's interval of its
median: there is a verdict where that whole interval lies on one side of the target. How far the
bound itself moved decides nothing here, since the p99 of so few wake-ups moves by more than a tenth
on any machine: with n of them and an exponential tail of mean s, its standard error is
sqrt(99 / n) s, which is 0.44 s for 500.
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
from bench.failures import MeasurementError
from bench.native import PROGRAMS, CannotRun, compile_program, run
from bench.processes import STALL_S, Role
from bench.rows import interpreters
from bench.rows.row import Row
from bench.rows.targets import TARGETS
from bench.sending import temporary_bus
from bench.sizes import Sizes

__all__ = [
    "BLOCK",
    "SEMAPHORE",
    "blocks",
    "measure",
    "narrow",
    "pauses_ns",
    "put_after_pauses",
    "run_shmbus",
]

#: Microseconds between two puts: long enough for the reader to be asleep again.
PAUSE_US: Final = (300.0, 1000.0)
#: The pauses are the same in every run of the benchmark.
SEED: Final = 20240229
#: Wake-ups of which a p99 is taken: five lie above it. More would be fewer blocks in the same time.
BLOCK: Final = 500
SOURCE: Final = PROGRAMS / "raw_futex.c"
#: A wake-up is no faster than the kernel's own.
SEMAPHORE: Final = Bound(name="a semaphore between two interpreters", unit="us", sense="cost")
FUTEX: Final = Bound(name="raw futex", unit="us", sense="cost")


def measure(sizes: Sizes, capacity: str) -> list[Row]:
    """Measure wake-ups in turns, until all rows are narrow or time is over."""
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
            turned = zip(ours, bare, strict=True)
            # None, where there is no compiler.
            alone = zip(ours, raw, strict=False)
            return [
                _middle(ours, raw, why_not),
                _added("wake-p99", "p99 of a wake-up", alone, FUTEX, why_not),
                _added("wake-added-p99", "p99 of a wake-up", turned, SEMAPHORE),
                _added("wake-loaded-p99", "p99 of a wake-up beside a load", loaded, SEMAPHORE),
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


def _middle(ours: list[NDArray[np.int64]], raw: list[NDArray[np.int64]], why_not: str) -> Row:
    ours_us = [float(np.median(turn)) / 1000 for turn in ours]
    raw_us = [float(np.median(turn)) / 1000 for turn in raw]
    bound = None
    if raw:
        bound = Beside(bound=FUTEX, values=tuple(ours_us), bounds=tuple((turn,) for turn in raw_us))
    return Row(
        name="wake-p50",
        title="wake-up of a sleeping reader, one way, p50",
        measured=f"{statistics.median(ours_us):.1f} us",
        value=statistics.median(bound.ratios) if bound else None,
        spread=interval(bound.ratios) if bound else None,
        bound=bound,
        target=TARGETS["wake-p50"],
        skipped=f"raw futex: {why_not}" if why_not else "",
        figures={
            "wakes_by_turn": [len(turn) for turn in ours],
            "shmbus_us_by_turn": ours_us,
            "raw_futex_us_by_turn": raw_us,
        },
    )


def blocks(turn: NDArray[np.int64]) -> list[float]:
    """Return the p99 of each block of a turn, in microseconds."""
    parts = np.array_split(turn, max(1, len(turn) // BLOCK))
    return [float(np.percentile(part, 99)) / 1000 for part in parts]


def _added(
    name: str,
    what: str,
    turns: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
    bound: Bound,
    why_not: str = "",
) -> Row:
    """Judge what the p99 of ours takes more than that of the bound in the same turn."""
    title = f"{what}, added to {bound.name}"
    pairs = [pair for ours, bare in turns for pair in zip(blocks(ours), blocks(bare), strict=True)]
    if not pairs:
        return Row(name=name, title=title, measured="", target=TARGETS[name], skipped=why_not)
    ours_us, bare_us = (tuple(each) for each in zip(*pairs, strict=True))
    added = [mine - least for mine, least in pairs]
    return Row(
        name=name,
        title=title,
        measured=f"{statistics.median(ours_us):.1f} us; {bound.name} "
        f"{statistics.median(bare_us):.1f} us",
        value=statistics.median(added),
        spread=interval(added),
        bound=Beside(bound=bound, values=ours_us, bounds=tuple((least,) for least in bare_us)),
        difference=True,
        target=TARGETS[name],
        figures={"shmbus_us_by_block": ours_us, "bound_us_by_block": bare_us, "block": BLOCK},
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
