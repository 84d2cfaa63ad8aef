"""``shmbus snapshot`` and ``shmbus restore``: everything undelivered to disk, and back."""

from __future__ import annotations

import argparse

import msgspec

from shmbus.base.arguments import parse_size
from shmbus.base.format import printable, several, show_count, show_size
from shmbus.cli._options import Commands, add_command, bus_name, checked, path, print_json
from shmbus.control.ask import ask_snapshot
from shmbus.store import snapshot


def add_parser(commands: Commands) -> None:
    """Add the commands `snapshot` and `restore` to the parser of the command line."""
    take = add_command(
        commands,
        "snapshot",
        run_snapshot,
        help="write everything undelivered on a bus to disk",
        description="Writes every trajectory that is committed and not acknowledged to a new "
        "directory of safetensors files, with the ledger and the producers' numbers. The bus "
        "stays as it is. A daemon writes the snapshot by itself, and its trainers wait for that "
        "long; a consumer that reads the bus itself must be stopped first. Producers may go on; "
        "trajectories that they commit after the beginning are not included.",
        examples=["shmbus snapshot run1 /data/run1-before-reboot"],
        json=True,
    )
    take.add_argument("directory", metavar="DIR", type=path, help="a new or empty directory")
    back = add_command(
        commands,
        "restore",
        run_restore,
        help="make a bus from a snapshot",
        description="Makes a new bus from a snapshot: its records with their producers' numbers, "
        "and its ledger. The bus appears complete or not at all.",
        examples=[
            "shmbus restore /data/run1-before-reboot",
            "shmbus restore /data/run1-before-reboot run2 --capacity 1GiB",
        ],
        json=True,
        bus=False,
    )
    back.add_argument("directory", metavar="DIR", type=path, help="the snapshot")
    back.add_argument(
        "name", metavar="NAME", type=bus_name, nargs="?", help="the bus (default: as it was called)"
    )
    back.add_argument(
        "--again", action="store_true", help="also a snapshot that was restored before"
    )
    back.add_argument(
        "--capacity",
        metavar="SIZE",
        type=checked(parse_size),
        help="bytes for records (default: as it was)",
    )


def run_snapshot(arguments: argparse.Namespace) -> int:
    """Take a snapshot, and print its content."""
    written = ask_snapshot(arguments.name, arguments.directory)
    if written is None:
        manifest = snapshot.take(arguments.name, arguments.directory)
    else:
        manifest = msgspec.json.decode(written, type=snapshot.Manifest)
    if arguments.json:
        print_json(manifest)
    else:
        size = sum(part.nbytes for part in manifest.parts)
        lost = f"; {show_count(manifest.unreadable)} are damaged" if manifest.unreadable else ""
        print(
            f"{several(manifest.records, 'trajectory')} of bus {printable(manifest.bus)} "
            f"({show_size(size)}) in {printable(arguments.directory)}{lost}"
        )
    return 0


def run_restore(arguments: argparse.Namespace) -> int:
    """Restore, and print the content of the bus."""
    manifest = snapshot.restore(
        arguments.directory, arguments.name, capacity=arguments.capacity, again=arguments.again
    )
    if arguments.json:
        print_json(manifest)
    else:
        name = manifest.bus if arguments.name is None else arguments.name
        print(
            f"bus {printable(name)} is back with {several(manifest.records, 'trajectory')}, at "
            f"policy version {manifest.policy_version}"
        )
    return 0
