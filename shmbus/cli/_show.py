"""Helpers that commands share: adding a command, and printing.

Invariant: text of a segment reaches the terminal escaped (`printable`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from shmbus._format import bar, printable, several, show_count, show_duration, show_size, table
from shmbus.segment.names import check_name

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = [
    "add_command",
    "bar",
    "bus_name",
    "number_of",
    "print_json",
    "printable",
    "several",
    "show_count",
    "show_duration",
    "show_size",
    "table",
    "take_int",
    "take_seconds",
]


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    examples: Sequence[str],
    json: bool = False,
) -> argparse.ArgumentParser:
    """Add a command with its help; `examples` are whole command lines."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON, with stable names")
    parser.set_defaults(run=run)
    return parser


def bus_name(text: str) -> str:
    """Take a bus name from the command line; an impossible name is a usage error."""
    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def take_int(text: str, least: int, most: int | None = None) -> int:
    """Take a whole number from the command line; one beyond its bounds is a usage error."""
    value = int(text)
    if value < least or (most is not None and value > most):
        bounds = f"{least} or more" if most is None else f"{least} to {most}"
        raise argparse.ArgumentTypeError(f"expected {bounds}, got {value}")
    return value


def number_of(text: str) -> float:
    """Return the number; where there is none, NaN, which is within no bound."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def take_seconds(text: str, least: float | None = None, *, endless: bool = False) -> float:
    """Take seconds from the command line; others are a usage error."""
    value = number_of(text)
    enough = value > 0 if least is None else value >= least
    if not enough or (value == math.inf and not endless):
        bound = "more than 0" if least is None else f"{least} or more"
        end = "" if endless else ", with an end"
        raise argparse.ArgumentTypeError(f"expected seconds, {bound}{end}, got {text!r}")
    return value


def print_json(value: Any, stream: TextIO | None = None) -> None:
    """Print a struct or a list of them as indented JSON."""
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    print(text, file=stream or sys.stdout)
