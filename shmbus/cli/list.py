"""``shmbus list``: every bus on this machine, one a line."""

from __future__ import annotations

import argparse

import msgspec

from shmbus import errors
from shmbus.base.format import printable, show_count, show_size, table
from shmbus.cli._options import Commands, add_command, print_json
from shmbus.inspect.status import read_status
from shmbus.pool.pool_status import PoolStatus, describe_pool, read_pools
from shmbus.segment.names import bus_names


class BusLine(msgspec.Struct, frozen=True):
    """A bus; an unreadable bus leaves everything but name and problem None."""

    name: str
    #: Bytes for records.
    capacity: int | None = None
    fill: float | None = None
    #: Trajectories committed and neither acknowledged nor dropped.
    undelivered: int | None = None
    producers: int | None = None
    #: The reader, "" without a reader.
    collector: str | None = None
    problem: str | None = None
    #: Slot pools beside the bus, such as weights.
    pools: list[PoolStatus] = []


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    add_command(
        commands,
        "list",
        run,
        help="list the buses of this machine",
        description="Lists every bus in /dev/shm with its size, fill, producers and collector, and "
        "slot pools such as weights, also of buses that are gone.",
        examples=["shmbus list", "shmbus list --json | jq -r '.[].name'"],
        json=True,
        bus=False,
    )


def _line(name: str, pools: list[PoolStatus]) -> BusLine | None:
    try:
        status = read_status(name, walk=False)
    except errors.BusNotFoundError:
        return None  # removed after the listing
    except (errors.LayoutMismatchError, PermissionError, ValueError) as error:
        return BusLine(printable(name), problem=printable(str(error)), pools=pools)
    collector = status.collector
    return BusLine(
        name=status.name,
        capacity=status.capacity,
        fill=status.fill,
        undelivered=status.ledger.undelivered,
        producers=sum(producer.state == "alive" for producer in status.producers),
        collector=f"{collector.label} (pid {collector.pid})" if collector.alive else "",
        pools=pools,
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list, even if empty."""
    pools = read_pools()
    lines = [
        line
        for name in bus_names()
        if (line := _line(name, [pool for pool in pools if pool.bus == name])) is not None
    ]
    if arguments.json:
        print_json(lines)
        return 0
    if not lines:
        print("there is no bus on this machine; `shmbus.Bus.create(name)` makes one")
    head = ("name", "size>", "fill>", "undelivered>", "producers>", "collector")
    rows = [
        (
            line.name,
            show_size(line.capacity),
            f"{line.fill:.0%}",
            show_count(line.undelivered or 0),
            str(line.producers),
            line.collector or "-",
        )
        for line in lines
        if line.capacity is not None
    ]
    if rows:
        print(table(head, rows, indent=""))
    for line in lines:
        if line.problem is not None:
            print(f"{line.name}: {line.problem}")
    if pools:
        print("\nbeside the buses; `shmbus weights NAME` shows more:")
        print("\n".join(f"  {pool.bus}: {describe_pool(pool)}" for pool in pools))
    return 0
