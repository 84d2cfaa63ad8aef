"""The benchmark: ``python -m bench.run`` measures every row on this machine and prints one table.

All rows of a table come from one run. Progress goes to stderr, the table to stdout. Exit status: 0
if everything could be measured (whether or not targets are met), 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench import machine
from bench.processes import MeasurementError
from bench.rows import (
    daemon,
    idle,
    lists,
    memcpy,
    polled,
    requests,
    stash,
    stash_memory,
    throughput,
    wake,
)
from bench.rows.row import Row, table
from bench.sending import temporary_bus
from bench.sizes import FULL, QUICK, TINY, Sizes
from shmbus import ShmbusError

__all__ = ["DEFAULT_CAPACITY", "NAMES", "main", "measure", "notes"]

NAMES: Final = (
    "hop-2048",
    "hop-2048-cold",
    "hop-16384",
    "hop-16384-cold",
    "hop-256",
    "packed",
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
#: Memcpy before and after may differ by this factor before a table says that it cannot be trusted.
MEMCPY_DRIFT: Final = 1.2


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.output and not options.output.resolve().parent.is_dir():
        parser.error(f"--output: there is no directory {options.output.resolve().parent}")
    sizes = TINY if options.tiny else QUICK if options.quick else FULL
    if options.repetitions:
        sizes = dataclasses.replace(sizes, repetitions=options.repetitions)
    # An ordinary exit, so that processes and segments are cleaned up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts = machine.describe()
    try:
        _check_capacity(parser, options.capacity)
        print(machine.summary(facts), flush=True)
        rows = measure(options.only or list(NAMES), sizes, options.capacity, _say)
    except (MeasurementError, ShmbusError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"\n{table(rows)}")
    print("".join(f"\n{note}" for note in notes(rows, tiny=options.tiny)), end="")
    if options.output:
        result = {
            "format": FORMAT,
            "machine": facts,
            "settings": dataclasses.asdict(sizes) | {"capacity": options.capacity},
            "rows": [row.as_json() for row in rows],
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.run",
        description="Measure shmbus on this machine; close other work first.",
        epilog="example: python -m bench.run --quick --only hop-2048 --output figures.json",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="less of everything: under a minute")
    size.add_argument(
        "--tiny", action="store_true", help="only see that each row runs; its figures mean nothing"
    )
    parser.add_argument(
        "--only", action="append", choices=NAMES, metavar="NAME",
        help=f"measure this, and what it is compared with; may be repeated: {', '.join(NAMES)}",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="PATH", help="write the figures as JSON")
    parser.add_argument(
        "--capacity", default=DEFAULT_CAPACITY, metavar="SIZE",
        help=f"of the bus in all rows but stash-memory (default {DEFAULT_CAPACITY})",
    )  # fmt: skip
    parser.add_argument(
        "--repetitions", type=_positive, metavar="N", help="runs of each throughput row (default 3)"
    )
    return parser


def _check_capacity(parser: argparse.ArgumentParser, capacity: str) -> None:
    """Create a bus of this capacity now, so that a wrong one fails before the first measurement."""
    try:
        with temporary_bus(capacity):
            return
    except ShmbusError:
        raise
    except ValueError as error:
        parser.error(f"--capacity: {error}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _say(what: str) -> None:
    print(f"measuring: {what}", file=sys.stderr, flush=True)


def measure(
    names: Sequence[str], sizes: Sizes, capacity: str, say: Callable[[str], None]
) -> list[Row]:
    """Measure the rows of these names, between two measurements of memcpy if one needs it."""
    rows: list[Row] = []
    chosen = [case for case in throughput.cases(sizes, capacity) if case.name in names]
    references = {case.reference for case in chosen} - {case.name for case in chosen}
    chosen = [
        case
        for case in throughput.cases(sizes, capacity)
        if case in chosen or case.name in references
    ]
    without_torch = importlib.util.find_spec("torch") is None
    skipped = [case for case in chosen if case.name == "packed" and without_torch]
    chosen = [case for case in chosen if case not in skipped]
    before = _memcpy("before", sizes, say) if chosen else 0.0
    bounded = any(case.moved_bytes_per_token is not None for case in chosen)
    both = [_both_cores(sizes, say)] if bounded else []
    runs = throughput.repeat(chosen, sizes.repetitions, say)
    others = _others(names, sizes, capacity, say)
    if chosen:
        after = _memcpy("after", sizes, say)
        mean = (before + after) / 2
        rows.append(_memcpy_row(before, after, sizes))
        both += [_both_cores(sizes, say)] if bounded else []
        known = [one for one in both if one is not None]
        rows += throughput.rows(chosen, runs, mean, statistics.mean(known) if known else None)
    rows += [
        Row(name=case.name, title=case.title, measured="", skipped="there is no torch here")
        for case in skipped
    ]
    return rows + others


def _others(
    names: Sequence[str], sizes: Sizes, capacity: str, say: Callable[[str], None]
) -> list[Row]:
    rows: list[Row] = []
    if "wake" in names:
        say("wake-up of a sleeping reader, beside a raw futex")
        rows += wake.measure(sizes.wakes, sizes.wake_turns, capacity)
    if "polled" in names:
        say("one way to a polling reader, beside the ring alone")
        rows += polled.measure(sizes.wakes, sizes.wake_turns, capacity)
    if "lists" in names:
        say("puts of lists, and by a schema")
        rows += lists.measure(sizes.wakes, capacity)
    if "requests" in names:
        say("requests to workers")
        rows.append(requests.measure(max(16, sizes.hop_2048 // 64)))
    if "stash" in names:
        say("the stash with few and with many open groups")
        rows += stash.measure(sizes.stash_groups, sizes.stash_adds)
    if "stash-memory" in names:
        say("memory of a stashed trajectory")
        rows.append(stash_memory.measure(sizes.memory_trajectories, sizes.memory_capacity))
    if "idle" in names:
        say("a consumer asleep")
        rows.append(idle.measure(sizes.idle_s, capacity))
    if "daemon" in names and importlib.util.find_spec("torch") is None:
        rows.append(
            Row(name="daemon", title="the daemon", measured="", skipped="there is no torch")
        )
    elif "daemon" in names:
        rows += daemon.measure(
            sizes.packed, sizes.repetitions, sizes.wakes, sizes.idle_s, capacity, say
        )
    return rows


def notes(rows: Sequence[Row], *, tiny: bool) -> list[str]:
    """Return notes that a reader needs before trusting the table."""
    if tiny:
        return ["NOTE: --tiny shows that each row can be measured; its figures mean nothing.\n"]
    for row in rows:
        if row.name == "memcpy":
            rates = (row.figures["before_bytes_per_s"], row.figures["after_bytes_per_s"])
            if max(rates) > MEMCPY_DRIFT * min(rates):
                return ["NOTE: memcpy changed much during the run; run again when it is quiet.\n"]
    return []


def _memcpy(when: str, sizes: Sizes, say: Callable[[str], None]) -> float:
    say(f"memcpy, {when} everything else")
    return memcpy.measure(sizes.memcpy_bytes, sizes.memcpy_repetitions)


def _both_cores(sizes: Sizes, say: Callable[[str], None]) -> float | None:
    say("memcpy by two cores at once")
    return memcpy.measure_both(sizes.memcpy_bytes, sizes.memcpy_repetitions)


def _memcpy_row(before: float, after: float, sizes: Sizes) -> Row:
    figures: dict[str, Any] = {
        "before_bytes_per_s": before,
        "after_bytes_per_s": after,
        "mean_bytes_per_s": (before + after) / 2,
        "bytes": sizes.memcpy_bytes,
    }
    return Row(
        name="memcpy",
        title=f"memcpy, one core, {sizes.memcpy_bytes >> 20} MiB to {sizes.memcpy_bytes >> 20} MiB",
        measured=f"{before / 1e9:.2f} GB/s before, {after / 1e9:.2f} after; ratios use the mean, "
        f"{(before + after) / 2e9:.2f}",
        figures=figures,
    )


if __name__ == "__main__":
    sys.exit(main())
