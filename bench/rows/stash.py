"""Cost of a trajectory in the stash with many open groups, beside the cost with few.

`Stash.add` alone, without a ring, in processor time. Each sample belongs to a random open group,
the worst case for caches. In the steady state every eighth sample completes a group and a new group
opens: timed adds and completions are the same at any size. Fresh samples with distinct ids precede
each timed call; leases and ends of ready groups lie between timed calls; the garbage collector is
off.
"""

import gc
import random
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from bench.levels import Level
from bench.processes import run_alone
from bench.row import Row
from bench.workload import GROUP_SIZE
from shmbus.base import limits
from shmbus.stash.stash import Stash

__all__ = ["Sample", "growth"]

#: Samples of a call: the batch of Consumer's reads from the ring.
BATCH: Final = limits.POLL_RECORDS
SEED: Final = 20240229


class Sample(msgspec.Struct, gc=False):
    """A stand-in for Trajectory, equally invisible to the garbage collector."""

    key: str
    group_size: int
    index: int
    need: int = GROUP_SIZE
    score: float = 0.0
    policy_version: int = 0
    nbytes: int = 0
    failed: bool = False
    meta: object = None
    committed_ns: int = 0


def growth(level: Level, capacity: str) -> Row:
    """Measure the cost with few and with many open groups, by turns."""
    few, many = level.stash_groups
    turns = [
        (run_alone(_add_ns, few, level.stash_adds), run_alone(_add_ns, many, level.stash_adds))
        for _ in range(level.repetitions)
    ]
    return Row(
        name="stash",
        title=f"stash of {many:,} open groups",
        unit="ns",
        values=tuple(ns for _, ns in turns),
        beside=f"of {few:,}",
        beside_values=tuple(ns for ns, _ in turns),
    )


def _arrivals(open_groups: int) -> Iterator[tuple[int, int]]:
    """Yield group number and index, beginning with groups of every level of completion."""
    generator = random.Random(SEED)
    # An eighth of the slots wait for the first sample of their next group.
    slots = open_groups * GROUP_SIZE // (GROUP_SIZE - 1)
    numbers = array("q", range(slots))
    levels = array("q", (number % GROUP_SIZE for number in numbers))
    for number in numbers:
        for index in range(levels[number]):
            yield number, index
    newest = slots
    while True:
        slot = int(generator.random() * slots)
        yield numbers[slot], levels[slot]
        levels[slot] += 1
        if levels[slot] == GROUP_SIZE:
            numbers[slot], levels[slot] = newest, 0
            newest += 1


def _add_ns(start: Callable[[], None], open_groups: int, adds: int) -> float:
    arrivals = _arrivals(open_groups)
    stash: Stash[Any] = Stash()
    gc.disable()
    start()
    # Fills the stash, and goes on until the table is worn at its final size.
    _feed(stash, arrivals, open_groups * (GROUP_SIZE // 2 + 1))
    seconds, added = _feed(stash, arrivals, adds)
    return seconds / added * 1e9


def _feed(stash: Stash[Any], arrivals: Iterator[tuple[int, int]], adds: int) -> tuple[float, int]:
    """Add so many samples; return the seconds in add, and the adds."""
    seconds, added = 0.0, 0
    while added < adds:
        samples = [
            Sample(f"prompt-{number}", GROUP_SIZE, index)
            for number, index in islice(arrivals, BATCH)
        ]
        began = time.process_time()
        stash.add(samples, 0.0)
        seconds += time.process_time() - began
        added += len(samples)
        for group in stash.lease(BATCH):
            stash.end_lease(group)
    assert not stash.discards
    return seconds, added
