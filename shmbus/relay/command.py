"""``shmbus relay NAME``: start, show and end a relay on Ray; registered by an entry point.

Invariant: importing this module loads nothing of the extra; `run` does.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shmbus import errors
from shmbus.base.arguments import TRAIN
from shmbus.base.format import printable, show_count, show_duration, show_size, table
from shmbus.cli._options import (
    Commands,
    add_command,
    bus_name,
    path,
    print_json,
    refuse_given,
    require_extra,
    seconds,
    text,
    whole,
)

if TYPE_CHECKING:
    from shmbus.relay.coordinator_party import RelayNote
    from shmbus.relay.weights_party import WeightsNote

#: Group policy options: name, kind, help text.
_POLICY: Final = (
    ("group-timeout", "SECONDS", "seconds that a group may stay incomplete"),
    ("max-policy-lag", "COUNT", "versions that a group may be behind"),
    ("sample-retries", "COUNT", "how often producers are asked again for a sample that failed"),
    ("retry-timeout", "SECONDS", "seconds that they may take for it"),
)


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "relay",
        run,
        help="carry a bus's groups between the nodes of a Ray cluster",
        description="Starts actors that carry complete groups from the rollout workers' bus of "
        "every node to the trainers' buses; they go on when this command has ended, and Ray "
        "starts them again when they die. --status shows them; --join, --forget and --stop change "
        "them.",
        examples=[
            "shmbus relay run1 --trainer run1-trainer --weights",
            "shmbus relay run1@rollout --trainer run1-trainer@learner --ray 10.0.0.1:6379",
            "shmbus relay run1 --status",
            "shmbus relay run1 --join",
            "shmbus relay run1 --forget relay.run1.run1-trainer@node-10.0.0.7",
            "shmbus relay run1 --stop",
        ],
        json=True,
        bus=False,
    )
    parser.add_argument(
        "name", metavar="NAME[@RESOURCE]", type=_spec,
        help="the rollout workers' bus, and its nodes' resource",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--trainer", metavar="NAME[@RESOURCE]", action="append", default=[], type=_spec,
        help="a trainer's bus; once for each",
    )  # fmt: skip
    what.add_argument("--status", action="store_true", help="show the relay, and all that it knows")
    what.add_argument("--stop", action="store_true", help="end the relay")
    what.add_argument(
        "--join", action="store_true", help="take on nodes that have come, with NAME[@RESOURCE]"
    )
    what.add_argument(
        "--forget",
        metavar="ADDRESS",
        type=text,
        help="go on without a peer whose node will not come back",
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", type=text, help="of the cluster (default: this node's)"
    )
    for option, kind, meaning in _POLICY:
        type_ = seconds(endless=True) if kind == "SECONDS" else whole(0)
        parser.add_argument(f"--{option}", type=type_, metavar=kind, help=meaning)
    parser.add_argument(
        "--on-timeout", choices=("wait", "drop", "partial"),
        help="action for a group at its --group-timeout (default drop)",
    )  # fmt: skip
    parser.add_argument(
        "--on-failure", choices=("drop", "partial"),
        help="action for a group with a sample that failed for good (default drop)",
    )  # fmt: skip
    parser.add_argument(
        "--skip-zero-variance", action="store_true", default=None,
        help="drop groups whose scores are all equal, at their sources",
    )  # fmt: skip
    parser.add_argument(
        "--release", choices=("acknowledged", "put"),
        help="when a source lets go of a record (default: acknowledged)",
    )  # fmt: skip
    parser.add_argument(
        "--weights", action="store_true", default=None,
        help="carry the first trainer's weights to the rollout nodes, into a pool of NAME",
    )  # fmt: skip
    parser.add_argument(
        "--keep", metavar="DIR", type=path,
        help="keep unacknowledged samples on the trainer nodes' disks, for a reboot",
    )  # fmt: skip
    parser.add_argument(
        "--keep-sync", type=seconds(0), metavar="SECONDS",
        help="longest delay of a write to disk in seconds; 0: write before the put (default: 1)",
    )  # fmt: skip


def _spec(word: str) -> str:
    """Parse a bus and its nodes' resource; an impossible value raises a usage error."""
    bus, at, resource = word.partition("@")
    bus_name(bus)
    if at and not resource:
        raise argparse.ArgumentTypeError(f"expected NAME or NAME@RESOURCE, got {word!r}")
    return word


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Return 1 with a hint if the extra is missing, 2 if a trainer is missing."""
    names = [each.replace("-", "_") for each, _, _ in _POLICY]
    names += ["on_timeout", "on_failure", "skip_zero_variance", "release", "weights", "keep"]
    names += ["keep_sync"]
    if not arguments.trainer:
        refuse_given(arguments, names, "expected with --trainer NAME, at the start of a relay")
    if not arguments.status:
        refuse_given(arguments, ("json",), "expected with --status; leave it out")
    if arguments.keep is None:
        refuse_given(arguments, ("keep_sync",), "expected with --keep; add --keep DIR")
    require_extra("ray", "ray")
    from shmbus.relay import on_ray

    name = arguments.name.partition("@")[0]
    if arguments.status:
        relay = on_ray.find(name, arguments.ray)
        note, carried, silent = relay.status(), None, ""
        try:
            carried = relay.weights()
        except errors.DaemonUnavailableError as error:
            silent = str(error)
        actors = relay.describe()
        if arguments.json:
            said = msgspec.to_builtins(note)
            shown = ("address", "kind", "bus", "begun", "error", "unwritten_ends", "held_prompt")
            said["actors"] = [{k: each[k] for k in shown if k in each} for each in actors]
            print_json({**said, "weights": msgspec.to_builtins(carried), "no_weights": silent})
        else:
            print(show_relay(name, note))
            for each in actors:
                if "error" in each and each.get("kind") in ("source", "sink"):
                    print(f"{each['address']}: {printable(each['error'])}")
                if held := each.get("held_prompt"):
                    print(held_text(held))
            if carried is not None or silent:
                print("\n" + (silent if carried is None else show_weights(carried)))
    elif arguments.stop:
        on_ray.find(name, arguments.ray).stop()
        print(f"relay of bus {name} has ended; what it had not released is in its sources' rings")
    elif arguments.join:
        spec = arguments.name if "@" in arguments.name else None
        joined = on_ray.find(name, arguments.ray).join(spec)
        print(f"relay of bus {name} has {len(joined)} more actors:")
        print("\n".join(f"  {address}" for address in joined))
    elif arguments.forget:
        try:
            on_ray.find(name, arguments.ray).forget(arguments.forget)
        except KeyError as error:
            print(f"shmbus relay: {error.args[0]}", file=sys.stderr)
            return 1
        print(f"relay of bus {name} goes on without {arguments.forget}")
    elif not arguments.trainer:
        raise ValueError("expected --trainer NAME, where groups go")
    else:
        given = {each: getattr(arguments, each) for each in names}
        relay = on_ray.start(
            arguments.name, arguments.trainer, address=arguments.ray,
            **{each: value for each, value in given.items() if value is not None},
        )  # fmt: skip
        print(f"relay of bus {name} relays by {len(relay.addresses)} actors:")
        print("\n".join(f"  {address}" for address in relay.addresses))
    return 0


def show_nodes(name: str, address: str | None, *, json: bool) -> int:
    """Print the ledgers of a relay's buses; return 1 if a ledger is unbalanced or missing."""
    require_extra("ray", "ray")
    from shmbus.relay import on_ray

    nodes = on_ray.find(name, address).ledgers()
    if json:
        print_json(nodes)
    else:
        print(ledgers_text(name, nodes))
    return 0 if all(each["balanced"] for each in nodes) else 1


