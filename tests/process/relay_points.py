"""A death of a whole relay at each named point of putting, healing and forgetting, as a program.

A case forks a process with a relay's parties, which dies at its point, and a successor; the trainer
is here, and audits the result. test_failpoints.py judges the report, a line a case.
"""

import threading
from collections import Counter

import numpy as np
from failpoints import meet, play
from relay.local import relay
from supervisor import Child, deadline

import shmbus
from shmbus.segment import lifecycle
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

GROUPS, SIZE, USELESS = 12, 4, 3

#: Points, and passes at which the signal comes. A point of healing follows a death in a put.
PUTTING: dict[str, tuple[int, ...]] = {
    "relay-prepared": (1, 5),
    "relay-intended": (1, 2),
    "commit-intended": (1, 6),
    "record-published": (2,),
    "record-exposed": (3,),
    "commit-marked": (1, 6),
    "relay-put": (1,),
    "relay-settled": (1, 7),
    "relay-forgotten": (1, 9),
    "release-half": (1, 9),
    "release-counted": (1,),
}
HEALING: dict[str, tuple[int, ...]] = {
    "relay-healing": (1, 3),
    "relay-healed": (1,),
    "take-over-counted": (1,),
    "take-over-sealed": (1,),
}
BEFORE = "commit-intended:3:kill"


def run_relay(sources: list[str], sink: str) -> None:
    with relay(sources, [sink], policy=StashPolicy(skip_zero_variance=True)):
        threading.Event().wait()


def put(sources: list[str]) -> None:
    for half, name in enumerate(sources):
        with shmbus.Producer(name) as producer:
            for group in range(GROUPS):
                for index in range(half, SIZE, 2):
                    producer.put(
                        f"q{group}", group_size=SIZE, index=index, round=1,
                        score=0.0 if group < USELESS else float(index),
                        x=np.full(300, group * SIZE + index),
                    )  # fmt: skip


def take(consumer: shmbus.Consumer, seen: Counter[str], faults: list[str]) -> None:
    for group in consumer.take(timeout=0.02):
        seen[group.instance_id] += 1
        for t in group:
            if not (t["x"] == int(group.instance_id[1:]) * SIZE + t.index).all():
                faults.append(f"torn: {t!r}")
        if len(group) != SIZE:
            faults.append(f"{group.instance_id} has {len(group)} samples")
        group.ack()


def audit(sources: list[str], sink: str, faults: list[str]) -> bool:
    """Whether everything rests; then the ledgers must balance."""
    segment = lifecycle.open_segment(sink)
    left = len(_core.relay_notes(segment))
    segment.close()
    ledgers = []
    for name in sources:
        with shmbus.Bus.open(name) as bus:
            ledgers.append(bus.stats())
    if left or any(ledger.undelivered for ledger in ledgers):
        return False
    half = SIZE // 2
    for ledger in ledgers:
        useful = (GROUPS - USELESS) * half
        if ledger.acknowledged != useful or ledger.dropped != {"zero_variance": USELESS * half}:
            faults.append(f"a source's ledger: {ledger}")
    return True


def case(name: str, points: list[str]) -> dict[str, object]:
    """Have relay after relay die at these points, and a last relay go on."""
    sources, sink = [f"{name}.a", f"{name}.b"], f"{name}.t"
    faults: list[str] = []
    seen: Counter[str] = Counter()
    buses = [shmbus.Bus.create(each, "1MiB", max_producers=8) for each in [*sources, sink]]
    signalled = True
    try:
        put(sources)
        with shmbus.Consumer(sink) as consumer:
            for point in points:
                child = Child(lambda: run_relay(sources, sink), point)
                signalled = meet(child, lambda: take(consumer, seen, faults)) and signalled
            child = Child(lambda: run_relay(sources, sink))
            for _ in deadline("the relay to be at rest"):
                take(consumer, seen, faults)
                if audit(sources, sink, faults):
                    break
            child.kill()
        expected = {f"q{group}": 1 for group in range(USELESS, GROUPS)}
        if seen != expected:
            faults.append(f"expected each group once, got {dict(seen)}")
    finally:
        for bus in buses:
            bus.unlink()
    return {"signalled": signalled, "faults": faults}


if __name__ == "__main__":
    play(
        {"putting": PUTTING, "healing": HEALING},
        {
            "putting": lambda name, point, action: case(name, [point]),
            "healing": lambda name, point, action: case(name, [BEFORE, point]),
        },
        actions=("kill",),
    )
