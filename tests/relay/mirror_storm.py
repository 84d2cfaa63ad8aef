"""Mirrors of a pool under SIGKILL and SIGSTOP: no reader of any node sees half a version."""

import os
import signal
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

from relay.connections import open_mailbox
from relay.mirrors import Trainer, is_version, remove, version_of
from relay.relay_storm import Processes

from shmbus.errors import BusNotFoundError, BusRemovedError, LayoutMismatchError, WaitTimeoutError
from shmbus.pool import PoolReader
from shmbus.relay.mirror_party import POOL_KIND, MirrorParty
from shmbus.relay.party import run_party
from shmbus.relay.weights_party import WeightsParty

SOURCE = "weights"
#: Of a piece: versions of some MiB are of many.
PIECE_BYTES = 64 << 10


class Plan(NamedTuple):
    name: str
    directory: str
    nodes: int = 3
    versions: int = 40
    faults: int = 12
    size: int = 6 << 20
    seed: int = 0
    quiet_s: float = 60.0
    stop_s: float = 0.6

    @property
    def trainer(self) -> str:
        return f"{self.name}.t"

    @property
    def buses(self) -> list[str]:
        """The nodes' buses, also the addresses of their mirrors."""
        return [f"{self.name}.m{i}" for i in range(self.nodes)]


def work(plan: Plan, address: str) -> None:
    mailbox = open_mailbox(plan.directory, address)

    def make() -> Any:
        if address == SOURCE:
            return WeightsParty(plan.trainer, mailbox, plan.buses, PIECE_BYTES)
        return MirrorParty(address, mailbox, SOURCE)

    run_party(make, mailbox, lambda: True)


class Storm(Processes):
    """A run: parties in separate processes, trainer and engines in threads of this process."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, work)
        self.done: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def harm(self) -> None:
        address = self.rng.choice([SOURCE, *self.plan.buses])
        what = self.rng.choice(["kill", "kill", "stop", "away", "remove"])
        self.done[what] += 1
        child = self.children[address]
        if what == "stop":
            os.kill(child.pid, signal.SIGSTOP)
            time.sleep(self.rng.uniform(0.0, self.plan.stop_s))
            os.kill(child.pid, signal.SIGCONT)
        elif what == "remove" and address != SOURCE:
            remove(address)
        else:
            self.kill(address)
            if what == "away":
                time.sleep(self.rng.uniform(0.0, self.plan.stop_s))
            self.start(address)

    def engine(self, bus: str) -> None:
        """Lease the versions of a node's pool, and compare every byte."""
        reader, after = None, 0
        while not self.over.is_set():
            try:
                if reader is None:
                    reader, after = PoolReader(bus, POOL_KIND, label="engine"), 0
                with reader.latest(after=after, timeout=0.1) as lease:
                    after = lease.sequence
                    self.seen[bus] += 1
                    if not is_version(lease, self.plan.size, self.plan.seed):
                        self.faults.append(f"torn: version {lease.version} on {bus}")
                    reader.applied(lease)
            except WaitTimeoutError:
                continue
            except (BusNotFoundError, BusRemovedError, LayoutMismatchError):
                if reader is not None:
                    reader.close()
                reader = None
                time.sleep(0.02)
        if reader is not None:
            reader.close()

    def run(self) -> dict[str, Any]:
        plan, began = self.plan, time.monotonic()
        trainer = Trainer(plan.trainer, plan.size, plan.seed, timeout=plan.quiet_s)
        engines = [threading.Thread(target=self.engine, args=(bus,)) for bus in plan.buses]
        harmed = threading.Thread(target=self.harm_all)
        try:
            for address in [SOURCE, *plan.buses]:
                self.start(address)
            for thread in [*engines, harmed]:
                thread.start()
            for version in range(1, plan.versions + 1):
                trainer.publish(version)
                self.wait_for_one(version)
            harmed.join()
            self.wait_for_all(plan.versions)
        finally:
            self.end([*engines, harmed])
            for bus in plan.buses:
                remove(bus)
            trainer.close()
        return {
            "seed": plan.seed,
            "done": dict(self.done),
            "seen": dict(self.seen),
            "seconds": round(time.monotonic() - began, 1),
            "faults": self.faults,
        }

    def harm_all(self) -> None:
        for _ in range(self.plan.faults):
            if self.faults:
                return
            time.sleep(self.rng.uniform(0.0, 0.4))
            self.harm()

    def wait_for_one(self, version: int) -> None:
        """Wait for a node's version, at most for a trainer's step."""
        until = time.monotonic() + self.rng.uniform(0.0, 0.6)
        while time.monotonic() < until:
            if any(version_of(bus) == version for bus in self.plan.buses):
                return
            time.sleep(0.01)

    def wait_for_all(self, version: int) -> None:
        until = time.monotonic() + self.plan.quiet_s
        while time.monotonic() < until:
            there = {bus: version_of(bus) for bus in self.plan.buses}
            if all(each == version for each in there.values()):
                return
            time.sleep(0.05)
        self.faults.append(f"left behind: {there}, and the newest is {version}")
