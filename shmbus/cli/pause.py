"""``shmbus pause NAME`` and ``shmbus resume NAME``: producers wait, as if the bus were full."""

from __future__ import annotations

import argparse

from shmbus import Bus
from shmbus.cli._options import Commands, bus_name
from shmbus_ext import _core

__all__ = ["add_parser", "run_pause", "run_resume"]


def add_parser(commands: Commands) -> None:
    """Add both commands."""
    pause = commands.add_parser(
        "pause",
        help="make the producers of a bus wait",
        description="Makes each put and reserve wait, up to its timeout, until the bus is resumed. "
        "Groups are still delivered.",
        epilog='example:\n  shmbus pause run1 --reason "weights are being loaded"',
    )
    pause.add_argument("name", metavar="NAME", type=bus_name, help="the bus")
    pause.add_argument(
        "--reason",
        type=_reason,
        default="",
        help=f"the reason that producers see, up to {_core.PAUSE_REASON_BYTES} bytes",
    )
    pause.set_defaults(run=run_pause)
    resume = commands.add_parser(
        "resume",
        help="let the producers of a bus go on",
        description="Ends a pause, whichever process began it.",
        epilog="example:\n  shmbus resume run1",
    )
    resume.add_argument("name", metavar="NAME", type=bus_name, help="the bus")
    resume.set_defaults(run=run_resume)


def _reason(text: str) -> str:
    size = len(text.encode("utf-8", "replace"))
    if size > _core.PAUSE_REASON_BYTES:
        raise argparse.ArgumentTypeError(
            f"expected at most {_core.PAUSE_REASON_BYTES} bytes, got {size}"
        )
    return text


def run_pause(parsed: argparse.Namespace) -> int:
    """Pause."""
    bus = Bus.open(parsed.name)
    try:
        bus.pause(parsed.reason)
    finally:
        bus.close()
    return 0


def run_resume(parsed: argparse.Namespace) -> int:
    """Resume."""
    bus = Bus.open(parsed.name)
    try:
        bus.resume()
    finally:
        bus.close()
    return 0
