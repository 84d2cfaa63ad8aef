"""The benchmark: ``python -m bench.run`` measures every row on this machine and prints one table.

All rows of a table come from one run. Progress goes to stderr, the table to stdout. Exit status: 0
if what this machine can measure was measured, whether or not targets are met; 1 if something
failed, or nothing could be measured; 2 for wrong usage. What cannot be measured here says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bench import command, fitness, machine, yardsticks
from bench.fitness import MEMORY, TWO, Here, Need
from bench.processes import use_template
from bench.rows import (
    daemon,
    idle,
    lists,
    polled,
    requests,
    stash,
    stash_memory,
    throughput,
    wake,
)
from bench.rows.row import Row, table
from bench.rows.throughput import Case, Runs
from bench.sending import bus_bytes
from bench.sizes import FULL, QUICK, TINY, Sizes

__all__ = ["DEFAULT_CAPACITY", "NAMES", "TEMPLATE_MODULES", "main", "measure", "notes"]

NAMES: Final = (
    "hop-2048",
    "hop-2048-cold",
    "hop-16384",
    "hop-16384-cold",
    "hop-256",
    "packed",
    "packed-cold",
    "four-producers",
    "wake",
    "polled",
    "lists",
    "requests",
    "stash",
    "stash-memory",
    "idle",
    "daemon",
)
DEFAULT_CAPACITY: Final = "64MiB"
FORMAT: Final = 1
#: What most processes of a run import, the slow ones.
TEMPLATE_MODULES: Final = ("torch", "trainer_adapter", "bench.run")
NO_TORCH: Final = f"there is no torch here; {command.TRAIN}"


@command.orderly("bench")
def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    options = _parser().parse_args(argv)
    sizes = TINY if options.tiny else QUICK if options.quick else FULL
    if options.tiny:
        use_template(*TEMPLATE_MODULES)
    if options.repetitions:
        wanted = options.repetitions
        sizes = dataclasses.replace(sizes, repetitions=wanted, most_repetitions=wanted)
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    rows = measure(options.only or list(NAMES), sizes, options.capacity, _say)
    print(f"\n{table(rows)}")
    print("".join(f"\n{note}" for note in notes(rows, tiny=options.tiny)), end="")
    result = {
        "format": FORMAT,
        "machine": facts,
        "settings": dataclasses.asdict(sizes) | {"capacity": options.capacity},
        "rows": [row.as_json() for row in rows],
    }
    if status := command.keep(options.output, result, "bench"):
        return status
    return command.nothing("bench") if all(row.skipped for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run",
        description="Measure shmbus on this machine; close other work first.",
        epilog="example: python -m bench.run --quick --only hop-2048 --output figures.json",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="less of everything: three minutes")
    size.add_argument(
        "--tiny", action="store_true", help="only see that each row runs; its figures mean nothing"
    )
    parser.add_argument(
        "--only", action="append", choices=NAMES, metavar="NAME",
        help=f"measure this, and what it is compared with; may be repeated: {', '.join(NAMES)}",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=command.file, metavar="PATH", help="write the figures as JSON"
    )
    parser.add_argument(
        "--capacity", type=command.capacity, default=DEFAULT_CAPACITY, metavar="SIZE",
        help=f"of the bus in all rows but stash-memory (default {DEFAULT_CAPACITY})",
    )  # fmt: skip
    parser.add_argument(
        "--repetitions",
        type=command.at_least_one,
        metavar="N",
        help="runs of each throughput row (default: 3, and more until narrow)",
    )
    return parser


def _say(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Family:
    """Rows that are measured together."""

    name: str
    title: str
    need: Need
    measure: Callable[[], list[Row]]


def measure(
    names: Sequence[str],
    sizes: Sizes,
    capacity: str,
    say: Callable[[str], None],
    found: Here | None = None,
) -> list[Row]:
    """Measure the rows of these names, and say of each that cannot be measured why not."""
    found = found or fitness.here()
    rows: list[Row] = []
    chosen: list[Case] = []
    skipped: list[Row] = []
    for case in throughput.cases(sizes, capacity):
        if case.name in names:
            why = fitness.why_not(case.need, found)
            if not why and case.name.startswith("packed") and not _has_torch():
                why = NO_TORCH
            if why:
                skipped.append(_skipped(case.name, case.title, why))
            else:
                chosen.append(case)
    if chosen:
        runs = throughput.repeat(chosen, sizes, say)
        row = memcpy_row(runs.values(), sizes)
        rows += [row] if row else []
        rows += throughput.rows(chosen, runs)
    rows += skipped
    for family in _families(sizes, capacity, say):
        if family.name in names:
            if why := fitness.why_not(family.need, found):
                rows.append(_skipped(family.name, family.title, why))
                continue
            say(family.title)
            began = time.monotonic()
            with fitness.Watch() as watch:
                first, *rest = family.measure()
            took_s = time.monotonic() - began
            rows.append(dataclasses.replace(first, others=watch.others, took_s=took_s))
            rows += [dataclasses.replace(row, others=watch.others) for row in rest]
    return rows


def _families(sizes: Sizes, capacity: str, say: Callable[[str], None]) -> list[_Family]:
    one = Need(shm_bytes=bus_bytes(capacity), less="--capacity")
    two = dataclasses.replace(one, processors=TWO)
    # A group of the stash with its samples takes about a kilobyte.
    many = Need(memory_bytes=MEMORY + (sizes.stash_groups[1] << 10))
    room = Need(
        shm_bytes=bus_bytes(sizes.memory_capacity),
        memory_bytes=MEMORY + (sizes.memory_trajectories << 10),
        timed=False,
    )

    def through_daemon() -> list[Row]:
        if not _has_torch():
            return [_skipped("daemon", "the daemon", NO_TORCH)]
        return daemon.measure(sizes, capacity, say)

    groups = max(16, sizes.hop_2048 // 64)
    return [
        _Family(
            "wake", "wake-up of a sleeping reader, one way", one,
            lambda: wake.measure(sizes, capacity),
        ),
        _Family(
            "polled", "one way to a polling reader", two, lambda: polled.measure(sizes, capacity)
        ),
        _Family(
            "lists", "puts of lists, and by a schema", one,
            lambda: lists.measure(sizes.wakes, capacity),
        ),
        _Family(
            "requests", "requests to workers", two,
            lambda: [requests.measure(groups)],
        ),
        _Family(
            "stash", "the stash with few and with many open groups", many,
            lambda: stash.measure(sizes.stash_groups, sizes.stash_adds),
        ),
        _Family(
            "stash-memory", "memory of a stashed trajectory", room,
            lambda: [stash_memory.measure(sizes.memory_trajectories, sizes.memory_capacity)],
        ),
        _Family("idle", "a consumer asleep", one, lambda: [idle.measure(sizes.idle_s, capacity)]),
        _Family("daemon", "packed batches through the daemon", two, through_daemon),
    ]  # fmt: skip


def _skipped(name: str, title: str, why: str) -> Row:
    return Row(name=name, title=title, measured="", skipped=why)


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def notes(rows: Sequence[Row], *, tiny: bool, found: Here | None = None) -> list[str]:
    """Return notes that a reader needs before trusting the table."""
    if tiny:
        return ["NOTE: --tiny shows that each row can be measured; its figures mean nothing.\n"]
    told = fitness.notes(found or fitness.here())
    restless = sum(row.target is not None and bool(row.not_quiet) for row in rows)
    if restless:
        told.append(
            f"NOTE: the machine was not quiet for {restless} rows, which have no verdict; run "
            "again.\n"
        )
    return told


def memcpy_row(runs: Iterable[Runs], sizes: Sizes) -> Row | None:
    """Say what one core copied around all runs that are compared with it."""
    rates = [rate for one in runs for rate in one.of(yardsticks.MEMCPY)]
    if not rates:
        return None
    median = statistics.median(rates)
    return Row(
        name="memcpy",
        title=f"memcpy, one core, {sizes.memcpy_bytes >> 20} MiB to {sizes.memcpy_bytes >> 20} MiB",
        measured=f"{median:.2f} GB/s, {min(rates):.2f} to {max(rates):.2f}; each ratio uses what "
        "stands around its run",
        figures={
            "median_bytes_per_s": median * 1e9,
            "gb_per_s": rates,
            "bytes": sizes.memcpy_bytes,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
