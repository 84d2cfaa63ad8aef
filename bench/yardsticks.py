"""The bounds that rows are near, each measured by itself: what is left of a row at its best.

Memory: a copy from memory to memory by one core and by two, one within a core's cache, one of many
arrays from memory into such a cache, and one over so many bytes of shared memory. Calls: the
producer's loop around a call that does nothing, an object through Python's own queue, a system
call, a sleep. A yardstick is measured in processes of its own, in the unit of its `Bound`.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.bounds import Bound
from bench.processes import Role, run_alone, run_together
from bench.sending import put_batches
from bench.workload import Workload

__all__ = [
    "BOTH_CORES",
    "COLUMNS",
    "MEMCPY",
    "Yardstick",
    "both_cores",
    "columns",
    "from_cache",
    "from_memory",
    "memcpy",
    "over",
    "python_calls",
    "queue_us",
    "sleep_us",
    "syscall_us",
]

MEMCPY: Final = Bound(name="memcpy, one core", unit="GB/s")
BOTH_CORES: Final = Bound(name="what two cores read and write", unit="GB/s")
COLUMNS: Final = Bound(name="a batch's columns by one core, in C", unit="GB/s")
PYTHON_CALLS: Final = Bound(name="the producer's loop alone", unit="trajectories/s")
#: Targets that a core's own cache holds, and how often they are filled for one figure.
CACHED_BYTES: Final = 512 << 10
FILLS: Final = 200
#: At least so many are copied for one figure of `over`.
OVER_BYTES: Final = 256 << 20
#: Bytes a token of each array: tokens, loss_mask, logprobs.
ARRAYS: Final = (4, 1, 4)
#: Tokens of a batch of `columns`, and of a sequence.
COLUMN_TOKENS: Final = 65_536
ROW_TOKENS: Final = 2048
#: Of a yardstick of calls: one turn, and turns, of which the median counts.
CALLS: Final = 1000
TURNS: Final = 9
#: Short, so that a hundred of them are soon over; the processor time of a sleep is not its length.
SLEEP_S: Final = 0.002
SLEEPS: Final = 40


@dataclass(frozen=True)
class Yardstick:
    """A bound, and what measures it in its unit."""

    bound: Bound
    measure: Callable[[], float]


def memcpy(size: int, repetitions: int) -> Yardstick:
    """Copy `size` bytes from memory to memory, by one core, so many times."""
    return Yardstick(MEMCPY, lambda: float(run_alone(_copy, size, repetitions)) / 1e9)


def both_cores(size: int, repetitions: int) -> Yardstick:
    """Read and write `size` bytes each, by two cores at the same time."""

    def measure() -> float:
        rates: list[float] = run_together([Role(_copy, (size, repetitions)) for _ in range(2)])
        return 2 * sum(rates) / 1e9

    return Yardstick(BOTH_CORES, measure)


def from_cache(item: int, repetitions: int) -> Yardstick:
    """Copy `item` bytes again and again, source and targets in a cache of one core."""
    bound = Bound(name=f"copies of {item >> 10} KiB within one core's cache", unit="GB/s")
    return Yardstick(bound, lambda: float(run_alone(_fill, item, repetitions)) / 1e9)


def from_memory(tokens: int, size: int, repetitions: int) -> Yardstick:
    """Copy the arrays of trajectories, `size` bytes of them, from memory into one core's cache.

    By loops in C, a call for many trajectories: what is left of a put where its source is cold.
    """
    bound = Bound(name=f"copies of {tokens:,} tokens' arrays from memory, in C", unit="GB/s")
    return Yardstick(bound, lambda: float(run_alone(_gather, tokens, size, repetitions)) / 1e9)


def columns(size: int, repetitions: int) -> Yardstick:
    """Make the columns of batches from `size` bytes of arrays in memory, by one core without a bus.

    By loops in C, one a column: 9 bytes a token are read, and 25 written. So it is what packing is
    without records, groups and batches around it.
    """
    return Yardstick(COLUMNS, lambda: float(run_alone(_columns, size, repetitions)) / 1e9)


def over(item: int, distance: int, repetitions: int) -> Yardstick:
    """Copy `item` bytes again and again, to one place after the other of `distance` shared ones."""
    name = f"copies of {item >> 10:,} KiB over {distance >> 10:,} KiB of shared memory"
    bound = Bound(name=name, unit="GB/s")
    return Yardstick(bound, lambda: float(run_alone(_go_over, item, distance, repetitions)) / 1e9)


def python_calls(workload: Workload) -> Yardstick:
    """Go through a workload as its producer does, with calls that do nothing."""
    return Yardstick(PYTHON_CALLS, lambda: float(run_alone(_loop, workload)))


def queue_us() -> float:
    """Return the microseconds of a dict into Python's own queue and out again, in one process."""
    return float(run_alone(_through_queue))


def syscall_us() -> float:
    """Return the microseconds of a send and a receive over a Unix socket, in one process."""
    return float(run_alone(_through_socket))