def ledgers_text(name: str, nodes: list[dict[str, Any]]) -> str:
    """Return the ledgers of a relay's buses as text, with the sums of both sides."""
    lines = [f"relay of bus {name}: the ledgers of {show_count(len(nodes))} buses"]
    kinds = (
        "committed",
        "acknowledged",
        "leased",
        "stashed",
        "in_ring",
        "asked",
        "in_hand",
        "dropped",
    )
    rows, sums = [], {"source": dict.fromkeys(kinds, 0), "sink": dict.fromkeys(kinds, 0)}
    reasons: dict[str, Counter[str]] = {"source": Counter(), "sink": Counter()}
    silent = []
    for each in nodes:
        ledger = each["ledger"]
        if ledger is None:
            silent.append(f"{each['address']} does not say its ledger: {each['error']}")
            continue
        counts = {kind: ledger[kind] for kind in kinds[:-1]}
        counts["dropped"] = sum(ledger["dropped"].values())
        for kind in kinds:
            sums[each["kind"]][kind] += counts[kind]
        reasons[each["kind"]].update(ledger["dropped"])
        rows.append((each["kind"], each["bus"], *(show_count(counts[k]) for k in kinds),
                     "yes" if each["balanced"] else "NO", each["address"]))  # fmt: skip
    for kind in sums:
        rows.append((kind, "all", *(show_count(sums[kind][k]) for k in kinds), "", ""))
    head = ("", "bus", *(f"{kind.replace('_', ' ')}>" for kind in kinds), "balances", "address")
    lines += [table(head, rows, indent="")]
    for kind, counted in reasons.items():
        if counted:
            said = ", ".join(f"{show_count(n)} {reason}" for reason, n in sorted(counted.items()))
            lines.append(f"dropped by {kind}s: {said}")
    return "\n".join(lines + silent)


