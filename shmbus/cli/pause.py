"""``shmbus pause NAME`` and ``shmbus resume NAME``: producers wait, as if the bus were full."""

from __future__ import annotations

import argparse

from shmbus import Bus
from shmbus.cli._options import Commands, add_command
from shmbus.cli._options import text as checked_text
from shmbus_ext import _core


def add_parser(commands: Commands) -> None:
    """Add the commands `pause` and `resume`."""
    pause = add_command(
        commands,
        "pause",
        run_pause,
        help="make the producers of a bus wait",
        description="Makes each put and reserve wait, up to its timeout, until the bus is resumed. "
        "Groups are still delivered.",
        examples=['shmbus pause run1 --reason "weights are being loaded"'],
    )
    pause.add_argument(
        "--reason",
        type=_reason,
        default="",
        help=f"the reason that producers see, up to {_core.PAUSE_REASON_BYTES} bytes",
    )
    add_command(
        commands,
        "resume",
        run_resume,
        help="let the producers of a bus go on",
        description="Ends a pause, whichever process began it.",
        examples=["shmbus resume run1"],
    )


def _reason(text: str) -> str:
    size = len(text.encode("utf-8", "replace"))
    if size > _core.PAUSE_REASON_BYTES:
        raise argparse.ArgumentTypeError(
            f"expected at most {_core.PAUSE_REASON_BYTES} bytes, got {size}"
        )
    return text and checked_text(text)


def run_pause(parsed: argparse.Namespace) -> int:
    """Pause."""
    with Bus.open(parsed.name) as bus:
        bus.pause(parsed.reason)
    return 0


def run_resume(parsed: argparse.Namespace) -> int:
    """Resume."""
    with Bus.open(parsed.name) as bus:
        bus.resume()
    return 0
