"""Packing on several threads beside memcpy on as many: ``python -m bench.threads --output FILE``.

For a machine with many cores. Records of 2,048 tokens that no cache holds are packed by 1, 2, 4 and
more threads, as `pack_threads=` has it. Of a token 9 bytes are read and 25 written. The bound is
what as many threads read and write by memcpy, from memory to memory, in turns with the packing; a
batch is kept while the next one is made, as a trainer does it, so two blocks are written by turns.

Targets: four threads pack at least `OF_ONE` times what one does, and at its best packing reads and
writes at least `OF_MEMORY` of what memcpy does at its best.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench import command, fitness, machine
from bench.fitness import MEMORY, Need
from bench.rows.packed import PACKING_BYTES_PER_TOKEN
from bench.sending import bus_bytes, put_each, temporary_bus
from bench.workload import BYTES_PER_TOKEN, GROUP_SIZE, Workload
from shmbus import Consumer, Group, Producer
from shmbus._arguments import parse_size

__all__ = ["Line", "judged", "main", "table"]

TOKENS: Final = 2048
BATCHES: Final = (65_536, 262_144, 1_048_576)
THREADS: Final = (1, 2, 4, 8, 16)
CAPACITY: Final = "768MiB"
#: Of a record beside its arrays, at most.
HEAD_BYTES: Final = 256
#: No instance id comes twice in as many records.
MOST_RECORDS: Final = 65_536
#: Of each thread of memcpy, once as its source and once as its target.
MEMCPY_BYTES: Final = 256 << 20
TINY_BYTES: Final = 1 << 20
FOUR: Final = 4
OF_ONE: Final = 3.0
OF_MEMORY: Final = 0.7


@dataclass(frozen=True, kw_only=True)
class Line:
    """Packing by so many threads into batches of one size.

    Attributes
    ----------
    threads, tokens : int
        The threads, and the tokens of a batch.
    gb_per_s : float
        Bytes read and written a second: the median of the turns.
    turns : tuple of float
        Of each turn.
    batch_us : float
        Microseconds a batch.
    of_one : float
        Times what one thread packs: the median of the turns' ratios.
    memcpy_gb_per_s : float
        What as many threads read and write by memcpy: the median of the turns.
    """

    threads: int
    tokens: int
    gb_per_s: float
    turns: tuple[float, ...]
    batch_us: float
    of_one: float
    memcpy_gb_per_s: float


@command.orderly("threads")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; exit status 1 where nothing can be measured."""
    options = _parser().parse_args(argv)
    ring = parse_size(options.capacity)
    counts = sorted({1, *(options.threads or THREADS)})
    if command.lacks(["torch"], "threads", command.TRAIN):
        return 1
    processors = fitness.here().processors
    for count in [count for count in counts if count > max(1.0, processors)]:
        print(f"{count} threads: cannot be measured here: there are {processors:g} processors")
        counts.remove(count)
    copied = TINY_BYTES if options.tiny else MEMCPY_BYTES
    memory = MEMORY + counts[-1] * 2 * copied
    need = Need(shm_bytes=bus_bytes(options.capacity), memory_bytes=memory, less="--capacity")
    if command.refused(need, "threads"):
        return 1
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    room = _room(ring) * TOKENS
    sizes = [size for size in (BATCHES[:1] if options.tiny else BATCHES) if size <= room]
    if not sizes:
        print(f"threads: --capacity: expected one that holds a batch of {BATCHES[0]:,} tokens, got "
              f"{options.capacity}", file=sys.stderr)  # fmt: skip
        return 1
    turns = 1 if options.tiny else options.turns
    lines = _measure(options.capacity, counts, sizes, turns, copied)
    print(table(lines))
    print(fitness.TINY if options.tiny else judged(lines))
    result = {"machine": facts, "lines": [asdict(line) for line in lines]}
    return command.keep(options.output, result, "threads")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.threads", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--threads", type=command.at_least_one, action="append", metavar="N",
        help="so many, beside one; may be repeated (1, 2, 4, 8, 16)",
    )  # fmt: skip
    parser.add_argument("--turns", type=command.at_least_one, default=9, help="of each figure (9)")
    command.add_usual(parser, CAPACITY)
    return parser


def _measure(
    capacity: str, counts: list[int], sizes: Sequence[int], turns: int, copied: int
) -> list[Line]:
    with temporary_bus(capacity) as name, _Memcpy(counts[-1], copied) as memcpy:
        unit = max(sizes) // TOKENS
        count = _room(parse_size(capacity)) // unit * unit
        workload = Workload(trajectories=count, tokens=TOKENS, cold=True)
        with Producer(name) as producer, Consumer(name) as consumer:
            put_each(producer, workload.items(0), GROUP_SIZE)
            groups: list[Group] = []
            while len(groups) < workload.trajectories // GROUP_SIZE:
                groups += consumer.take(1024, 1.0)
            of_sizes = [_of_size(groups, counts, size, turns, memcpy) for size in sizes]
            consumer.ack(groups)
    return [*itertools.chain.from_iterable(of_sizes)]


