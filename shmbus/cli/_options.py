"""Shared code of commands: adding them, parsing words of the command line, printing JSON."""

from __future__ import annotations

import argparse
import importlib.util
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from shmbus.base.arguments import check_path, is_text
from shmbus.base.near_names import near
from shmbus.segment.names import check_name

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

#: Minimum similarity to a suggested command, from 0 to 1: "stats" and "status" share 0.91.
_ALIKE: Final = 0.6

#: Names used by other programs.
_SYNONYMS: Final = {
    "ls": "list", "ps": "list", "stat": "status", "info": "status", "watch": "top",
    "monitor": "top", "start": "serve", "daemon": "serve", "unlink": "rm", "remove": "rm",
    "delete": "rm", "del": "rm", "clean": "gc", "backup": "snapshot",
}  # fmt: skip


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    examples: Sequence[str],
    json: bool = False,
    bus: bool = True,
) -> argparse.ArgumentParser:
    """Add a command with its help; `examples` are whole command lines, `bus` is its first word."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
    )
    if bus:
        parser.add_argument("name", metavar="NAME", type=bus_name, help="the bus")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON, with stable names")
    parser.set_defaults(run=run)
    return parser


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """Make a type of options; a `ValueError` of `read` is a usage error."""

    def take(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return take


bus_name: Final = checked(check_name)


def text(word: str) -> str:
    """Take a text of one or more characters that UTF-8 can encode."""
    if not word or not is_text(word):
        raise argparse.ArgumentTypeError(f"expected text in UTF-8, got {word!r}")
    return word


def path(word: str) -> str:
    """Take a path; an empty text would mean the working directory."""
    try:
        check_path("path", word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return word


def host(word: str) -> str:
    """Take an address to listen at; an empty text would mean every address of the machine."""
    if not word:
        raise argparse.ArgumentTypeError("expected an address, such as 127.0.0.1, got nothing")
    return word


def refuse_given(arguments: argparse.Namespace, options: Iterable[str], remedy: str) -> None:
    """Raise ValueError for the first given option without an effect here; `remedy` follows it."""
    for option in options:
        given = getattr(arguments, option)
        if given not in (None, []) and given is not False:  # 0 equals False, and is given
            raise ValueError(f"--{option.replace('_', '-')}: {remedy}")


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Make a type of options: a whole number within bounds."""

    def take(text: str) -> int:
        # Digits as an int: a float would round large numbers.
        value = int(text) if text.isascii() and text.isdecimal() else number_of(text)
        if value != value // 1 or value < least or (most is not None and value > most):
            bounds = f"{least} or more" if most is None else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"expected {bounds}, got {text}")
        return int(value)

    return take


def number_of(text: str) -> float:
    """Return the number; NaN, outside of all bounds, for text without a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(least: float | None = None, *, endless: bool = False) -> Callable[[str], float]:
    """Make a type of options: seconds, more than 0 or from a bound on."""

    def take(text: str) -> float:
        value = number_of(text)
        enough = value > 0 if least is None else value >= least
        # A longer wait is refused by the operating system.
        if not enough or (value > threading.TIMEOUT_MAX and not endless):
            bound = "more than 0" if least is None else f"{least} or more"
            end = "" if endless else ", with an end"
            raise argparse.ArgumentTypeError(f"expected seconds, {bound}{end}, got {text!r}")
        return value

    return take


def share(text: str) -> float:
    """Take a share from the command line: more than 0, less than 1."""
    value = number_of(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1, got {text}")
    return value


def require_extra(extra: str, *packages: str, option: str = "it") -> None:
    """Raise unless an extra's packages are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{option} needs {', '.join(missing)}; install the extra: pip install 'shmbus[{extra}]'"
        )


def add_numbers(
    parser: argparse.ArgumentParser, options: Iterable[tuple[str, str, int, str]]
) -> None:
    """Add options with a whole number of 1 or more, or of seconds: name, unit, default, meaning."""
    for name, unit, default, meaning in options:
        dest = name.replace("-", "_") + ("_s" if unit == "SECONDS" else "")
        kind: Callable[[str], float] = seconds() if unit == "SECONDS" else whole(1)
        parser.add_argument(
            f"--{name}", dest=dest, metavar=unit, type=kind, default=default,
            help=f"{meaning} (default {default})",
        )  # fmt: skip


def print_json(value: Any) -> None:
    """Print a struct or a list of them as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def unknown_command(word: str, commands: Iterable[str]) -> str:
    """Report an unknown command, with the probable command."""
    known = list(commands)
    synonyms = {other: (command,) for other, command in _SYNONYMS.items()}
    meant = near(word.lower(), known, synonyms, alike=_ALIKE)
    hint = f"did you mean {meant[0]!r}? " if meant else ""
    return f"there is no command {word!r}; {hint}expected one of {', '.join(known)}"
