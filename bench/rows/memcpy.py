"""The yardstick: what one core copies in a second, streaming from memory to memory.

Ratios "of memcpy" in this benchmark are bytes of trajectories a second over this figure. It is
measured in a process of its own, before and after everything else.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np

from bench.processes import run_alone

__all__ = ["measure"]


def measure(size: int, repetitions: int) -> float:
    """Copy `size` bytes so many times, and return the median rate in bytes a second."""
    rate: float = run_alone(_copy, size, repetitions)
    return rate


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
