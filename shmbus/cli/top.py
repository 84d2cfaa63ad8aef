"""``shmbus top``: a bus, live, in a terminal. The drawing is in ``_top_view``, which needs rich."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from shmbus import errors
from shmbus.cli._options import Commands, add_command, require_extra, seconds
from shmbus.inspect.rates import Watcher

if TYPE_CHECKING:
    from rich.console import Console

_MIN_INTERVAL_S = 0.1
_QUIT_KEYS = frozenset(b"qQ\x1b")


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "top",
        run,
        help="watch a bus live",
        description="Shows fill, rates, ledger, groups, producers and leases of a bus, live, "
        "without disturbing it. Keys: q leaves.",
        examples=[
            "shmbus top run1",
            "shmbus top run1 --interval 0.5",
            "shmbus top run1 --once   # one frame, for a log",
        ],
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=seconds(_MIN_INTERVAL_S),
        default=1.0,
        help="seconds between two polls (default 1)",
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")


def run(arguments: argparse.Namespace) -> int:
    """Watch until q, Ctrl-C, SIGTERM, or the end of the bus."""
    require_extra("ops", "rich")
    from rich.console import Console

    from shmbus.cli._top_view import draw

    console, watcher = Console(), Watcher(arguments.name)
    watcher.poll()  # an unknown bus is reported before the terminal is changed
    if arguments.once:
        time.sleep(min(arguments.interval, 1.0))
        watcher.poll()
        width, height = console.width, max(console.height - 1, 24)
        console.print(draw(watcher, width, height), height=height)
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RuntimeError(
            "it needs a terminal; `shmbus top NAME --once` prints one frame, `shmbus status NAME` "
            "the figures"
        )
    return _live(console, watcher, arguments.interval)


class _Ended(Exception):
    """SIGTERM or SIGHUP: leave as for q, so that the terminal is restored."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """Read single key presses from the terminal, and restore it in any case."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _pressed(fd: int, wait_s: float) -> bool:
    """Whether a key that quits was pressed within the time."""
    deadline = time.monotonic() + wait_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if select.select([fd], [], [], left)[0]:
            data = os.read(fd, 64)
            # A lone escape is a key; with more bytes behind it, it is an arrow or the like.
            if not data or (data[0] in _QUIT_KEYS and (data[0] != 0x1B or len(data) == 1)):
                return True


def _live(console: Console, watcher: Watcher, interval_s: float) -> int:
    from rich.live import Live

    from shmbus.cli._top_view import draw

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(_Ended, KeyboardInterrupt))
        fd = stack.enter_context(_keys())
        live = stack.enter_context(
            Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False)
        )
        while True:
            try:
                watcher.poll()
            except errors.BusNotFoundError as error:
                stack.close()
                print(f"shmbus top: {error}", file=sys.stderr)
                return 1
            live.update(draw(watcher, *console.size), refresh=True)
            if _pressed(fd, interval_s):
                break
    return 0
