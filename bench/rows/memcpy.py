"""The yardstick: what one core copies in a second, streaming from memory to memory.

Ratios "of memcpy" in this benchmark are bytes of trajectories a second over this figure. It is
measured in a process of its own, before and after everything else.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from bench.processes import Role, run_alone, run_together

__all__ = ["measure", "measure_both"]


def measure(size: int, repetitions: int) -> float:
    """Copy `size` bytes so many times, and return the median rate in bytes a second."""
    rate: float = run_alone(_copy, size, repetitions)
    return rate


def measure_both(size: int, repetitions: int) -> float | None:
    """Copy in two processes at the same time, `size` bytes each.

    Parameters
    ----------
    size : int
        Bytes of a copy.
    repetitions : int

    Returns
    -------
    float or None
        Bytes read and written a second by both together; None with one processor, where they would
        take turns.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return None
    rates: list[float] = run_together([Role(_copy, (size, repetitions)) for _ in range(2)])
    return 2 * sum(rates)


def _copy(start: Callable[[], None], size: int, repetitions: int) -> float:
    # Written to, so that every page is there and is its own before the clock starts.
    source = np.ones(size, np.uint8)
    target = np.ones(size, np.uint8)
    start()
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, size)
        seconds.append(time.perf_counter() - began)
    return size / statistics.median(seconds)
