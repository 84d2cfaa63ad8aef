"""``shmbus record`` and ``shmbus replay``: live traffic to disk, and back at a chosen speed."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from types import FrameType

from shmbus._format import printable, several, show_count, show_duration, show_size
from shmbus.cli._options import (
    Commands,
    add_command,
    bus_name,
    number_of,
    print_json,
    seconds,
    whole,
)
from shmbus.store import capture


def add_parser(commands: Commands) -> None:
    """Add both commands to the parser of the command line."""
    record = add_command(
        commands,
        "record",
        run_record,
        help="record live traffic of a bus to disk",
        description="Records what producers commit from now on, until Ctrl-C, SIGTERM or a limit. "
        "It only reads: no process waits for it. Trajectories that a fast consumer acknowledges "
        "before they are read are missed, and counted.",
        examples=[
            "shmbus record run1 /data/traffic --seconds 60",
            "shmbus record run1 /data/traffic --records 10000",
        ],
        json=True,
    )
    record.add_argument("directory", metavar="DIR", help="a directory that does not exist yet")
    record.add_argument("--seconds", type=seconds(), help="how long at the most")
    record.add_argument("--records", type=whole(1), help="end after so many trajectories")
    replay = add_command(
        commands,
        "replay",
        run_replay,
        help="put recorded traffic onto a bus, at a chosen speed",
        description="Puts the trajectories of a capture, or of a snapshot, onto a bus in their "
        "order, with the pauses that were between them. They are new trajectories there, of one "
        "producer.",
        examples=[
            "shmbus replay /data/traffic run2",
            "shmbus replay /data/traffic run2 --speed 10",
            "shmbus replay /data/traffic run2 --speed max",
        ],
        json=True,
        bus=False,
    )
    replay.add_argument("directory", metavar="DIR", help="the capture or snapshot")
    replay.add_argument("name", metavar="NAME", type=bus_name, help="a bus that exists")
    replay.add_argument(
        "--speed",
        type=_speed,
        default=1.0,
        help="2 is twice as fast as it was; max: as fast as the bus takes it (default 1)",
    )
    replay.add_argument(
        "--timeout", type=seconds(), help="seconds to wait for space (default: for ever)"
    )


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    value = number_of(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0, or max, got {text!r}")
    return value


def run_record(arguments: argparse.Namespace) -> int:
    """Record until a limit or a signal; the recording is kept either way."""
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"recording bus {printable(arguments.name)}; Ctrl-C ends it", file=sys.stderr)
    found = capture.record(
        arguments.name,
        arguments.directory,
        seconds=arguments.seconds,
        records=arguments.records,
        stop=lambda: stopped,
    )
    if arguments.json:
        print_json(found)
        return 0
    size = sum(part.nbytes for part in found.parts)
    print(
        f"{several(found.records, 'trajectory')} ({show_size(size)}) of "
        f"{show_duration(found.seconds)} in {printable(arguments.directory)}"
    )
    if found.missed:
        print(f"{show_count(found.missed)} more were released before they could be read")
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay to the end."""
    done = capture.replay(
        arguments.directory, arguments.name, speed=arguments.speed, timeout=arguments.timeout
    )
    if arguments.json:
        print_json(done)
        return 0
    rate = done.records / done.seconds if done.seconds else 0.0
    print(
        f"{several(done.records, 'trajectory')} in {show_duration(done.seconds)} "
        f"({show_count(rate)}/s)"
    )
    if arguments.speed is not None and done.late_s > 1:
        print(f"up to {show_duration(done.late_s)} late: the bus was full, or too slow")
    return 0
