"""Latency from put to a polling reader, beside the ring alone.

Two stamps by CLOCK_MONOTONIC begin the way of a group of one: the producer's, right before `put`,
and the one that `put` leaves in the record's header right before it publishes it. The way ends when
``take(timeout=0)``, called again and again, has returned the group. ``c/ring_polled.c`` goes the
same way without an interpreter at either end. They take turns; a figure is the median of the turns'
percentiles. In both, each process keeps to a core of its own: a producer that wakes up on the core
of a reader that never sleeps waits for the scheduler, and not for the bus. A producer that has
slept finds its interpreter out of the caches; one that counts its pauses out (*awake*) does not.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import shmbus
from bench.bounds import Beside, Bound, interval, turns
from bench.failures import MeasurementError
from bench.native import PROGRAMS, CannotRun, compile_program, run
from bench.processes import STALL_S, Role, run_together
from bench.rows.row import Row
from bench.rows.targets import TARGETS
from bench.rows.wake import narrow, pauses_ns, put_after_pauses
from bench.sending import temporary_bus
from bench.sizes import Sizes

__all__ = ["measure", "run_shmbus"]

SOURCE: Final = PROGRAMS / "ring_polled.c"
#: Groups of a look: as many as a call without arguments asks for.
AT_ONCE: Final = 64
#: What is left of the way without an interpreter.
ALONE: Final = Bound(name="the ring alone, in C", unit="us", sense="cost")
#: Looks between two at the clock, and those that are timed while nothing comes.
LOOKS: Final = 4096

#: Nanoseconds of each way: from before the put, and from publication.
_Ways = NDArray[np.int64]


def measure(sizes: Sizes, capacity: str) -> list[Row]:
    """Measure ways in turns: a row from before the put, one from publication."""
    pauses = pauses_ns(sizes)
    ours: list[_Ways] = []
    awake: list[_Ways] = []
    ring: list[_Ways] = []
    looks_ns: list[float] = []
    with tempfile.TemporaryDirectory(prefix="shmbus-bench-") as directory:
        program = Path(directory, "ring_polled")
        why_not = ""
        try:
            compile_program(SOURCE, program, ("ring",))
        except CannotRun as error:
            why_not = str(error)

        def rows() -> list[Row]:
            look_us = statistics.median(looks_ns) / 1000
            return [
                _row(0, "polled", "from before put", ours, ring, look_us, why_not),
                _row(1, "polled-published", "from publication", ours, ring, look_us, why_not),
                _row(
                    0,
                    "polled-awake",
                    "from before put by a producer that does not sleep",
                    awake,
                    ring,
                    look_us,
                    why_not,
                ),
            ]

        for _ in turns(
            sizes.wake_turns, sizes.most_wake_turns, sizes.polls_s, lambda: narrow(rows())
        ):
            if not why_not:
                said, _ = run([str(program)], "\n".join(map(str, pauses)))
                ring.append(np.array(said.split(), np.int64).reshape(-1, 2)[sizes.warm_up :])
            ways, look_ns = run_shmbus(pauses, capacity)
            ours.append(ways[sizes.warm_up :])
            looks_ns.append(look_ns)
            awake.append(run_shmbus(pauses, capacity, awake=True)[0][sizes.warm_up :])
        return rows()


def _row(
    column: int,
    name: str,
    what: str,
    ours: list[_Ways],
    ring: list[_Ways],
    look_us: float,
    why_not: str,
) -> Row:
    def middle(turns: list[_Ways], percent: float) -> list[float]:
        return [float(np.percentile(turn[:, column], percent)) / 1000 for turn in turns]

    p50, p99 = middle(ours, 50), middle(ours, 99)
    alone = f"; the ring alone was not measured: {why_not}" if why_not else ""
    bound = None
    if ring:
        bounds = tuple((turn,) for turn in middle(ring, 50))
        bound = Beside(bound=ALONE, values=tuple(p50), bounds=bounds)
    return Row(
        name=f"{name}-p50",
        title=f"one way to a polling reader, {what} to take, p50",
        measured=f"{statistics.median(p50):.2f} us, p99 {statistics.median(p99):.2f} us; "
        f"a take that finds nothing {look_us:.2f} us{alone}",
        value=statistics.median(p50),
        spread=interval(p50),
        bound=bound,
        target=TARGETS[f"{name}-p50"],
        figures={
            "p50_us_by_turn": p50,
            "p99_us_by_turn": p99,
            "ring_p50_us_by_turn": middle(ring, 50),
            "ring_p99_us_by_turn": middle(ring, 99),
            "empty_take_us": look_us,
        },
    )


def run_shmbus(
    pauses: list[int],
    capacity: str,
    *,
    awake: bool = False,
    at_once: int = AT_ONCE,
    beside: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[_Ways, float]:
    """Return the nanoseconds of each way, and of a look.

    `beside` serves the bus of that name; the reader asks for up to `at_once` groups a look.
    """
    cores = os.sched_getaffinity(0)
    with temporary_bus(capacity) as name, beside(name):
        (came, look_ns), put = run_together(
            [
                Role(_poll, (name, len(pauses), {min(cores)}, at_once)),
                Role(put_after_pauses, (name, pauses, {max(cores)}, awake)),
            ]
        )
    stamps = np.array(came, np.int64)
    return stamps[:, :1] - np.stack([np.array(put, np.int64), stamps[:, 1]], 1), look_ns


def _poll(
    start: Callable[[], None],
    name: str,
    wanted: int,
    cores: Collection[int],
    at_once: int,
) -> tuple[list[tuple[int, int]], float]:
    """Return each group's stamps, taken and published, and the cost of a take that finds none."""
    os.sched_setaffinity(0, cores)
    stamps: list[tuple[int, int]] = []
    with shmbus.Consumer(name) as consumer:
        take = consumer.take
        # A whole look first: what the bus held at the attach is behind it.
        take(at_once, 0.0)
        began = time.monotonic_ns()
        for _ in range(LOOKS):
            take(at_once, 0.0)
        look_ns = (time.monotonic_ns() - began) / LOOKS
        start()
        deadline = time.monotonic() + STALL_S
        while len(stamps) < wanted:
            for _ in range(LOOKS):
                groups = take(at_once, 0.0)
                if groups:
                    came = time.monotonic_ns()
                    stamps += [(came, group[0].committed_ns) for group in groups]
                    consumer.ack(groups)
                    deadline = time.monotonic() + STALL_S
                    if len(stamps) == wanted:
                        break
            if time.monotonic() > deadline:
                raise MeasurementError(f"no group within {STALL_S:g} s: {consumer.stats()}")
    return stamps, look_ns
