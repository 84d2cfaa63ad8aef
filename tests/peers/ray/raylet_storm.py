"""Raylets of four nodes of a real Ray cluster under SIGKILL: a relay over all of them.

`python tests/peers/ray/raylet_storm.py --kills 50` ends with status 1 at the first fault.
"""

import argparse
import json
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from relay.relay_storm import SIZE, sample

import shmbus
import shmbus.relay
from shmbus.inspect.status import read_status

SOURCES, TRAINERS = ("left", "right"), ("t0", "t1")
NODES = (*SOURCES, *TRAINERS)
STORE_BYTES = 100 << 20
#: Seconds without a group after which a run has failed: far above what Ray needs to see a death and
#: to start an actor on a busy machine.
QUIET_S = 150.0
PAIRS = 0.25


class Plan(NamedTuple):
    kills: int
    seed: int
    #: Groups a second that the workers put; they go on until the last node is back.
    rate: float = 25.0


class RayletStorm:
    """One run: producers and trainers in threads of this process, parties in actors of Ray."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.prefix = f"raylets-{os.getpid()}-{secrets.token_hex(2)}"
        self.buses = {name: f"{self.prefix}.{name}" for name in NODES}
        self.killed: Counter[str] = Counter()
        self.acked: Counter[int] = Counter()
        self.faults: list[str] = []
        self.put = 0
        self.last_s = time.monotonic()
        self.longest_silence_s = 0.0
        self.calm = threading.Event()
        self.over = threading.Event()
        self.lock = threading.Lock()

    def run(self) -> dict[str, Any]:
        for bus in self.buses.values():
            shmbus.Bus.create(bus, "16MiB").close()
        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes = {name: self.start(cluster, name) for name in NODES}
            ray.init(address=cluster.address, namespace="shmbus", log_to_driver=False)
            relay = shmbus.relay.start(
                [f"{self.buses[name]}@{name}" for name in SOURCES],
                [f"{self.buses[name]}@{name}" for name in TRAINERS],
            )
            threads = [threading.Thread(target=self.produce)]
            threads += [threading.Thread(target=self.train, args=(name,)) for name in TRAINERS]
            for thread in threads:
                thread.start()
            try:
                self.kill_all(cluster, nodes)
                self.calm.set()
                self.wait(lambda: 0 < self.put == len(self.acked), "the last groups")
                self.wait(self.all_let_go, "sources to let go")
            finally:
                self.calm.set()
                self.over.set()
                for thread in threads:
                    thread.join()
            relay.stop()
            return self.audit()
        finally:
            ray.shutdown()
            cluster.shutdown()
            for bus in self.buses.values():
                shmbus.unlink(bus)

    def start(self, cluster: Any, name: str) -> Any:
        """Start a node; one that comes back has its resource again, and another id."""
        return cluster.add_node(num_cpus=1, resources={name: 1}, object_store_memory=STORE_BYTES)

    def produce(self) -> None:
        """Put groups, the samples on both nodes by turns, until all is calm."""
        producers = [shmbus.Producer(self.buses[name]) for name in SOURCES]
        while not self.calm.wait(1.0 / self.plan.rate):
            group = self.put
            for index in range(SIZE):
                producers[index % 2].put(
                    f"q{group}", group_size=SIZE, index=index, score=float(index), round=0,
                    meta={"of": [group, index]}, timeout=None, **sample(group, index),
                )  # fmt: skip
            self.put += 1
        for producer in producers:
            producer.close()

    def train(self, name: str) -> None:
        with shmbus.Consumer(self.buses[name]) as consumer:
            while not self.over.is_set():
                for group in consumer.take(timeout=0.1):
                    number = int(group.instance_id[1:])
                    whole = is_whole(group, number)
                    group.ack()
                    with self.lock:
                        now_s = time.monotonic()
                        if self.acked:
                            silence_s = now_s - self.last_s
                            self.longest_silence_s = max(self.longest_silence_s, silence_s)
                        self.last_s = now_s
                        self.acked[number] += 1
                        if not whole:
                            self.faults.append(f"group {number} is torn")
                        if self.acked[number] > 1:
                            self.faults.append(f"group {number} came {self.acked[number]} times")

    def kill_all(self, cluster: Any, nodes: dict[str, Any]) -> None:
        """Kill raylets, one or two at a time, each once groups have come since the last one."""
        self.wait(lambda: len(self.acked) > 5, "the first groups")
        while sum(self.killed.values()) < self.plan.kills:
            left = self.plan.kills - sum(self.killed.values())
            count = 2 if left > 1 and self.rng.random() < PAIRS else 1
            names = self.rng.sample(NODES, count)
            for name in names:
                cluster.remove_node(nodes[name], allow_graceful=False)
                self.killed[name] += 1
            time.sleep(self.rng.uniform(0.0, 1.0))
            for name in names:
                nodes[name] = self.start(cluster, name)
            before = len(self.acked)
            self.wait(lambda before=before: len(self.acked) > before, f"groups after {names} died")
            time.sleep(self.rng.uniform(0.0, 0.5))

    def wait(self, holds: Any, what: str) -> None:
        """Wait for something, as long as groups come, or for a while."""
        moved_s, seen = time.monotonic(), -1
        while not holds():
            if len(self.acked) != seen:
                moved_s, seen = time.monotonic(), len(self.acked)
            if self.faults or time.monotonic() - moved_s > QUIET_S:
                raise AssertionError(
                    f"no {what}: {seen} of {self.put} groups, killed {dict(self.killed)}, "
                    f"{self.faults}, {[status(bus) for bus in self.buses.values()]}"
                )
            time.sleep(0.05)

    def all_let_go(self) -> bool:
        """Whether sources count all as acknowledged."""
        wanted = self.put * SIZE // 2
        return all(status(self.buses[name])["acknowledged"] == wanted for name in SOURCES)

    def audit(self) -> dict[str, Any]:
        """Compare what came with what was put."""
        missing = set(range(self.put)) - set(self.acked)
        if missing:
            self.faults.append(f"groups that never came: {sorted(missing)[:10]}")
        for name, bus in self.buses.items():
            said = status(bus)
            if not said["balanced"] or said["undelivered"]:
                self.faults.append(f"{name}: {said}")
        trained = sum(status(self.buses[name])["acknowledged"] for name in TRAINERS)
        if trained != self.put * SIZE:
            self.faults.append(f"{trained} records were trained of {self.put * SIZE}")
        return {
            "seed": self.plan.seed,
            "killed": dict(self.killed), "kills": sum(self.killed.values()),
            "groups": len(self.acked), "samples": trained,
            "longest silence": round(self.longest_silence_s, 1), "faults": self.faults,
        }  # fmt: skip


def is_whole(group: shmbus.Group, number: int) -> bool:
    if len(group) != SIZE or any(t.meta != {"of": [number, t.index]} for t in group):
        return False
    return all(
        t[name].tobytes() == array.tobytes()
        for t in group
        for name, array in sample(number, t.index).items()
    )


def status(bus: str) -> dict[str, Any]:
    """Return what of a bus's ledger is compared."""
    said = read_status(bus).ledger
    return {
        "committed": said.committed, "acknowledged": said.acknowledged,
        "undelivered": said.undelivered, "balanced": said.balanced,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's processes are ended too
    began_s = time.monotonic()
    storm = RayletStorm(Plan(arguments.kills, arguments.seed))
    said = storm.run()
    print(json.dumps({**said, "seconds": round(time.monotonic() - began_s, 1)}))
    return 1 if said["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