def _room(ring: int) -> int:
    """Count the records that three quarters of a ring hold."""
    return min(ring * 3 // 4 // (TOKENS * BYTES_PER_TOKEN + HEAD_BYTES), MOST_RECORDS)


def _of_size(
    groups: list[Group], counts: list[int], size: int, turns: int, memcpy: _Memcpy
) -> list[Line]:
    from trainer_adapter.batches.memory import BatchMemory
    from trainer_adapter.batches.pack import HostPacker

    per_batch = size // TOKENS // GROUP_SIZE
    cuts = range(0, len(groups) - per_batch + 1, per_batch)
    batches = [groups[at : at + per_batch] for at in cuts]
    packers = {count: HostPacker(memory=BatchMemory(), pack_threads=count) for count in counts}
    packed: dict[int, list[float]] = {count: [] for count in counts}
    copied: dict[int, list[float]] = {count: [] for count in counts}
    try:
        for turn in range(-1, turns):
            for count in counts:
                seconds = _seconds(partial(_all_of, packers[count], batches))
                rate = len(batches) * size * PACKING_BYTES_PER_TOKEN / seconds
                copy = memcpy.rate(count)
                # The first turn touches the memory, and starts the threads.
                if turn >= 0:
                    packed[count].append(rate / 1e9)
                    copied[count].append(copy / 1e9)
    finally:
        for packer in packers.values():
            packer.close()
    return [
        Line(
            threads=count,
            tokens=size,
            gb_per_s=statistics.median(packed[count]),
            turns=tuple(packed[count]),
            batch_us=size * PACKING_BYTES_PER_TOKEN / statistics.median(packed[count]) / 1e3,
            of_one=statistics.median(
                several / one for several, one in zip(packed[count], packed[1], strict=True)
            ),
            memcpy_gb_per_s=statistics.median(copied[count]),
        )
        for count in counts
    ]


def _all_of(packer: Any, batches: list[list[Group]]) -> None:
    kept = None
    for batch in batches:
        kept = packer.pack(batch)  # the one before lives until this one is made
    del kept


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _Memcpy:
    """Copies by up to so many threads at once, each in memory of its own."""

    def __init__(self, threads: int, size: int) -> None:
        self._size = size
        self._threads = ThreadPoolExecutor(threads)
        self._memory = list(self._threads.map(self._touched, range(threads)))

    def _touched(self, _: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        return np.ones(self._size, np.uint8), np.ones(self._size, np.uint8)

    def _copy(self, pair: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> None:
        ctypes.memmove(pair[1].ctypes.data, pair[0].ctypes.data, self._size)

    def rate(self, threads: int) -> float:
        """Return the bytes that so many threads read and write a second."""
        pairs = self._memory[:threads]
        seconds = _seconds(lambda: [*self._threads.map(self._copy, pairs)].clear())
        return 2 * self._size * threads / seconds

    def __enter__(self) -> _Memcpy:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._memory.clear()


def judged(lines: Sequence[Line]) -> str:
    """Say for each size of a batch whether the targets are met."""
    told = []
    for size, grouped in itertools.groupby(lines, key=lambda line: line.tokens):
        of_size = list(grouped)
        best = max(of_size, key=lambda line: line.gb_per_s)
        memory = max(line.memcpy_gb_per_s for line in of_size)
        four = next((line for line in of_size if line.threads == FOUR), None)
        parts = [] if four is None else [
            f"four threads {four.of_one:.2f} times one ({_met(four.of_one >= OF_ONE)}: {OF_ONE:g})"
        ]  # fmt: skip
        share = best.gb_per_s / memory
        parts.append(
            f"at its best, with {best.threads}, {best.gb_per_s:.1f} GB/s, {share:.2f} of memcpy's "
            f"best {memory:.1f} ({_met(share >= OF_MEMORY)}: {OF_MEMORY:g})"
        )
        told.append(f"{size:,} tokens: " + "; ".join(parts))
    return "\n".join(told)


def _met(met: bool) -> str:
    return "met" if met else "not met"


def table(lines: Sequence[Line]) -> str:
    """Lay lines out as plain text, in columns of fixed width."""
    form = "{:>9}  {:>7}  {:>6}  {:>15}  {:>8}  {:>7}  {:>11}"
    heads = ("tokens", "threads", "GB/s", "lowest, highest", "us", "of one", "memcpy GB/s")
    told = [form.format(*heads)]
    for one in lines:
        told.append(
            form.format(
                f"{one.tokens:,}", one.threads, f"{one.gb_per_s:.1f}",
                f"{min(one.turns):.1f}, {max(one.turns):.1f}", f"{one.batch_us:,.0f}",
                f"{one.of_one:.2f}", f"{one.memcpy_gb_per_s:.1f}",
            )
        )  # fmt: skip
    return "\n".join(told)


if __name__ == "__main__":
    sys.exit(main())
