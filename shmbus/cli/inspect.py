"""``shmbus inspect``: the incomplete groups of a bus, sample by sample."""

from __future__ import annotations

import argparse

from shmbus.base import limits
from shmbus.cli._options import Commands, add_command, print_json, whole
from shmbus.inspect.groups import read_groups
from shmbus.inspect.text import groups_text
from shmbus.inspect.undelivered import MAX_RECORDS

_DEFAULT_GROUPS = 40


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "inspect",
        run,
        help="show incomplete groups, sample by sample",
        description="Shows the samples of incomplete groups: producer and time, failures, retry "
        "requests. The daemon supplies the groups, or a read-only walk over the records without "
        "a daemon. Exit status 1 for unknown groups.",
        examples=[
            "shmbus inspect run1",
            "shmbus inspect run1 --groups 100 --json | jq '.groups[].cells'",
        ],
        json=True,
    )
    parser.add_argument(
        "--groups",
        metavar="N",
        nargs="?",
        const=_DEFAULT_GROUPS,
        default=_DEFAULT_GROUPS,
        type=whole(1, limits.MAX_GROUPS_SHOWN),
        help=f"the N oldest groups (default {_DEFAULT_GROUPS})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print incomplete groups; 1 if unknown."""
    found = read_groups(arguments.name, arguments.groups, walk_records=MAX_RECORDS)
    if arguments.json:
        print_json(found)
    else:
        print(groups_text(found))
    if found.source == "none":
        raise RuntimeError(found.problem)
    return 0
