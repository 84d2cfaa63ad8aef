"""Closed loops without faults, a contender each: ``python -m bench.loop``.

Engine, workers, transport and trainer of `bench.goodput`, without deaths: tokens per second that
the trainer trains, and the share of time that the trainer waits.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence

from bench import program
from bench.contest.run import versions
from bench.goodput.adapters import ADAPTERS
from bench.goodput.run import PARTS, about, ran
from bench.goodput.scenario import DEFAULT, Scenario
from bench.processes import MeasurementError
from bench.row import Row, skipped

__all__ = ["main"]


def row_of(name: str, options: argparse.Namespace) -> Row:
    """Measure a contender."""
    title = about(name).title
    try:
        versions(about(name))
    except MeasurementError as error:
        return skipped(f"loop-{name}", title, str(error))
    scenario = dataclasses.replace(Scenario.read(DEFAULT), kills=(), step_s=options.step)
    seconds = 1 if options.tiny else options.seconds
    parts = [
        ran(name, scenario, PARTS / f"loop-{name}", seed, seconds)
        for seed in range(1 if options.tiny else options.repetitions or 3)
    ]
    whole = [part for part in parts if "failed" not in part]
    if not whole:
        return skipped(f"loop-{name}", title, parts[0]["failed"])
    idle = statistics.median(part["trainer_idle"] for part in whole)
    return Row(
        name=f"loop-{name}", title=title, unit="tokens/s",
        values=tuple(part["once"] / part["lived_s"] for part in whole),
        note=f"trainer idle {idle:.0%}", figures={"parts": parts},
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = program.parser_of("loop", __doc__)
    parser.add_argument(
        "--contender", action="append", choices=ADAPTERS, metavar="NAME", default=[],
        help=f"may be repeated: {', '.join(ADAPTERS)}",
    )  # fmt: skip
    parser.add_argument("--seconds", type=program.at_least_one, default=20, help="of each run")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a training step")

    def measure(options: argparse.Namespace) -> list[Row]:
        return [row_of(name, options) for name in options.contender or ADAPTERS]

    return program.run("loop", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
