"""``shmbus events``: the history of a bus, or of a single group."""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from shmbus.base import limits
from shmbus.base.arguments import TRAIN
from shmbus.base.format import several
from shmbus.cli._options import Commands, add_command, print_json, refuse_given, text, whole
from shmbus.inspect.history import EventList, read_events, read_group
from shmbus.inspect.text import events_text, history_text

_DEFAULT_LIMIT = 50
#: Seconds between two polls of --follow.
_FOLLOW_S = 0.5


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "events",
        run,
        help="show the events of a bus, or of one group",
        description="Shows processes that came, left and died, pauses, policy versions, and the "
        "fate of groups, from the daemon's memory: the last 8,192 group events and 1,024 further "
        "events. With --group: the group's state, the producer and time of every sample, failed "
        "attempts with reasons, the holder. Exit status 1 without recorded events.",
        examples=[
            "shmbus events run1",
            "shmbus events run1 --follow --json | jq -c 'select(.kind == \"producer_died\")'",
            "shmbus events run1 --group gsm8k-17 --round 3",
        ],
        json=True,
    )
    parser.add_argument(
        "--limit",
        metavar="K",
        type=whole(1, limits.MAX_EVENTS_SHOWN),
        help=f"events to show at most (default {_DEFAULT_LIMIT})",
    )
    parser.add_argument(
        "--follow", action="store_true", help="follow new events; with --json, one line per event"
    )
    parser.add_argument("--group", metavar="ID", type=text, help="the history of this group")
    parser.add_argument(
        "--round", metavar="N", type=whole(0, (1 << 63) - 1), help="its round, where it has one"
    )
    parser.add_argument("--split", metavar="S", type=text, help="its split (default train)")


def run(arguments: argparse.Namespace) -> int:
    """Print events, or a group's history."""
    if arguments.group is not None:
        refuse_given(arguments, ("limit", "follow"), "expected without --group, which shows all")
        return _run_group(arguments)
    refuse_given(arguments, ("round", "split"), "expected with --group; add --group ID")
    arguments.limit = arguments.limit or _DEFAULT_LIMIT
    if arguments.follow:
        return _follow(arguments)
    found = read_events(arguments.name, limit=arguments.limit)
    if arguments.json:
        print_json(found)
    else:
        _print(found, 0)
    if found.problem:
        raise RuntimeError(found.problem)
    return 0


def _print(found: EventList, after: int) -> None:
    if found.missed and after:
        print(f"  ({several(found.missed, 'event')} before these not shown)")
    for line in events_text(found.events):
        print(line)


def _follow(arguments: argparse.Namespace) -> int:
    after = 0
    while True:
        found = read_events(arguments.name, after=after, limit=arguments.limit)
        if found.problem:
            raise RuntimeError(found.problem)
        if arguments.json:
            for event in found.events:
                print(msgspec.json.encode(event).decode())
        else:
            _print(found, after)
        sys.stdout.flush()
        after = found.newest
        time.sleep(_FOLLOW_S)


def _run_group(arguments: argparse.Namespace) -> int:
    found = read_group(
        arguments.name, arguments.group, round=arguments.round, split=arguments.split or TRAIN
    )
    if arguments.json:
        print_json(found)
    else:
        print(history_text(arguments.group, found))
    return 1 if found.source == "none" else 0