def show_relay(name: str, note: RelayNote) -> str:
    """Return a relay as text: records by place, and silent peers."""
    lines = [
        f"relay of bus {name}: {show_count(note.announced)} announced in incomplete groups, "
        f"{show_count(note.ready)} wait for a trainer, {show_count(note.assigned)} under way"
    ]
    dropped = ", ".join(f"{show_count(n)} {reason}" for reason, n in sorted(note.dropped.items()))
    if dropped:
        lines.append(f"dropped before they crossed: {dropped}")
    if note.asked or note.given_up:
        lines.append(
            f"failures: {show_count(note.asked)} samples are asked for again, "
            f"{show_count(note.given_up)} groups were given up"
        )
    if note.lost:
        lines.append(f"lost with buses that have gone: {show_count(note.lost)}")
    if note.refused:
        lines.append(f"refused messages: {show_count(note.refused)}")
        lines += [f"  {printable(why)}" for why in note.why_refused]
    head = (
        "", "bus", "held>", "under way>", "settled>", "oldest>", "version>", "heard>", "clock>",
        "address",
    )  # fmt: skip
    rows = [
        (
            "trainer" if peer.is_sink else "source",
            printable(peer.name),
            show_count(peer.held),
            show_count(peer.moving),
            show_count(peer.settled),
            "" if peer.oldest_s is None else show_duration(peer.oldest_s),
            str(peer.policy_version),
            show_duration(peer.heard_s),
            f"{peer.clock_offset_s:+.3g} s",
            peer.address,
        )
        for peer in note.peers
    ]
    lines += ["", table(head, rows, indent="")]
    if note.waiting:
        groups = [
            (
                _group_text(each.instance_id, each.round, each.split),
                f"{each.here} of {each.size}",
                show_duration(each.age_s),
                ", ".join(map(str, each.missing)),
                ", ".join(each.at),
            )
            for each in note.waiting
        ]
        titles = ("waits longest", "there>", "for>", "missing", "at")
        lines += ["", table(titles, groups, indent="")]
    lines += [f"{address} has not answered" for address in note.missing]
    lines += [f"split {printable(s)} waits for the first trainer's bus" for s in note.unplaced]
    lines += [
        f"bus {printable(peer.name)} is paused: {printable(peer.paused)}"
        for peer in note.peers
        if peer.paused is not None
    ]
    return "\n".join(lines)


def _group_text(instance_id: str, round: int | None, split: str) -> str:
    return (
        printable(instance_id)
        + ("" if round is None else f" round {round}")
        + ("" if split == TRAIN else f" of {printable(split)}")
    )


def held_text(held: dict[str, Any]) -> str:
    """Return the oldest prompt in a node's hands as text."""
    name = _group_text(held["instance_id"], held["round"], held["split"])
    return f"prompt {name} waits for {held['at']}: {show_duration(held['age_s'])} since its offer"


def show_weights(note: WeightsNote) -> str:
    """Return the weights of a relay as text: versions by node, and their engines."""
    newest = "no version yet" if note.version is None else f"version {note.version}"
    size = f", {show_size(note.size)}" if note.version is not None else ""
    patch = f", as a patch {show_size(note.patch)}" if note.patch else ""
    lines = [f"weights of bus {printable(note.bus)}: {newest}{size}{patch}"]
    lines += [printable(note.error)] if note.error else []
    mirrors, engines = [], []
    for mirror in note.mirrors:
        never = "" if note.error else "never"
        heard = never if mirror.heard_s is None else show_duration(mirror.heard_s)
        version = "" if mirror.version is None else str(mirror.version)
        mirrors.append((version, str(mirror.pieces or ""), heard, mirror.address, mirror.upstream))
        lines += [f"{mirror.address}: {printable(mirror.error)}"] if mirror.error else []
        for each in mirror.engines:
            runs = "" if each.version is None else str(each.version)
            refused = "" if each.refused is None else f"{each.refused}: {printable(each.error)}"
            state = "yes" if each.alive else "no"
            engines.append((printable(each.label), state, runs, refused, mirror.address))
    lines += ["", table(("has>", "pieces>", "heard>", "mirror", "gets from"), mirrors, indent="")]
    if engines:
        titles = ("engine", "alive", "runs>", "refused", "at")
        lines += ["", table(titles, engines, indent="")]
    return "\n".join(lines)
