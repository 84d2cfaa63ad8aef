"""``shmbus relay NAME``: start a relay on Ray, show it, end it; found by its entry point.

Invariant: importing this loads nothing of the extra; `run` does.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING

from shmbus.cli._show import add_command, print_json, printable, show_count, show_duration, table

if TYPE_CHECKING:
    from shmbus.relay.coordinator_party import RelayNote

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "relay",
        run,
        help="carry a bus's groups between the nodes of a Ray cluster",
        description="Starts actors that carry complete groups from the rollout workers' bus of "
        "every node to the trainers' buses; they go on when this command has ended, and Ray "
        "starts them again when they die. Shows or ends them with --status, --forget and --stop.",
        examples=[
            "shmbus relay run1 --trainer run1-trainer",
            "shmbus relay run1@rollout --trainer run1-trainer@learner --ray 10.0.0.1:6379",
            "shmbus relay run1 --status",
            "shmbus relay run1 --forget relay.run1.run1-trainer@node-10.0.0.7",
            "shmbus relay run1 --stop",
        ],
        json=True,
    )
    parser.add_argument(
        "name", metavar="NAME[@RESOURCE]", help="the rollout workers' bus, and its nodes' resource"
    )
    parser.add_argument(
        "--trainer", metavar="NAME[@RESOURCE]", action="append", default=[],
        help="a trainer's bus; once for each",
    )  # fmt: skip
    parser.add_argument("--ray", metavar="ADDRESS", help="of the cluster (default: this node's)")
    parser.add_argument(
        "--release", choices=("acknowledged", "put"), default="acknowledged",
        help="when a source lets go of a record (default: acknowledged)",
    )  # fmt: skip
    parser.add_argument(
        "--transport", choices=("ray", "direct"), default="ray",
        help="how bytes go: as Ray's objects, or over TCP connections of their own (default: ray)",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="show the relay, and all that it knows")
    what.add_argument("--stop", action="store_true", help="end the relay")
    what.add_argument(
        "--forget", metavar="ADDRESS", help="go on without a peer whose node will not come back"
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; 1 with a hint where the extra is not installed, 2 where a trainer is missing."""
    if importlib.util.find_spec("ray") is None:
        print(
            "shmbus relay needs Ray; install the extra on every node: pip install 'shmbus[ray]'",
            file=sys.stderr,
        )
        return 1
    from shmbus.relay import on_ray

    name = arguments.name.partition("@")[0]
    if arguments.status:
        note = on_ray.find(name, arguments.ray).status()
        if arguments.json:
            print_json(note)
        else:
            print(show_relay(name, note))
    elif arguments.stop:
        on_ray.find(name, arguments.ray).stop()
        print(f"relay of bus {name} has ended; what it had not released is in its sources' rings")
    elif arguments.forget:
        on_ray.find(name, arguments.ray).forget(arguments.forget)
        print(f"relay of bus {name} goes on without {arguments.forget}")
    elif not arguments.trainer:
        print("shmbus relay: expected --trainer NAME, where groups go", file=sys.stderr)
        return 2
    else:
        relay = on_ray.start(
            arguments.name,
            arguments.trainer,
            release=arguments.release,
            transport=arguments.transport,
            address=arguments.ray,
        )
        print(f"relay of bus {name} relays by {len(relay.addresses)} actors:")
        print("\n".join(f"  {address}" for address in relay.addresses))
    return 0


def show_relay(name: str, note: RelayNote) -> str:
    """Return a relay as text: what is where, and who is silent."""
    lines = [
        f"relay of bus {name}: {show_count(note.announced)} announced in incomplete groups, "
        f"{show_count(note.ready)} wait for a trainer, {show_count(note.assigned)} under way"
    ]
    dropped = ", ".join(f"{show_count(n)} {reason}" for reason, n in sorted(note.dropped.items()))
    if dropped:
        lines.append(f"dropped before they crossed: {dropped}")
    if note.lost:
        lines.append(f"lost with buses that have gone: {show_count(note.lost)}")
    if note.refused:
        lines.append(f"refused: {show_count(note.refused)}; the coordinator's log says why")
    head = ("", "bus", "held>", "under way>", "settled>", "version>", "heard>", "clock>", "address")
    rows = [
        (
            "trainer" if peer.is_sink else "source",
            printable(peer.name),
            show_count(peer.held),
            show_count(peer.moving),
            show_count(peer.settled),
            str(peer.policy_version),
            show_duration(peer.heard_s),
            f"{peer.clock_offset_s:+.3g} s",
            peer.address,
        )
        for peer in note.peers
    ]
    lines += ["", table(head, rows, indent="")]
    lines += [f"{address} has not answered" for address in note.missing]
    lines += [
        f"bus {printable(peer.name)} is paused: {printable(peer.paused)}"
        for peer in note.peers
        if peer.paused is not None
    ]
    return "\n".join(lines)
