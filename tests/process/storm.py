"""A storm of SIGKILLs, as a program: producers write numbered, recognisable records and are killed
at random instants; the consumer checks every one. Prints a JSON report; test_death.py judges it.

A record's content follows from its producer and its number, so a torn or mixed one shows itself.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from multiprocessing import get_context

import numpy as np

import shmbus

SIZES = (0, 1, 7, 200, 2000, 9000, 40_000, 150_000)
QUIET_S = 10.0
CYCLE = (np.arange(max(SIZES) + 251) % 251).astype(np.uint8)


def pattern(producer_id: int, number: int, size: int) -> np.ndarray:
    """Bytes that tell this record from its neighbours."""
    start = (producer_id * 1_000_003 + number * 7919) % 251
    return CYCLE[start : start + size]


def write_for_ever(name: str, seed: int) -> None:
    """Put by every way there is, as fast as possible, until killed."""
    rng = random.Random(seed)
    producer = shmbus.Producer(name, checksum=rng.random() < 0.5)
    me = producer.producer_id
    number = 0
    while True:
        size = rng.choice(SIZES)
        way = rng.random()
        data = pattern(me, number, size)
        if way < 0.6:
            meta = {"number": number} if way < 0.1 else None
            producer.put(f"{me}-{number}", group_size=1, index=0, data=data, meta=meta)
            number += 1
        elif way < 0.75:
            with producer.reserve(
                f"{me}-{number}", group_size=1, index=0, fields={"data": ("uint8", size)}
            ) as slot:
                slot["data"][: size // 2] = data[: size // 2]
                slot["data"][size // 2 :] = data[size // 2 :]
            number += 1
        elif way < 0.8:
            held = producer.reserve("never", group_size=1, index=0, fields={"data": ("u1", size)})
            producer.put(f"{me}-{number}", group_size=1, index=0, data=data)
            number += 1
            held.abort()
        else:
            producer.put_many(
                [
                    {
                        "instance_id": f"{me}-{number + i}",
                        "group_size": 1,
                        "index": 0,
                        "data": pattern(me, number + i, size),
                    }
                    for i in range(4)
                ]
            )
            number += 4


class Storm:
    """The consumer's side: takes, checks, acknowledges, and kills."""

    def __init__(self, name: str, seed: int, writers: int) -> None:
        self.name = name
        self.rng = random.Random(seed)
        self.context = get_context("fork")
        self.consumer = shmbus.Consumer(name)
        self.seen: dict[int, list[int]] = {}
        self.torn = 0
        self.stalls = 0
        self.kills = 0
        self.processes = [self.start() for _ in range(writers)]

    def start(self):
        process = self.context.Process(
            target=write_for_ever, args=(self.name, self.rng.getrandbits(32))
        )
        process.start()
        return process

    def take(self, timeout: float) -> int:
        groups = self.consumer.take(256, timeout=timeout)
        for group in groups:
            sample = group[0]
            producer, number = map(int, group.instance_id.split("-"))
            data = sample["data"]
            right = pattern(producer, number, data.size)
            if producer != sample.producer_id or number != sample.sequence:
                self.torn += 1
            if not np.array_equal(data, right):
                self.torn += 1
            self.seen.setdefault(producer, []).append(number)
            group.ack()
        return len(groups)

    def kill_one(self) -> None:
        victim = self.rng.randrange(len(self.processes))
        os.kill(self.processes[victim].pid, signal.SIGKILL)
        self.processes[victim].join()
        self.processes[victim] = self.start()
        self.kills += 1

    def run(self, kills: int) -> None:
        last = time.monotonic()
        next_kill = last
        while self.kills < kills and not self.stalls:
            now = time.monotonic()
            if self.take(0.02):
                last = now
            elif now - last > QUIET_S:
                self.stalls += 1
            if now >= next_kill:
                self.kill_one()
                next_kill = time.monotonic() + self.rng.random() * 0.02

    def finish(self) -> dict[str, object]:
        for process in self.processes:
            process.kill()
            process.join()
        while self.take(0.2):
            pass
        self.consumer.stats()  # looks for the dead; what that ends is freed by the next look
        self.take(0.2)
        ledger = self.consumer.stats()
        wrong = [p for p, seen in self.seen.items() if sorted(seen) != list(range(len(seen)))]
        free = ledger.free / ledger.capacity
        self.consumer.close()
        return {
            "kills": self.kills,
            "stalls": self.stalls,
            "torn": self.torn,
            "producers": len(self.seen),
            "lost_or_doubled_of": wrong,
            "received": sum(map(len, self.seen.values())),
            "committed": ledger.committed,
            "acknowledged": ledger.acknowledged,
            "balanced": ledger.balanced,
            "dropped": ledger.dropped,
            "in_ring": ledger.in_ring,
            "free": free,
        }


def main() -> None:
    """Run the storm that the arguments describe."""
    name, seed, kills, writers = sys.argv[1], *map(int, sys.argv[2:5])
    with shmbus.Bus.create(name, capacity="8MiB", max_producers=2 * writers):
        storm = Storm(name, seed, writers)
        storm.run(kills)
        print(json.dumps(storm.finish()))


if __name__ == "__main__":
    main()
