"""What the commands share: how figures and tables look, and how a command is added.

Invariant: nothing that a segment says reaches the terminal unescaped (`printable`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from shmbus._segment_file import printable
from shmbus._segments import check_name, show_size

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = [
    "add_command",
    "bar",
    "bus_name",
    "print_json",
    "printable",
    "show_count",
    "show_duration",
    "show_size",
    "table",
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON, with stable names")
    parser.set_defaults(run=run)
    return parser


def bus_name(text: str) -> str:
    """Take a bus name from the command line; one that can name no bus is a usage error."""
    try:
        return check_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def print_json(value: Any, stream: TextIO | None = None) -> None:
    """Print a struct or a list of them as indented JSON."""
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    print(text, file=stream or sys.stdout)


def show_count(number: float) -> str:
    """Group digits: 12,345."""
    return f"{number:,.0f}"


def show_duration(seconds: float) -> str:
    """Seconds for people: 0.2 s, 3 min 20 s, 2 h 5 min, 4 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    for large, small, name, part in (
        (60, 1, "min", "s"),
        (3600, 60, "h", "min"),
        (86400, 3600, "d", "h"),
    ):
        if seconds < large * 60 or name == "d" or (name == "h" and seconds < 86400):
            whole = int(seconds // large)
            rest = int(seconds % large // small)
            return f"{whole} {name} {rest} {part}" if rest else f"{whole} {name}"
    raise AssertionError("the last row of the table takes everything")


def bar(fraction: float, width: int) -> str:
    """Draw a fraction as a bar of eighths."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return drawn.ljust(width, "░")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Lay out rows in columns; a heading that ends with ">" is aligned to the right."""
    names = [name.rstrip(">") for name in head]
    widths = [max(len(line[i]) for line in [names, *rows]) for i in range(len(head))]
    lines = []
    for line in [names, *rows]:
        cells = [
            cell.rjust(width) if name.endswith(">") else cell.ljust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)
