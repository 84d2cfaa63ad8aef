"""A version of weights to mirrors on 1, 2, 4 and 8 nodes: ``python -m bench.mirrors``.

Each node is a process in a network namespace of its own, whose link has the given rate, where root
may make such; else all of them are on the loopback interface, and the figures are those of this
machine's memory. *Beside* is what one node takes. All nodes share this machine's processors.
Of four and more, one mirror is stopped in the middle of a version, and then killed: what the others
take.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import machine, processes, program
from bench.row import Row, skipped
from shmbus import BusNotFoundError, LayoutMismatchError
from shmbus._arguments import parse_size
from shmbus.pool import Piece, PoolPublisher, PoolSpec, put_piece, read_pool, unlink_pool
from shmbus.relay.direct import Direct, Endpoint
from shmbus.relay.host import HostMailbox
from shmbus.relay.mirror_party import POOL_KIND, MirrorParty
from shmbus.relay.party import run_party
from shmbus.relay.weights_party import WeightsParty

__all__ = ["main"]

NODES: Final = (1, 2, 4, 8)
#: As many nodes as one is harmed of.
HARMED_OF: Final = 4
TURNS: Final = 3
SOURCE: Final = "weights"
#: Of the elements, how many change for a patch.
SHARE: Final = 0.01
#: Seconds until a version counts as lost.
DEADLINE_S: Final = 120.0
#: Of a process that enters a network namespace.
_CLONE_NEWNET: Final = 0x40000000


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def network(nodes: int, rate: str) -> Iterator[list[str]]:
    """Have namespaces of which each has one link of this rate to a bridge; their names."""
    prefix = f"shb{os.getpid()}"
    switch = f"{prefix}s"
    names = [f"{prefix}n{number}" for number in range(nodes)]
    try:
        for name in [switch, *names]:
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names):
            peer = f"p{number}"
            _run("ip", "link", "add", "name", "eth0", "netns", name,
                 "type", "veth", "peer", "name", peer, "netns", switch)  # fmt: skip
            _run("ip", "-n", switch, "link", "set", peer, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{host_of(number)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root",
                 "tbf", "rate", rate, "burst", "1mb", "latency", "20ms")  # fmt: skip
        yield names
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def host_of(number: int) -> str:
    """Return a node's address."""
    return f"10.203.0.{number + 1}"


def be_node(pipe: Any, namespace: str, host: str, bus: str, mirrors: list[str]) -> None:
    """Be the trainer's side or a mirror, for ever; others' endpoints come through the pipe."""
    if namespace:
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"entering the network namespace {namespace}")
    address = SOURCE if mirrors else bus
    direct = Direct(address, host, lambda _: None, lambda packed, payload: box.put(packed, payload))
    box = HostMailbox(address, direct)
    pipe.send(tuple(direct.endpoint))
    for endpoint in pipe.recv():
        if endpoint[0] != address:
            direct.learn(Endpoint(*endpoint))

    def make() -> Any:
        return WeightsParty(bus, box, mirrors) if mirrors else MirrorParty(bus, box, SOURCE)

    run_party(make, box, lambda: True)


