"""Common parts of the benchmark's programs: options, result, end.

Invariants: a program checks output paths before the first measurement, prints figures after a
failed write, and ends at SIGTERM as by an exception, with its processes and segments removed.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import shmbus
from bench import machine
from bench.processes import MeasurementError
from bench.row import Row, table
from shmbus.base.arguments import parse_size

__all__ = ["at_least_one", "capacity", "command", "file", "finish", "parser_of", "run"]

#: Note below the figures of a smoke test.
TINY = "NOTE: --tiny only shows that each row can be measured; its figures mean nothing."


def at_least_one(text: str) -> int:
    """Read a count, as argparse's ``type``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


def capacity(text: str) -> str:
    """Read the capacity of a bus, as argparse's ``type``; the result stays a text."""
    try:
        parse_size(text, "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from error
    return text


def file(text: str) -> Path:
    """Read the path of an output file, as argparse's ``type``."""
    path = Path(text)
    place = path.resolve().parent
    if path.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"expected the path of a file in a directory that can be written, got {text!r}"
        )
    return path


def command(name: str) -> str:
    """Return the start command of a program: a module of this folder, or a repository path."""
    if name == "bench":
        return "shmbus bench"
    return f"python {name}" if name.endswith(".py") else f"python -m bench.{name}"


def parser_of(name: str, description: str | None, **levels: str) -> argparse.ArgumentParser:
    """Make the parser of a program, with the common options; at most one level is given."""
    parser = argparse.ArgumentParser(
        prog=command(name), description=(description or "").split("\n")[0]
    )
    parser.add_argument("--output", type=file, metavar="PATH", help="where the JSON goes")
    parser.add_argument(
        "--repetitions", type=at_least_one, metavar="N", help="of each row (default: the level's)"
    )
    group = parser.add_mutually_exclusive_group()
    levels["tiny"] = "only see that it runs; its figures mean nothing"
    for level, meaning in levels.items():
        group.add_argument(f"--{level}", action="store_true", help=meaning)
    return parser


def _shown(value: object) -> str:
    """Return an option for a kept result, without the place of this checkout."""
    return str(value).removeprefix(f"{machine.ROOT}/")


def finish(
    name: str, options: argparse.Namespace, facts: dict[str, Any], rows: Sequence[Row]
) -> int:
    """Print the table and write the JSON; return exit status 1 without a single value."""
    print(f"\n{table(rows)}")
    if options.tiny:
        print(f"\n{TINY}")
    chosen = {key: _shown(value) for key, value in vars(options).items() if key != "output"}
    result = {
        "program": name,
        "machine": facts,
        "options": chosen,
        "rows": [row.as_json() for row in rows],
    }
    if options.output is not None:
        text = json.dumps(result, indent=1) + "\n"
        try:
            options.output.write_text(text)
        except OSError as error:
            print(text)
            print(f"{name}: --output: {error}; the figures are on stdout", file=sys.stderr)
            return 1
    if all(row.skipped for row in rows):
        print(f"{name}: nothing could be measured here; the table says why", file=sys.stderr)
        return 1
    return 0


def run(
    name: str,
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Sequence[Row]],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a program: measure, print, write; return its exit status."""
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    try:
        return finish(name, options, facts, measure(options))
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (MeasurementError, shmbus.ShmbusError, OSError, MemoryError) as error:
        print(f"{name}: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)
