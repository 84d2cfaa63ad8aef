"""What the parties of a relay do, in processor time a record, with a transport that costs nothing.

Source, coordinator and sink take turns in one thread, and messages go from one's mailbox to the
next one's: packed and unpacked as for any way, and carried by nobody. Put and take beside them are
counted apart. What a real hop costs more than this is its transport, threads and processes.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any, Final

import shmbus
from bench.relay.bounds import RECORD, SIZE
from bench.relay.hop import sample_fields
from shmbus.relay.host import HostMailbox, PartyPlan

__all__ = ["work"]

CAPACITY: Final = "256MiB"
#: Groups that are put at a time: some blocks, and little beside either bus.
GROUPS: Final = 128
ROUNDS: Final = 150
#: Until all pages of both buses have been touched.
WARM_ROUNDS: Final = 30
#: A source gathers heads before it announces them, and nobody has anything to do meanwhile.
IDLE_S: Final = 0.002
KINDS: Final = ("source", "coordinator", "sink")


class _Relay:
    """The three parties, and processor seconds of each."""

    def __init__(self, names: list[str], transport: str) -> None:
        self.boxes = {kind: HostMailbox(kind, self._carry) for kind in KINDS}
        plans = {
            "source": PartyPlan("source", "source", "coordinator", names[0], transport=transport),
            "coordinator": PartyPlan(
                "coordinator", "coordinator", "coordinator", "", sources=["source"], sinks=["sink"]
            ),
            "sink": PartyPlan("sink", "sink", "coordinator", names[1], transport=transport),
        }
        self.spent_s = dict.fromkeys((*KINDS, "put", "take"), 0.0)
        self.parties = {kind: plans[kind].make(self.boxes[kind]) for kind in KINDS}

    def _carry(self, to: str, packed: list[bytes], payload: Any) -> None:
        self.boxes[to].put(packed, payload)

    def turn(self) -> int:
        """Let each party take what has come, and do what there is to do; return its messages."""
        count = 0
        for kind, party in self.parties.items():
            began = time.thread_time()
            came = self.boxes[kind].receive(0.0)
            count += len(came)
            for envelope in came:
                party.take(envelope)
            came.clear()
            party.round()
            self.boxes[kind].flush()
            self.spent_s[kind] += time.thread_time() - began
        return count

    def close(self) -> None:
        """Leave the buses."""
        for party in self.parties.values():
            party.close()


def work() -> dict[str, dict[str, float]]:
    """Return microseconds of processor time a record, by party; by transport."""
    return {transport: _work(transport) for transport in ("ray", "direct")}


def _work(transport: str) -> dict[str, float]:
    names = [f"bench-work-{os.getpid()}.{each}" for each in ("from", "to")]
    buses = [shmbus.Bus.create(name, CAPACITY) for name in names]
    relay = _Relay(names, transport)
    try:
        with shmbus.Producer(names[0]) as producer, shmbus.Consumer(names[1]) as consumer:
            _rounds(relay, producer, consumer, WARM_ROUNDS)
            relay.spent_s = dict.fromkeys(relay.spent_s, 0.0)
            _rounds(relay, producer, consumer, ROUNDS)
    finally:
        relay.close()
        for bus in buses:
            bus.unlink()
    records = ROUNDS * GROUPS * SIZE
    said = {f"{what}_us": spent / records * 1e6 for what, spent in relay.spent_s.items()}
    said["all_us"] = sum(said.values())
    said["cpu_s_per_gb"] = said["all_us"] / RECORD * 1e3
    return said


def _rounds(
    relay: _Relay, producer: shmbus.Producer, consumer: shmbus.Consumer, rounds: int
) -> None:
    spent, left, fields = relay.spent_s, 0, sample_fields()
    for round_ in range(rounds):
        began = time.thread_time()
        for number, index in itertools.product(range(GROUPS), range(SIZE)):
            producer.put(
                f"{round_}.{number}", group_size=SIZE, index=index, score=float(index), **fields
            )
        spent["put"] += time.thread_time() - began
        left += GROUPS
        while left:
            if not relay.turn():
                time.sleep(IDLE_S)
            began = time.thread_time()
            for group in consumer.take(timeout=0.0):
                group.ack()
                left -= 1
            spent["take"] += time.thread_time() - began
