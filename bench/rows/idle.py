"""The cost of a consumer that waits on an empty bus."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Final

import shmbus
from bench.bounds import Beside, Bound
from bench.processes import run_alone
from bench.rows.row import Row
from bench.rows.targets import TARGETS
from bench.sending import temporary_bus
from bench.yardsticks import sleep_us

__all__ = ["SLEEPS", "beside_sleeps", "measure"]

#: Whoever goes off the processor and back on it pays a timed sleep at least.
SLEEPS: Final = Bound(name="as many timed sleeps", unit="us a second", sense="cost")
#: Seconds before the count: a thread of OpenBLAS, which NumPy has, spins for 8 ms when it begins.
SETTLE_S: Final = 0.3


def measure(seconds: float, capacity: str) -> Row:
    """Let a consumer sleep so long on an empty bus, and extrapolate its cost to a minute."""
    before = sleep_us()
    with temporary_bus(capacity) as name:
        cpu_s, slept_s, wakes = run_alone(_sleep, name, seconds)
    per_minute = cpu_s * 60 / slept_s
    return Row(
        name="idle",
        title=f"a consumer asleep for {slept_s:.1f} s",
        measured=f"{per_minute * 1000:.2f} ms of CPU a minute; "
        f"{wakes / slept_s:.1f} times a second off and on the processor",
        value=per_minute,
        target=TARGETS["idle"],
        bound=beside_sleeps(cpu_s, slept_s, wakes, (before, sleep_us())),
        figures={
            "cpu_seconds_a_minute": per_minute,
            "measured_cpu_s": cpu_s,
            "measured_s": slept_s,
            "voluntary_context_switches": wakes,
        },
    )


def beside_sleeps(
    cpu_s: float, slept_s: float, wakes: int, sleeps_us: tuple[float, float]
) -> Beside | None:
    """Set processor time beside that of as many timed sleeps, as measured before and behind it."""
    if wakes == 0 or cpu_s == 0.0:
        return None
    bounds = tuple(wakes / slept_s * one for one in sleeps_us)
    return Beside(bound=SLEEPS, values=(cpu_s / slept_s * 1e6,), bounds=(bounds,))


def _sleep(start: Callable[[], None], name: str, seconds: float) -> tuple[float, float, int]:
    with shmbus.Consumer(name) as consumer:
        consumer.take(timeout=0.0)
        start()
        time.sleep(SETTLE_S)
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        began, began_cpu = time.monotonic(), time.process_time()
        consumer.take(timeout=seconds)
        cpu_s, slept_s = time.process_time() - began_cpu, time.monotonic() - began
        return cpu_s, slept_s, resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches
