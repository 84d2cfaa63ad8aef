"""What the stash costs: time a trajectory with few and with many open groups, and memory.

Time: `Stash.add` alone, without a ring, on samples that hold what the stash asks of them. Groups
stay open because the samples of one group arrive far apart; in the steady state each eighth sample
completes a group and another opens one, so that the number of open groups, and the adds and the
completions among those timed, are the same at any size. Two orders of arrival:

- by age: eight fronts pass over the groups, one behind the other, and each brings one index;
- scrambled: each sample belongs to a random one of the open groups, which is the worst for caches.

Samples are made right before they are added, as the reader makes them, each with an id of its own.
Ready groups are leased and ended between the timed calls. The garbage collector is off then,
since it is chance whether a collection falls into a timed call; what one takes over the full stash
is measured afterwards, and stands beside the cost of adding. The clock is processor time.

Memory: real trajectories from a ring, in groups that lack their last sample, so that all stay.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

import msgspec

from bench.bounds import Beside, Bound, interval
from bench.processes import run_alone
from bench.rows.row import Row
from bench.rows.targets import TARGETS
from bench.workload import GROUP_SIZE
from shmbus import limits
from shmbus.stash.stash import Stash

__all__ = ["Sample", "groups_of", "measure"]

Order: TypeAlias = Literal["by age", "scrambled"]

#: Samples of one call: as many as Consumer takes from the ring at a time.
BATCH: Final = limits.POLL_RECORDS
#: Parts of the timed adds. Their median is the figure, and the slowest stands beside it: the table
#: sweeps or grows the ages of its groups once in many adds (some 2 ns of each), which a mean of
#: fewer adds than that would count as a tenth or a half of the whole, or not at all.
PARTS: Final = 9
SEED: Final = 20240229
FEW: Final = Bound(name="the cost with few", unit="ns", sense="cost")


class Sample(msgspec.Struct, gc=False):
    """A stand-in for Trajectory; like it, one that the garbage collector does not visit."""

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


def measure(groups: tuple[int, int], adds: int) -> list[Row]:
    """Measure the cost with few and with many open groups; a row for each order of arrival."""
    orders: tuple[Order, ...] = ("by age", "scrambled")
    return [_row(order, groups, adds) for order in orders]


def groups_of(row: Row) -> tuple[int, int] | None:
    """Return how many open groups a row compares, few and many; None for a row of another kind."""
    found: tuple[int, int] | None = row.figures.get("groups")
    return found if row.name in ("stash-by-age", "stash-scrambled") else None


def _row(order: Order, groups: tuple[int, int], adds: int) -> Row:
    before, many, after = (
        run_alone(_time_adds, order, count, adds) for count in (groups[0], groups[1], groups[0])
    )
    few_ns = (before["ns"] + after["ns"]) / 2
    bound = Beside(bound=FEW, values=(many["ns"],), bounds=((before["ns"], after["ns"]),))
    parts = [ns / few_ns for ns in many["ns_by_part"]]
    name = f"stash-{order.replace(' ', '-')}"
    return Row(
        name=name,
        title=f"stash, {groups[1]:,} open groups against {groups[0]:,}, arrivals {order}",
        measured=f"{many['ns']:.0f} ns a trajectory against {few_ns:.0f}, in the slowest of "
        f"{PARTS} parts {max(many['ns_by_part']):.0f}; "
        f"a full garbage collection {many['full_collection_ms']:.0f} ms",
        value=many["ns"] / few_ns,
        spread=interval(parts),
        bound=bound,
        target=TARGETS[name],
        figures={
            "groups": groups,
            "few": {**before, "ns": few_ns},
            "few_after": after,
            "many": many,
        },
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
    # Arrays, which a garbage collection does not go through as it would through lists of millions:
    # what it takes is the stash's.
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


def _time_adds(
    start: Callable[[], None], order: Order, open_groups: int, adds: int
) -> dict[str, Any]:
    arrivals = (_by_age if order == "by age" else _scrambled)(open_groups)
    stash: Stash[Sample] = Stash()
    gc.disable()
    start()
    # Fills the stash, and goes on until the dict has been used for a while at its final size.
    _feed(stash, arrivals, open_groups * (GROUP_SIZE // 2 + 1))
    parts = [_feed(stash, arrivals, adds // PARTS) for _ in range(PARTS)]
    seconds, added, completed = (list(column) for column in zip(*parts, strict=True))
    ns_by_part = [s / n * 1e9 for s, n in zip(seconds, added, strict=True)]
    began = time.process_time()
    gc.collect()
    return {
        "open_groups": stash.open_groups,
        "stashed": stash.open_records,
        "adds": sum(added),
        "completions": sum(completed),
        "ns": statistics.median(ns_by_part),
        "ns_by_part": ns_by_part,
        "full_collection_ms": (time.process_time() - began) * 1e3,
    }


def _feed(
    stash: Stash[Sample], arrivals: Iterator[tuple[int, int]], adds: int
) -> tuple[float, int, int]:
    """Add so many samples; return the seconds in add, the adds and the completions."""
    seconds = 0.0
    added = completed = 0
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
            completed += 1
    assert not stash.discards
    return seconds, added, completed
