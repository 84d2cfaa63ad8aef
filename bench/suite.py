"""The benchmark: the rows of shmbus itself, then every installed contender.

``--only`` chooses rows by name or pattern, and programs of this folder (`PROGRAMS`) by name; the
rows of a program join the table and the JSON.

Progress goes to stderr, the table to stdout, the JSON to ``--output``. Exit status: 0 after every
measurement possible on this machine, whether or not targets are met; 1 after a failure or without a
single value; 2 for wrong usage. An impossible row names its obstacle.
"""

import argparse
import dataclasses
import fnmatch
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from bench import machine, program
from bench.contenders import contenders
from bench.contest.run import OURS, contest
from bench.levels import LEVELS, Level
from bench.processes import MeasurementError, use_template
from bench.row import Row, skipped
from bench.rows import idle, latency, leases, requests, stash, throughput
from bench.sending import bus_bytes
from bench.yardsticks import memcpy
from shmbus import ShmbusError

__all__ = ["ROWS", "main"]

CAPACITY: Final = "64MiB"
MeasureRow = Callable[[Level, str], Row]


def _memcpy(level: Level, capacity: str) -> Row:
    rates = [memcpy(level.memcpy_bytes, 5) / 1e9 for _ in range(level.repetitions)]
    title = f"memcpy, one core, {level.memcpy_bytes >> 20} MiB to {level.memcpy_bytes >> 20} MiB"
    return Row(name="memcpy", title=title, unit="GB/s", values=tuple(rates))


HOPS: Final = ("hop-2048", "hop-2048-cold", "hop-16384", "hop-16384-cold", "hop-256")
#: Measuring function of each row, in the order of the table.
ROWS: Final[dict[str, MeasureRow]] = {
    "memcpy": _memcpy,
    **{name: partial(throughput.hop, name) for name in HOPS},
    "packed": partial(throughput.packed, "packed"),
    "packed-cold": partial(throughput.packed, "packed-cold"),
    "daemon-packed": throughput.daemon_packed,
    "daemon-leases": leases.daemon_leases,
    "wake": latency.wake,
    "daemon-wake": latency.daemon_wake,
    "requests": requests.requests,
    "stash": stash.growth,
    "idle": idle.idle,
    "daemon-idle": idle.daemon_idle,
}
#: Programs with their own options; ``python -m bench.NAME`` sets them.
PROGRAMS: Final = ("gateway", "goodput", "gpu", "ranks", "recorder", "scale", "weights")
#: Rows of a single process, without need of a second core or a bus.
ALONE: Final = ("memcpy", "stash")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    return program.run("bench", _parser(), measure, argv)


def _parser() -> argparse.ArgumentParser:
    names = [name for name in contenders() if name != OURS]
    parser = program.parser_of(
        "bench", "Measure shmbus, and other ways to move a trajectory; close other work first.",
        quick="five minutes (default)", full="what figures are kept of",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="extend", type=_named, metavar="NAME", default=[],
        help=f"rows of shmbus by name or pattern, such as 'hop-*', or programs; may be repeated: "
        f"{', '.join([*ROWS, *PROGRAMS])}",
    )  # fmt: skip
    parser.add_argument(
        "--contender", action="append", choices=names, metavar="NAME", default=[],
        help=f"these beside shmbus; may be repeated: {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument(
        "--capacity", type=program.capacity, default=CAPACITY, help=f"of the bus ({CAPACITY})"
    )
    return parser


def _named(text: str) -> list[str]:
    """Read the name of a row or a program, or a pattern of rows, as argparse's ``type``."""
    if found := [name for name in ROWS if fnmatch.fnmatch(name, text)]:
        return found
    if text in PROGRAMS:
        return [text]
    known = ", ".join([*ROWS, *PROGRAMS])
    raise argparse.ArgumentTypeError(f"expected one of {known}, or a pattern, got {text!r}")


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure the chosen rows and contenders; without a choice, everything."""
    name = "tiny" if options.tiny else "full" if options.full else "quick"
    level = LEVELS[name]
    if options.tiny:
        use_template("torch", "trainer_adapter", "bench.contest.child")
    if options.repetitions:
        level = dataclasses.replace(level, repetitions=options.repetitions)
    everything = not (options.only or options.contender)
    chosen = list(ROWS) if everything else options.only
    rows = list(_own([name for name in chosen if name in ROWS], level, options.capacity))
    for name in chosen:
        if name in PROGRAMS:
            rows += _program(name, options)
    names = list(contenders()) if everything else options.contender
    if names:
        why = machine.lacks(cores=2, shm_bytes=bus_bytes(CAPACITY))
        if why:
            rows.append(skipped("contest", "beside other ways", why))
        else:
            rows += contest(names, level, _say)
    return rows


def _own(names: Sequence[str], level: Level, capacity: str) -> Iterator[Row]:
    for name in names:
        alone = name in ALONE
        why = machine.lacks(
            cores=1 if alone or name.endswith("idle") else 2,
            shm_bytes=0 if alone else bus_bytes(capacity),
            modules=["torch"] if "packed" in name else [],
        )
        if why:
            yield skipped(name, name, why)
            continue
        _say(name)
        try:
            yield ROWS[name](level, capacity)
        except (MeasurementError, ShmbusError, OSError) as error:
            # The remaining rows keep their worth.
            yield skipped(name, name, f"it failed: {error}")


def _program(name: str, options: argparse.Namespace) -> list[Row]:
    """Measure a program with the default options."""
    given = ["--tiny"] if options.tiny else []
    if options.repetitions:
        given += ["--repetitions", str(options.repetitions)]
    _say(name)
    try:
        found = importlib.import_module(
            "bench.goodput.run" if name == "goodput" else f"bench.{name}"
        )
        rows: list[Row] = found.measure(found.parser().parse_args(given))
        return rows
    except (ImportError, MeasurementError, ShmbusError, OSError) as error:
        return [skipped(name, name, f"it failed: {error}")]


_BEGAN: Final = time.monotonic()


def _say(what: str) -> None:
    print(f"{time.monotonic() - _BEGAN:6.0f} s  {what}", file=sys.stderr, flush=True)
