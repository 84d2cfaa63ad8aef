"""What the stash costs: time a trajectory with few and with many open groups, and memory.

Time: `Stash.add` alone, without a ring, on samples that hold what the stash asks of them. Groups
stay open because the samples of one group arrive far apart; in the steady state each eighth sample
completes a group and another opens one, so that the number of open groups, and the adds and the
completions among those timed, are the same at any size. Two orders of arrival:

- by age: eight fronts pass over the groups, one behind the other, and each brings one index;
- scrambled: each sample belongs to a random one of the open groups, which is the worst for caches.

Samples are made right before they are added, as the reader makes them, each with an id of its own.
Ready groups are leased and ended between the timed calls. The garbage collector runs as it does
anywhere else; how much of the time was its is in the JSON. The clock is processor time.

Memory: real trajectories from a ring, in groups that lack their last sample, so that all stay.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

import msgspec

from bench.processes import run_alone
from bench.rows import Row, Target
from bench.workload import GROUP_SIZE
from shmbus.stash import Stash

__all__ = ["measure"]

Order: TypeAlias = Literal["by age", "scrambled"]

#: Samples of one call: as many as Consumer takes from the ring at a time.
BATCH: Final = 2048
#: Parts of the timed adds, to show how much the figure varies.
PARTS: Final = 5
SEED: Final = 20240229


class _Sample(msgspec.Struct, gc=False):
    """As a Trajectory is to the stash: the collector does not look at those either."""

    key: str
    group_size: int
    index: int
    score: float = 0.0
    policy_version: int = 0
    nbytes: int = 0


def measure(groups: tuple[int, int], adds: int) -> list[Row]:
    """Measure the cost with few and with many open groups; a row for each order of arrival."""
    orders: tuple[Order, ...] = ("by age", "scrambled")
    return [_row(order, groups, adds) for order in orders]


def _row(order: Order, groups: tuple[int, int], adds: int) -> Row:
    few, many = (run_alone(_time_adds, order, count, adds) for count in groups)
    return Row(
        name=f"stash-{order.replace(' ', '-')}",
        title=f"stash, {groups[1]:,} open groups against {groups[0]:,}, arrivals {order}",
        measured=f"{many['ns']:.0f} ns a trajectory against {few['ns']:.0f} ns",
        value=many["ns"] / few["ns"],
        spread=(
            min(many["ns_by_part"]) / statistics.median(few["ns_by_part"]),
            max(many["ns_by_part"]) / statistics.median(few["ns_by_part"]),
        ),
        target=Target("at most", 1.3, "times the cost with few"),
        figures={"few": few, "many": many},
    )


def _by_age(open_groups: int) -> Iterator[tuple[int, int]]:
    """Yield group number and index; the fronts of two indices are `distance` groups apart."""
    distance = -(-open_groups // (GROUP_SIZE - 1))
    newest = 0
    while True:
        for index in range(GROUP_SIZE):
            number = newest - index * distance
            if number >= 0:
                yield number, index
        newest += 1


def _scrambled(open_groups: int) -> Iterator[tuple[int, int]]:
    """Yield group number and index, beginning with groups of every level of completion."""
    generator = random.Random(SEED)
    # One slot in eight waits for the first sample of its next group.
    slots = open_groups * GROUP_SIZE // (GROUP_SIZE - 1)
    numbers = list(range(slots))
    levels = [number % GROUP_SIZE for number in numbers]
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


class _CollectorClock:
    """Processor time that the garbage collector takes while `Stash.add` runs."""

    def __init__(self) -> None:
        self.counting = False
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.process_time()
        elif self.counting:
            self.seconds += time.process_time() - self._began


def _time_adds(
    start: Callable[[], None], order: Order, open_groups: int, adds: int
) -> dict[str, Any]:
    arrivals = (_by_age if order == "by age" else _scrambled)(open_groups)
    stash: Stash[_Sample] = Stash()
    collector = _CollectorClock()
    start()
    # Fills the stash, and goes on until the dict has been used for a while at its final size.
    _feed(stash, arrivals, open_groups * (GROUP_SIZE // 2 + 1), collector)
    collector.seconds = 0.0
    parts = [_feed(stash, arrivals, adds // PARTS, collector) for _ in range(PARTS)]
    seconds, added, completed, slowest = (list(column) for column in zip(*parts, strict=True))
    return {
        "open_groups": stash.open_groups,
        "stashed": stash.open_records,
        "adds": sum(added),
        "completions": sum(completed),
        "ns": sum(seconds) / sum(added) * 1e9,
        "ns_by_part": [s / n * 1e9 for s, n in zip(seconds, added, strict=True)],
        "ns_of_collector": collector.seconds / sum(added) * 1e9,
        "slowest_call_ms": max(slowest) * 1e3,
    }


def _feed(
    stash: Stash[_Sample],
    arrivals: Iterator[tuple[int, int]],
    adds: int,
    collector: _CollectorClock,
) -> tuple[float, int, int, float]:
    """Add so many samples; return the seconds in add, adds, completions, and the slowest call."""
    seconds = slowest = 0.0
    added = completed = 0
    while added < adds:
        samples = [
            _Sample(f"prompt-{number}", GROUP_SIZE, index)
            for number, index in islice(arrivals, BATCH)
        ]
        collector.counting = True
        began = time.process_time()
        stash.add(samples, 0.0)
        took = time.process_time() - began
        collector.counting = False
        seconds += took
        slowest = max(slowest, took)
        added += len(samples)
        for group in stash.lease(BATCH):
            stash.end_lease(group)
            completed += 1
    assert not stash.discards
    return seconds, added, completed, slowest
