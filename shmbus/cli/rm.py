"""``shmbus rm``: removes an unused bus with its companions."""

from __future__ import annotations

import argparse
import contextlib
import sys

from shmbus import errors
from shmbus.base.format import printable, show_count, show_size, with_notes
from shmbus.cli._options import Commands, add_command, bus_name
from shmbus.inspect import leftovers
from shmbus.segment.explain import others_text


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "rm",
        run,
        help="remove a bus, and the weights and states that go with it",
        description="Removes the segment of a bus, with its weights, channels, socket, the state "
        "of its gateway, and the buses of its annotators. Refuses while a living process has any "
        "of them open, and then removes nothing.",
        examples=[
            "shmbus rm run1",
            "shmbus rm run1 run2   # several",
            "shmbus rm --force run1  # who has it open gets BusRemovedError",
        ],
        bus=False,
    )
    parser.add_argument("names", metavar="NAME", nargs="+", type=bus_name, help="the bus")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also while processes have it open; they get BusRemovedError",
    )


def run(arguments: argparse.Namespace) -> int:
    """Remove the named buses; 1 after a failed removal."""
    failed = False
    for name in dict.fromkeys(arguments.names):
        try:
            print(_remove(name, force=arguments.force))
        except (errors.ShmbusError, OSError) as error:
            print(f"shmbus rm: {with_notes(error)}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


def _remove(name: str, *, force: bool) -> str:
    """Remove all files of a bus, the segment first; return the message."""
    found = leftovers.of_bus(name)
    if not found:
        raise errors.BusNotFoundError(
            f"there is no bus {printable(name)!r} to remove; {others_text(name)}"
        )
    kept = [leftover for leftover in found if not leftovers.may_go(leftover, force=force)]
    if kept:
        reasons = "; ".join(f"{printable(each.path)}: {each.reason}" for each in kept)
        ours = all(leftovers.may_go(each, force=True) for each in kept)
        raise errors.BusBusyError(
            f"bus {printable(name)!r} was not removed. {reasons}. "
            + (
                "End these processes first, or add --force"
                if ours
                else "Only its owner can remove it"
            )
        )
    for leftover in found:
        with contextlib.suppress(FileNotFoundError):  # a dead daemon's socket goes with the segment
            leftovers.remove(leftover, force=force)
    lost = sum(leftover.undelivered or 0 for leftover in found)
    also = [each for each in found if (each.kind, each.name) != ("segment", name)]
    return (
        f"removed bus {printable(name)!r}"
        + (f" and {len(also)} file{'s' if len(also) > 1 else ''} that went with it" if also else "")
        + f", freed {show_size(sum(leftover.size for leftover in found))}"
        + (f"; {show_count(lost)} undelivered trajectories are lost" if lost else "")
    )