def sleep_us() -> float:
    """Return the processor microseconds of a timed sleep: off the processor and back on it."""
    return float(run_alone(_sleep))


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


def _fill(start: Callable[[], None], item: int, repetitions: int) -> float:
    source = np.ones(item, np.uint8)
    target = np.ones((max(1, CACHED_BYTES // item), item), np.uint8)
    start()
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        for _ in range(FILLS):
            # One call for all targets, since a call each would be a part of what is measured.
            target[:] = source
        seconds.append((time.perf_counter() - began) / FILLS)
    return target.nbytes / statistics.median(seconds)


def _gather(start: Callable[[], None], tokens: int, size: int, repetitions: int) -> float:
    widths = [array_bytes * tokens for array_bytes in ARRAYS]
    count = max(1, size // sum(widths))
    at_once = min(count, max(1, CACHED_BYTES // sum(widths)))
    # In small pages, as what a process allocates for one trajectory after the other lies there.
    sources = [
        np.frombuffer(mmap.mmap(-1, count * width), np.uint8).reshape(count, width)
        for width in widths
    ]
    targets = [np.ones((at_once, width), np.uint8) for width in widths]
    for source in sources:
        source[:] = 1
    rows = np.arange(count)
    start()
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        for first in range(0, count - at_once + 1, at_once):
            chosen = rows[first : first + at_once]
            for source, target in zip(sources, targets, strict=True):
                # Not "raise", which copies into memory of its own first.
                np.take(source, chosen, axis=0, out=target, mode="clip")
        seconds.append(time.perf_counter() - began)
    return (count // at_once * at_once) * sum(widths) / statistics.median(seconds)


def _columns(start: Callable[[], None], size: int, repetitions: int) -> float:
    count = max(1, size // (sum(ARRAYS) * COLUMN_TOKENS))
    tokens = np.ones((count, COLUMN_TOKENS), np.int32)
    masks = np.ones((count, COLUMN_TOKENS), np.uint8)
    logprobs = np.ones((count, COLUMN_TOKENS), np.float32)
    ramp = np.arange(ROW_TOKENS, dtype=np.int64)
    # Two by turns: a trainer has one batch while the next one is made.
    batches = [
        [np.ones(COLUMN_TOKENS, dtype) for dtype in ("i8", "i8", "?", "f4", "f4")] for _ in range(2)
    ]
    start()
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        for number in range(count):
            to_tokens, to_positions, to_mask, to_logprobs, to_advantages = batches[number % 2]
            to_tokens[:] = tokens[number]
            to_positions.reshape(-1, ROW_TOKENS)[:] = ramp
            np.not_equal(masks[number], 0, out=to_mask)
            to_logprobs[:] = logprobs[number]
            to_advantages[:] = 0.5
        seconds.append(time.perf_counter() - began)
    moved = sum(ARRAYS) + sum(column.itemsize for column in batches[0])
    return count * COLUMN_TOKENS * moved / statistics.median(seconds)


def _go_over(start: Callable[[], None], item: int, distance: int, repetitions: int) -> float:
    source = np.ones(item, np.uint8)
    places = max(2, distance // item)
    memory = mmap.mmap(-1, places * item, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    target = np.frombuffer(memory, np.uint8).reshape(places, item)
    target[:] = 1
    start()
    seconds = []
    for _ in range(max(repetitions, OVER_BYTES // target.nbytes)):
        began = time.perf_counter()
        # One call for many places, as in `_fill`.
        target[:] = source
        seconds.append(time.perf_counter() - began)
    return target.nbytes / statistics.median(seconds)


def _nowhere(items: list[dict[str, Any]], timeout: float) -> None:
    """In the place of a producer's put_many: takes everything, and does nothing."""


def _loop(start: Callable[[], None], workload: Workload) -> float:
    items = workload.items(0)
    start()
    began = time.perf_counter()
    put_batches(_nowhere, items, workload)
    return workload.share / (time.perf_counter() - began)


def _turns(start: Callable[[], None], call: Callable[[], object]) -> float:
    call()
    start()
    us = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        us.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(us)


def _through_queue(start: Callable[[], None]) -> float:
    one: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def call() -> object:
        one.put({"instance_id": "a", "index": 0})
        return one.get()

    return _turns(start, call)


def _through_socket(start: Callable[[], None]) -> float:
    here, there = socket.socketpair()
    message = bytes(64)

    def call() -> object:
        here.send(message)
        return there.recv(64)

    with here, there:
        return _turns(start, call)


def _sleep(start: Callable[[], None]) -> float:
    time.sleep(SLEEP_S)
    start()
    us = []
    for _ in range(TURNS):
        began = time.process_time()
        for _ in range(SLEEPS):
            time.sleep(SLEEP_S)
        us.append((time.process_time() - began) / SLEEPS * 1e6)
    return statistics.median(us)
