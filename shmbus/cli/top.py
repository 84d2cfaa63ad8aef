"""``shmbus top``: what ``shmbus status`` prints, and rates, again and again in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Iterator

from shmbus.base.format import several, show_count, show_size
from shmbus.cli._options import Commands, add_command, seconds
from shmbus.cli.status import report
from shmbus.inspect.rates import Watcher

_MIN_INTERVAL_S = 0.1
#: Another screen without a cursor, with unwrapped lines; and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "top",
        run,
        help="watch a bus live",
        description="Shows rates and the status of a bus, live, read-only. q leaves. Prints a "
        "single frame without a terminal.",
        examples=["shmbus top run1", "shmbus top run1 --interval 0.5", "shmbus top run1 | cat"],
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=seconds(_MIN_INTERVAL_S),
        default=1.0,
        help="seconds between two polls (default 1)",
    )


def frame(watcher: Watcher) -> str:
    """Lay out the last poll's findings."""
    rates = watcher.rates
    return (
        f"trajectories  {show_count(rates.committed)}/s in, {show_count(rates.acknowledged)}/s "
        f"acknowledged, {show_count(rates.dropped)}/s dropped; {show_size(rates.bytes)}/s, "
        f"{show_count(rates.tokens)} tokens/s\n{report(watcher.status)}"
    )


def fitted(text: str, columns: int, rows: int) -> list[str]:
    """Return the lines that fit a terminal, sentences wrapped; the last line counts the rest."""
    sentences, _, tables = text.partition("\n\n")
    wrapper = textwrap.TextWrapper(columns, break_on_hyphens=False)
    lines = [part for line in sentences.splitlines() for part in wrapper.wrap(line)]
    lines += ["", *tables.splitlines()]
    if len(lines) <= rows:
        return lines
    hidden = several(len(lines) - rows + 1, "more line")
    return [*lines[: rows - 1], f"{hidden}: make the terminal higher, or use `shmbus status`"]


def run(arguments: argparse.Namespace) -> int:
    """Watch until q, Ctrl-C, SIGTERM, or the end of the bus."""
    watcher = Watcher(arguments.name)
    watcher.poll()  # an unknown bus is reported before the terminal changes
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        time.sleep(arguments.interval)
        watcher.poll()
        print(frame(watcher))
        return 0
    with contextlib.suppress(KeyboardInterrupt), _screen():
        while not _quits(arguments.interval):
            watcher.poll()
            lines = fitted(frame(watcher), *shutil.get_terminal_size())
            print("\x1b[H" + "\x1b[K\n".join(lines) + "\x1b[J", end="", flush=True)
    return 0


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Provide a screen, and keys singly, for the block; always restore the terminal."""
    before = termios.tcgetattr(sys.stdin)
    ends = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, signal.default_int_handler) for number in ends]
    try:
        tty.setcbreak(sys.stdin)
        print(_ENTER, end="", flush=True)
        yield
    finally:
        print(_LEAVE, end="", flush=True)
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        for number, handler in zip(ends, handlers, strict=True):
            signal.signal(number, handler)


def _quits(wait_s: float) -> bool:
    """Tell if a quitting key was pressed within the time; other keys end the wait."""
    fd = sys.stdin.fileno()
    return bool(select.select([fd], [], [], wait_s)[0]) and os.read(fd, 64)[:1] in (b"", b"q", b"Q")
