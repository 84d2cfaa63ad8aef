"""Relays under SIGKILL: two source buses, trainers' buses; every byte and ledger checked."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from fork_server import TEMPLATE
from relay.connections import open_mailbox

import shmbus
from shmbus.relay.coordinator_party import CoordinatorParty
from shmbus.relay.party import run_party
from shmbus.relay.sink_party import SinkParty
from shmbus.relay.source_party import SourceParty
from shmbus.segment import lifecycle
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

COORDINATOR = "coordinator"
SIZE = 6


class Plan(NamedTuple):
    name: str
    directory: str
    sinks: int = 1
    kills: int = 20
    groups: int = 400
    release: str = "acknowledged"
    seed: int = 0
    capacity: str = "8MiB"
    quiet_s: float = 60.0
    pause_s: float = 0.15

    @property
    def sources(self) -> list[str]:
        return [f"{self.name}.s{i}" for i in range(2)]

    @property
    def trainers(self) -> list[str]:
        return [f"{self.name}.t{i}" for i in range(self.sinks)]

    @property
    def parties(self) -> list[str]:
        return [COORDINATOR, *self.sources, *self.trainers]


def work(plan: Plan, address: str) -> None:
    mailbox = open_mailbox(plan.directory, address)

    def make() -> Any:
        if address == COORDINATOR:
            policy = StashPolicy(skip_zero_variance=True)
            return CoordinatorParty(mailbox, plan.sources, plan.trainers, policy)
        if address in plan.sources:
            return SourceParty(address, mailbox, COORDINATOR)
        return SinkParty(address, mailbox, COORDINATOR, plan.release)

    run_party(make, mailbox, lambda: True)


def sample(group: int, index: int) -> dict[str, Any]:
    """Return the fields of a sample: each byte follows from its place."""
    rng = np.random.default_rng(group * 1000 + index)
    size = int(rng.integers(0, 900))
    return {
        "tokens": rng.integers(0, 1 << 30, size, dtype=np.int32),
        "logprobs": rng.random((size % 7, 3), dtype=np.float32),
    }


def is_useless(group: int) -> bool:
    """Whether its scores are equal: the payload then stays at the source."""
    return group % 10 == 9


def split_of(group: int) -> str:
    return "eval" if group % 10 == 3 else "train"


class Processes:
    """The parties of a storm in separate processes, with the faults found so far."""

    def __init__(self, plan: Any, work: Callable[[Any, str], None]) -> None:
        self.plan, self.work = plan, work
        self.rng = random.Random(plan.seed)
        self.children: dict[str, Any] = {}
        self.faults: list[str] = []
        self.over = threading.Event()

    def start(self, address: str) -> None:
        child = TEMPLATE.Process(target=self.work, args=(self.plan, address), daemon=True)
        child.start()
        self.children[address] = child

    def kill(self, address: str) -> None:
        child = self.children[address]
        os.kill(child.pid, signal.SIGKILL)
        child.join()

    def end(self, threads: list[threading.Thread]) -> None:
        self.over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        for child in self.children.values():
            child.kill()
            child.join()


class Storm(Processes):
    """A run: parties in separate processes, producers and trainers in threads of this process."""

    def __init__(self, plan: Plan, work: Callable[[Any, str], None] = work) -> None:
        super().__init__(plan, work)
        self.processes = plan.parties
        self.makers = [threading.Thread(target=self.produce, args=(i,)) for i in range(2)]
        self.seen: Counter[tuple[int, int]] = Counter()
        self.killed: Counter[str] = Counter()
        self.produced = 0
        self.moved_at_s = time.monotonic()
        self.longest_silence_s = 0.0
        self.lock = threading.Lock()

    def produce(self, source: int) -> None:
        """Put every second sample of each group."""
        with (
            contextlib.suppress(shmbus.BusRemovedError),
            shmbus.Producer(self.plan.sources[source]) as producer,
        ):
            for group in range(self.plan.groups):
                for index in range(source, SIZE, 2):
                    score = 0.0 if is_useless(group) else float(index)
                    producer.put(
                        f"q{group}", group_size=SIZE, index=index, score=score, round=0,
                        split=split_of(group), meta={"of": [group, index]}, timeout=None,
                        **sample(group, index),
                    )  # fmt: skip
                self.produced += 1

    def train(self, name: str) -> None:
        with shmbus.Consumer(name) as consumer:
            while not self.over.is_set():
                for split in ("train", "eval"):
                    for group in consumer.take(timeout=0.05, split=split):
                        self.check(group)
                        group.ack()

    def check(self, group: shmbus.Group) -> None:
        number = int(group.instance_id[1:])
        with self.lock:
            now = time.monotonic()
            self.longest_silence_s = max(self.longest_silence_s, now - self.moved_at_s)
            self.moved_at_s = now
        if group[0].split != split_of(number):
            self.faults.append(f"group {number} is of split {group[0].split}")
        if len(group) != SIZE:
            self.faults.append(f"group {number} has {len(group)} samples")
        for t in group:
            self.seen[number, t.index] += 1
            expected = sample(number, t.index)
            good = t.meta == {"of": [number, t.index]} and all(
                t[name].dtype == array.dtype
                and t[name].shape == array.shape
                and t[name].tobytes() == array.tobytes()
                for name, array in expected.items()
            )
            if not good:
                self.faults.append(f"torn: group {number}, sample {t.index}")

    def run(self) -> dict[str, Any]:
        plan = self.plan
        began = time.monotonic()
        buses = [shmbus.Bus.create(each, plan.capacity) for each in plan.sources + plan.trainers]
        with shmbus.Producer(plan.sources[1]) as producer:
            producer.cancelled("none", round=0, split="other")  # "eval" gets a new number here
        trainers = [threading.Thread(target=self.train, args=(name,)) for name in plan.trainers]
        try:
            for address in self.processes:
                self.start(address)
            for thread in (*self.makers, *trainers):
                thread.start()
            for _ in range(plan.kills):
                time.sleep(self.rng.uniform(0.0, 2 * plan.pause_s))
                address = self.rng.choice(self.processes)
                self.kill(address)
                self.killed[address] += 1
                self.start(address)
            self.wait(self.makers)
            self.audit(buses)
        finally:
            self.end(trainers)
            for bus in buses:
                bus.unlink()  # ends a maker in its wait for space
        return {
            "seed": plan.seed,
            "killed": dict(self.killed),
            "samples": sum(self.seen.values()),
            "seconds": round(time.monotonic() - began, 1),
            "longest_silence_s": round(self.longest_silence_s, 1),
            "faults": self.faults,
        }

    def wait(self, makers: list[threading.Thread]) -> None:
        """Wait until every put arrived, or arrivals end."""
        useful = sum(not is_useless(group) for group in range(self.plan.groups))
        while len(self.seen) < useful * SIZE or any(each.is_alive() for each in makers):
            if time.monotonic() - self.moved_at_s > self.plan.quiet_s:
                self.faults.append(f"it stands still at {len(self.seen)} of {useful * SIZE}")
                return
            time.sleep(0.02)

    def audit(self, buses: list[shmbus.Bus]) -> None:
        """Compare the ledgers, after the last release's confirmation."""
        doubled = [each for each, count in self.seen.items() if count > 1]
        if doubled:
            self.faults.append(f"doubled: {doubled[:10]}")
        useless = sum(map(is_useless, range(self.plan.groups))) * SIZE // 2
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            ledgers = [bus.stats() for bus in buses]
            if all(ledger.undelivered == 0 for ledger in ledgers) and not self.left():
                break
            time.sleep(0.05)
        else:
            self.faults.append(f"not released: {ledgers}, journals {self.left()}")
        reason = "acknowledged" if self.plan.release == "acknowledged" else "relayed"
        sources, trainers = ledgers[:2], ledgers[2:]
        for ledger in sources:
            ended = {"acknowledged": ledger.acknowledged, **ledger.dropped}
            crossed = ended.get(reason, 0)
            if ended.get("zero_variance", 0) != useless or crossed + useless != ledger.committed:
                self.faults.append(f"a source's ledger: {ledger}")
        crossed = sum(ledger.committed for ledger in trainers)
        if crossed + 2 * useless != sum(ledger.committed for ledger in sources):
            self.faults.append(f"the ledgers do not balance: {sources} {trainers}")

    def left(self) -> int:
        """Count the entries of the trainers' journals."""
        count = 0
        for name in self.plan.trainers:
            segment = lifecycle.open_segment(name)
            count += len(_core.relay_notes(segment))
            segment.close()
        return count
