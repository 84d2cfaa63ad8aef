"""``shmbus gc``: lists files that no living process uses, and removes them only with ``--yes``."""

from __future__ import annotations

import argparse
import sys

from shmbus import errors
from shmbus.base.format import printable, several, show_size, table, with_notes
from shmbus.cli._options import Commands, add_command, print_json
from shmbus.inspect import leftovers

_SHOWN = {
    "removable": "abandoned",
    "in_use": "in use",
    "not_ours": "not ours",
    "unknown": "left alone",
}


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "gc",
        run,
        help="find and remove segments and sockets that no living process uses",
        description="Checks every segment and daemon socket in /dev/shm. A file without "
        "a living process, in any container, is abandoned; file locks prove abandonment, not age "
        "or pids. Lists the data to be lost, and removes only with --yes.",
        examples=[
            "shmbus gc                    # list only",
            "shmbus gc --yes              # remove everything that is abandoned",
            "shmbus gc --yes --keep-data  # but no bus that holds undelivered trajectories",
            "shmbus gc --yes run1 run2    # only these",
        ],
        json=True,
        bus=False,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these buses")
    parser.add_argument("--yes", action="store_true", help="remove abandoned files")
    parser.add_argument(
        "--keep-data",
        action="store_true",
        help="leave segments that hold undelivered trajectories, or whose content cannot be read",
    )


def run(arguments: argparse.Namespace) -> int:
    """List, and with --yes remove; 1 for a named bus without a file, or a failed removal."""
    found = leftovers.survey()
    names = set(arguments.names)
    unknown = names - {leftover.name for leftover in found}
    if not names:
        found += leftovers.foreign()
    else:
        found = [leftover for leftover in found if leftover.name in names]
    chosen = [leftover for leftover in found if leftover.verdict == "removable"]
    if arguments.keep_data:
        chosen = [leftover for leftover in chosen if leftover.undelivered == 0]
    if arguments.json:
        print_json([_for_json(leftover) for leftover in found])
    elif found or not names:
        _print(found, chosen, arguments.yes)
    for name in sorted(unknown):
        print(
            f"shmbus gc: there is no file of a bus {printable(name)!r}; `shmbus gc` lists all",
            file=sys.stderr,
        )
    removed = not arguments.yes or _remove(chosen, quiet=arguments.json)
    return 0 if removed and not unknown else 1


def _for_json(leftover: leftovers.Leftover) -> dict[str, object]:
    row = {name: getattr(leftover, name) for name in leftover.__struct_fields__}
    del row["device"], row["inode"]
    return {**row, "path": printable(leftover.path), "name": printable(leftover.name)}


def _print(found: list[leftovers.Leftover], chosen: list[leftovers.Leftover], yes: bool) -> None:
    if not found:
        print("nothing in /dev/shm is called like a bus")
        return
    rows = [
        (
            _SHOWN[leftover.verdict],
            printable(leftover.path),
            show_size(leftover.size),
            leftover.reason + _loss(leftover),
        )
        for leftover in found
    ]
    print(table(("", "file", "size>", "why"), rows, indent=""))
    if chosen and not yes:
        total = show_size(sum(leftover.size for leftover in chosen))
        print(f"\n`shmbus gc --yes` would remove {several(len(chosen), 'file')} and free {total}")
    elif not chosen:
        print("\nnothing to remove")


def _loss(leftover: leftovers.Leftover) -> str:
    if leftover.verdict != "removable" or leftover.undelivered is None:
        return ""
    if leftover.undelivered == 0:
        return "; nothing undelivered in it" if leftover.kind == "segment" else ""
    groups = ""
    if leftover.undelivered_groups is not None:
        groups = f" ({several(leftover.undelivered_groups, 'complete group')})"
    return f"; {several(leftover.undelivered, 'undelivered trajectory')}{groups} would be lost"


def _remove(chosen: list[leftovers.Leftover], *, quiet: bool) -> bool:
    """Remove leftovers in turn; True if all removals succeeded."""
    removed = []
    failures = 0
    for leftover in chosen:
        try:
            leftovers.remove(leftover)
            removed.append(leftover)
        except FileNotFoundError:
            continue  # removed by another process
        except (errors.BusBusyError, OSError) as error:
            failures += 1
            print(f"shmbus gc: {with_notes(error)}", file=sys.stderr)
    if removed and not quiet:
        freed = show_size(sum(leftover.size for leftover in removed))
        print(f"\nremoved {several(len(removed), 'file')}, freed {freed}")
    return failures == 0