def _sent_bytes(pid: int) -> int:
    """Return how many bytes a process's node has sent over its link."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    return 0


class Cluster:
    """A trainer's pool, and mirrors of it."""

    def __init__(self, nodes: int, size: int, namespaces: list[str]) -> None:
        prefix = f"bench-mirrors-{os.getpid()}"
        self.size, self.trainer = size, f"{prefix}.t"
        self.buses = [f"{prefix}.m{number}" for number in range(nodes)]
        self.payload = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        self.versions = itertools.count(1)
        spec = PoolSpec(slot_bytes=size, patch_bytes=size // 12, meta_bytes=4096)
        self.publisher = PoolPublisher(self.trainer, POOL_KIND, spec=spec)
        self.children: list[Any] = []
        pipes = []
        for number, bus in enumerate([self.trainer, *self.buses]):
            ours, theirs = processes.context().Pipe()
            namespace = namespaces[number] if namespaces else ""
            host = host_of(number) if namespaces else "127.0.0.1"
            mirrors = [] if number else self.buses
            child = processes.context().Process(
                target=be_node, args=(theirs, namespace, host, bus, mirrors), daemon=True
            )
            child.start()
            self.children.append(child)
            pipes.append(ours)
        endpoints = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(endpoints)

    def publish(
        self, *, patch: bool, harmed: int | None = None, harm: int = 0, after_s: float = 0.0
    ) -> tuple[float, float]:
        """Publish; return the seconds until each node has it, and the sender's bytes over all.

        A `harmed` one gets a signal in the middle, and is not waited for.
        """
        version = next(self.versions)
        changed = np.random.default_rng(version).integers(
            0, self.size // 2, int(self.size // 2 * SHARE)
        )
        self.payload.view(np.uint16)[changed] ^= 1
        before = _sent_bytes(self.children[0].pid)
        write = self.publisher.begin(version, self.size, meta=b"" if patch else b"%d" % version,
                                     patch=patch)  # fmt: skip
        assert write is not None
        with write:
            put_piece(write, Piece(0, 1, self.size, self.size, 2), self.payload)
        began = time.perf_counter()
        others = [bus for number, bus in enumerate(self.buses) if number != harmed]
        if harmed is not None:
            time.sleep(after_s)
            os.kill(self.children[1 + harmed].pid, harm)
        while not all(self._has(bus, version) for bus in others):
            if time.perf_counter() - began > DEADLINE_S:
                raise processes.MeasurementError(f"version {version} does not arrive")
            time.sleep(0.001)
        took_s = time.perf_counter() - began
        if harm == signal.SIGSTOP and harmed is not None:
            os.kill(self.children[1 + harmed].pid, signal.SIGCONT)
            while not self._has(self.buses[harmed], version):
                time.sleep(0.001)
        return took_s, (_sent_bytes(self.children[0].pid) - before) / self.size

    @staticmethod
    def _has(bus: str, version: int) -> bool:
        try:
            return read_pool(bus, POOL_KIND).version == version
        except (BusNotFoundError, LayoutMismatchError):
            return False

    def close(self) -> None:
        """End all of it."""
        for child in self.children:
            child.kill()
            child.join()
        for bus in self.buses:
            with contextlib.suppress(BusNotFoundError):
                unlink_pool(bus, POOL_KIND)
        self.publisher.close(remove=True)


def _measured(
    nodes: int, size: int, rate: str, turns: int
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield seconds and bytes of wholes, of patches, and of wholes while a mirror is harmed."""
    with contextlib.ExitStack() as stack:
        namespaces = stack.enter_context(network(nodes + 1, rate)) if rate else []
        cluster = Cluster(nodes, size, namespaces)
        stack.callback(cluster.close)
        for _ in range(2):
            cluster.publish(patch=False)  # until each slot has been touched
        wholes = [cluster.publish(patch=False) for _ in range(turns)]
        cluster.publish(patch=True)  # whose base says another thing of itself: a whole
        cluster.publish(patch=True)
        yield "whole", wholes
        yield "patch", [cluster.publish(patch=True) for _ in range(turns)]
        if nodes < HARMED_OF:
            return
        half_s = wholes[0][0] / 2
        for what, harm, times in (
            ("stopped", signal.SIGSTOP, turns),
            ("killed", signal.SIGKILL, 1),
        ):
            yield (
                f"whole, one {what}",
                [
                    cluster.publish(patch=False, harmed=turn % nodes, harm=harm, after_s=half_s)
                    for turn in range(times)
                ],
            )


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure each number of nodes."""
    size = (4 << 20) if options.tiny else parse_size(options.size, "size")
    turns = options.repetitions or (1 if options.tiny else TURNS)
    rate = "" if lacks_network() else options.rate
    title = "a version of {} bytes to {} nodes, {}"
    over = f"links of {rate}" if rate else "loopback"
    if why := machine.lacks(cores=2):
        return [skipped("mirrors", title.format(size, "some", over), why)]
    rows: list[Row] = []
    same: tuple[float, ...] = ()
    one: dict[str, tuple[float, ...]] = {}
    for nodes in (1, 2) if options.tiny else options.nodes:
        for what, found in _measured(nodes, size, rate, turns):
            values = tuple(seconds for seconds, _ in found)
            of_what, _, harmed = what.partition(", one ")
            if not harmed:
                one.setdefault(what, values)
                same = values if what == "whole" else same
            sent = max(share for _, share in found)
            rows.append(
                Row(
                    name=f"mirrors-{harmed or what}-{nodes}", title=title.format(size, nodes, what),
                    unit="s", values=values,
                    beside="none harmed" if harmed else "one node",
                    beside_values=same if harmed else one[of_what],
                    note=f"{over}; the sender's link carried {sent:.3f} of the version",
                    figures={"sent": sent, "rate": rate},
                )
            )  # fmt: skip
    return rows


def lacks_network() -> str:
    """Say why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"there is no {missing[0]}"
    try:
        with network(1, "1gbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses a network: {error.stderr.decode().strip()}"


def _parser() -> argparse.ArgumentParser:
    parser = program.parser_of("mirrors", __doc__)
    parser.add_argument("--size", default="256MiB", type=program.capacity, help="of a version")
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES), help="that receive")
    parser.add_argument("--rate", default="1gbit", help="of each node's link, as tc has it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("mirrors", _parser(), measure, argv)


if __name__ == "__main__":
    from bench import mirrors

    sys.exit(mirrors.main())
