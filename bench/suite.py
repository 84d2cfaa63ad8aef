"""The whole benchmark: ``shmbus bench``, ``make bench`` and ``python -m bench.suite`` run it.

It measures shmbus by itself (`bench.run`), then every contender that is installed here
(`bench.contest`), judges what was measured, and writes a directory: ``results.json`` with every
number, ``report.md`` with the tables, and the plots. Progress goes to stderr, the tables to stdout.

Exit status: 0 if what this machine can measure was measured, whether or not targets are met; 1 if
something failed, or nothing could be measured; 2 for wrong usage. A row that cannot be measured
here says why, and a contender that is not installed is skipped by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench import command, fitness, machine, yardsticks
from bench import run as core
from bench import sizes as core_sizes
from bench.contenders import contenders
from bench.contest import plan
from bench.contest import run as contest
from bench.fitness import TWO, Need
from bench.processes import use_template
from bench.report import blocks, fold, reading, report, verdicts
from bench.rows import curves
from bench.rows.row import Row, table
from bench.sending import bus_bytes

__all__ = ["main"]

OUTPUT: Final = "shmbus-bench"
#: Open groups of the curve, and what is timed at each.
OPEN_GROUPS: Final = {
    "quick": (),
    "full": (1_000, 10_000, 100_000, 1_000_000),
    "tiny": (100, 1_000),
}
OPEN_GROUP_ADDS: Final = {"quick": 0, "full": 400_000, "tiny": 10_000}
#: Of what is set beside other ways: both ends, and the ring of the usual size.
CONTEST: Final = Need(processors=TWO, shm_bytes=bus_bytes(core.DEFAULT_CAPACITY))
LEVELS: Final = {"quick": plan.QUICK, "full": plan.FULL, "tiny": plan.TINY}
CORE: Final = {
    "quick": core_sizes.QUICK,
    "full": core_sizes.FULL,
    "tiny": core_sizes.TINY,
}


@command.orderly("bench")
def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    output: Path = options.output
    began = time.monotonic()
    if options.level == "tiny":
        modules = core.TEMPLATE_MODULES if _measures_rows(options) else ()
        use_template(*modules, "bench.contest.child")
    facts = machine.describe()
    try:
        _check_output(output, facts, options)
    except (fold.CannotFold, reading.CannotRead) as error:
        parser.error(
            f"--output: {output} holds reports that were folded: {error}; name another directory"
        )
    # A copy of memory stands beside whatever else is measured.
    if command.refused(Need(timed=False), "bench"):
        return 1
    print(machine.summary(facts), flush=True)
    rows, result = _measure(options, facts, began)
    result["took_s"] = time.monotonic() - began
    if rows:
        print(f"\n{table(rows)}\n\n{report.contest_text(result)}")
    print("".join(f"\n{note}" for note in result["notes"]), end="")
    path = output / reading.RESULTS
    try:
        output.mkdir(exist_ok=True)
    except OSError as error:
        # What stands in its way stands in the way of a file in it too, which says so.
        print(f"bench: --output: {error}", file=sys.stderr)
    if status := command.keep(path, result, "bench"):
        return status
    try:
        report.write(result, output)
    except OSError as error:
        print(f"bench: --output: no report beside {path}: {error}", file=sys.stderr)
        return 1
    print(f"\n{result['took_s']:.0f} s; {path} and report.md beside it")
    some = result["contest"] or not all(row.skipped for row in rows)
    return 0 if some else command.nothing("bench")


def _check_output(output: Path, facts: dict[str, Any], options: argparse.Namespace) -> None:
    """Refuse to write over the newest of kept reports what could not be added to them."""
    kept = output / blocks.FOLDED
    if kept.exists():
        fold.check(reading.folded(kept), facts, options.level, partial=_is_partial(options))


def _parser() -> argparse.ArgumentParser:
    names = list(contenders())
    parser = argparse.ArgumentParser(
        prog="shmbus bench",
        description="Measure shmbus and the other ways to move a trajectory on this machine; "
        "close other work first.",
        epilog="examples:\n"
        "  shmbus bench --quick\n"
        "  shmbus bench --full --output bench/results/two-cores\n"
        "  shmbus bench --contender pyzmq --series size --series survival\n"
        "  shmbus bench --only hop-2048 --only wake      # rows of shmbus itself",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    level = parser.add_mutually_exclusive_group()
    level.add_argument(
        "--quick",
        dest="level",
        action="store_const",
        const="quick",
        help="the usual size of each contender: under five minutes (default)",
    )
    level.add_argument(
        "--full",
        dest="level",
        action="store_const",
        const="full",
        help="every workload and curve: 20 minutes at most",
    )
    level.add_argument(
        "--tiny",
        dest="level",
        action="store_const",
        const="tiny",
        help="only see that everything runs; its figures mean nothing",
    )
    parser.add_argument(
        "--only", action="append", choices=core.NAMES, metavar="ROW", default=[],
        help=f"rows of shmbus itself, and no contender; may be repeated: {', '.join(core.NAMES)}",
    )  # fmt: skip
    parser.add_argument(
        "--contender", action="append", choices=names, metavar="NAME", default=[],
        help=f"only these beside shmbus; may be repeated: {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument(
        "--series", action="append", choices=contest.SERIES, metavar="NAME", default=[],
        help=f"only these of the contest; may be repeated: {', '.join(contest.SERIES)}",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=command.directory, default=OUTPUT, metavar="DIR",
        help=f"where results, report and plots go (default {OUTPUT})",
    )  # fmt: skip
    parser.add_argument(
        "--capacity", type=command.capacity, default=core.DEFAULT_CAPACITY, metavar="SIZE",
        help=f"of the bus in the rows of shmbus itself (default {core.DEFAULT_CAPACITY})",
    )  # fmt: skip
    parser.set_defaults(level="quick")
    return parser


def _measures_rows(options: argparse.Namespace) -> bool:
    """Whether rows of shmbus itself are asked for, and not only the contest."""
    return bool(options.only) or not (options.contender or options.series)


def _is_partial(options: argparse.Namespace) -> bool:
    return bool(options.only or options.contender or options.series)


def _say_since(began: float) -> Callable[[str], None]:
    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {what}", file=sys.stderr, flush=True)

    return say


def _measure(
    options: argparse.Namespace, facts: dict[str, Any], began: float
) -> tuple[list[Row], dict[str, Any]]:
    level, sizes = LEVELS[options.level], CORE[options.level]
    say = _say_since(began)
    chosen = bool(options.contender or options.series)
    rows: list[Row] = []
    if _measures_rows(options):
        rows = core.measure(options.only or list(core.NAMES), sizes, options.capacity, say)
    copied = yardsticks.memcpy(sizes.memcpy_bytes, sizes.memcpy_repetitions)
    rates = [row.figures["median_bytes_per_s"] / 1e9 for row in rows if row.name == "memcpy"]
    if not rates:
        say("memcpy")
        rates = [copied.measure()]
    groups: list[dict[str, Any]] = []
    counts = OPEN_GROUPS[options.level]
    if counts and not options.only and not chosen:
        curve_began = time.monotonic()
        groups = curves.open_groups(counts, OPEN_GROUP_ADDS[options.level], say, rows)
        curve_s = time.monotonic() - curve_began
        rows += [dataclasses.replace(row, took_s=curve_s) for row in verdicts.open_groups(groups)]
    found: dict[str, Any] = {}
    here = fitness.here()
    notes = core.notes(rows, tiny=options.level == "tiny", found=here)
    if why := fitness.why_not(CONTEST, here):
        notes.append(f"NOTE: nothing was set beside other ways to move a trajectory: {why}\n")
    elif chosen or not options.only:
        known = list(contenders())
        names = options.contender or known
        series = options.series or contest.SERIES
        left_s = level.budget_s - (time.monotonic() - began)
        before = copied.measure()
        with fitness.Watch() as watch:
            found = contest.run([verdicts.OURS, *names], level, series, say, left_s)
        around = (before, copied.measure())
        rows += [
            # A death is counted, not timed.
            dataclasses.replace(row, others=watch.others) if row.reference else row
            for row in verdicts.rows(found, around)
        ]
    return rows, {
        "format": reading.FORMAT,
        "machine": facts,
        "level": options.level,
        "partial": _is_partial(options),
        "settings": {
            "shmbus": dataclasses.asdict(sizes) | {"capacity": options.capacity},
            "contest": dataclasses.asdict(level),
        },
        "memcpy_bytes_per_s": rates[0] * 1e9,
        "rows": [row.as_json() for row in rows],
        "notes": notes,
        "contest": found,
        "open_groups": groups,
    }


if __name__ == "__main__":
    sys.exit(main())
