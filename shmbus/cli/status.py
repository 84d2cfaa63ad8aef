"""``shmbus status``: a bus at a glance, for people or as JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

import msgspec

from shmbus.base.format import show_count
from shmbus.cli._options import Commands, add_command, print_json
from shmbus.data.status_types import BusStatus
from shmbus.inspect.status import read_status
from shmbus.inspect.text import status_text
from shmbus.pool.pool_status import describe_pool, read_pools


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "status",
        run,
        help="show where every trajectory of a bus is",
        description="Shows the ledger, groups, producers and the collector of a bus, without "
        "disturbing it: it reads the segment's file and maps nothing. Works with or without a "
        "consumer. Exit status 1 where the ledger does not balance.",
        examples=[
            "shmbus status run1",
            "shmbus status run1 --json | jq .ledger",
            "shmbus status run1 --ray",
        ],
        json=True,
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", nargs="?", const="auto", type=_address,
        help="show the ledgers of all nodes of the relay that carries this bus on a Ray cluster",
    )  # fmt: skip


def _address(text: str) -> str:
    if ":" not in text and text != "auto":
        raise argparse.ArgumentTypeError(
            f"expected HOST:PORT or auto, got {text!r}; give the bus before --ray"
        )
    return text


def report(status: BusStatus) -> str:
    """Lay out a status, with the pools beside the bus."""
    pools = [describe_pool(pool) for pool in read_pools(status.name)]
    return status_text(status) + ("\n\n" + "\n".join(pools) if pools else "")


def run(arguments: argparse.Namespace) -> int:
    """Print the status; 1 for unaccounted trajectories."""
    if arguments.ray is not None:
        return _show_nodes(arguments)
    status = read_status(arguments.name)
    if arguments.json:
        print_json(msgspec.to_builtins(status) | {"pools": read_pools(arguments.name)})
    else:
        print(report(status))
    if not status.ledger.balanced:
        raise RuntimeError(
            f"the ledger of bus {status.name!r} does not balance: "
            f"{show_count(status.ledger.unreadable)} committed trajectories cannot be found; the "
            "next consumer counts them as corrupt; look for a process that writes through a view"
        )
    return 0


def _show_nodes(arguments: argparse.Namespace) -> int:
    """Delegate to the relay's command, known only by its entry point."""
    for entry in importlib.metadata.entry_points(group="shmbus.commands", name="relay"):
        found: int = entry.load().show_nodes(
            arguments.name, None if arguments.ray == "auto" else arguments.ray, json=arguments.json
        )
        return found
    print("shmbus status --ray: expected the command relay of this package", file=sys.stderr)
    return 1
