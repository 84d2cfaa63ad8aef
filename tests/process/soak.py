"""Full load under random deaths and stops, as a program: prints one JSON report.

Producers put groups of four, several under way at once, each sample with content that follows from
its number; a consumer checks all of it. Both are killed and stopped at random, the consumer is slow
at times, and the bus is small, so that it is often full. Every group has a byte in memory that all
share, in which its producer and the consumer note its progress, so that the audit at the end needs
no process that could have died.

Usage: ``python tests/process/soak.py NAME SECONDS SEED``
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

import shmbus

CAPACITY = "16MiB"
PRODUCERS = 8
SIZE = 4
SIZES = (0, 3, 500, 2000, 9000, 18_000, 60_000, 300_000)
MAX_LIVES = 8192
#: Deaths of producers that a soak has at least, however long they take.
LEAST_KILLS = 12
GROUPS_A_LIFE = 16_384
#: Notes of a group: begun by its producer, committed whole, acknowledgement begun, done; faults.
PUT, WHOLE, ACKING, ACKED, DOUBLED, TORN = 1, 2, 4, 8, 16, 32
#: Longer than any stop, so that it ends only what a dead producer left incomplete.
GROUP_TIMEOUT_S = 20.0
LONGEST_STOP_S = 1.0
#: Without an acknowledgement for so long, though the consumer runs, something hangs.
HANG_S = 30.0
_PR_SET_PDEATHSIG = 1
CYCLE = (np.arange(max(SIZES) + 251) % 251).astype(np.uint8)


def content(life: int, number: int, index: int, size: int) -> np.ndarray:
    start = (life * 131 + number * 17 + index * 61) % 251
    return CYCLE[start : start + size]


def size_of(life: int, number: int, index: int) -> int:
    """Mostly the usual sizes, now and then a large one."""
    at = (life * 7 + number * 13 + index * 29) % 97
    return SIZES[-1] if at == 0 else SIZES[at % (len(SIZES) - 1)]


class Notes:
    """One byte for each group of each life, in memory that forked processes share."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, MAX_LIVES * GROUPS_A_LIFE)
        self.groups = np.frombuffer(memory, np.uint8).reshape(MAX_LIVES, GROUPS_A_LIFE)
        self.counts = np.frombuffer(mmap.mmap(-1, 4096), np.int64)

    def add(self, life: int, number: int, note: int) -> None:
        """Only one process at a time writes a group's byte."""
        self.groups[life, number] |= note


def produce(name: str, notes: Notes, life: int, seed: int) -> None:
    """Put groups for ever, a few at once, samples in any order."""
    rng = random.Random(seed)
    producer = shmbus.Producer(name, checksum=rng.random() < 0.5)
    under_way: list[tuple[int, list[int]]] = []
    number = 0
    while number < GROUPS_A_LIFE or under_way:
        while len(under_way) < 3 and number < GROUPS_A_LIFE:
            notes.add(life, number, PUT)
            under_way.append((number, rng.sample(range(SIZE), SIZE)))
            number += 1
        at = rng.randrange(len(under_way))
        group, left = under_way[at]
        index = left.pop()
        size = size_of(life, group, index)
        data = content(life, group, index, size)
        head = {"group_size": SIZE, "index": index}
        if rng.random() < 0.7:
            producer.put(f"{life}-{group}", data=data, timeout=None, **head)
        else:
            with producer.reserve(
                f"{life}-{group}", fields={"data": ("u1", size)}, timeout=None, **head
            ) as slot:
                slot["data"][:] = data
        if not left:
            # Bytes of the producer's alone: the consumer's are in another array.
            notes.add(life, group, WHOLE)
            del under_way[at]
    producer.close()


def consume(name: str, notes: Notes, answers: Notes) -> None:
    """Take, check, and acknowledge, for ever."""
    with shmbus.Consumer(name, group_timeout=GROUP_TIMEOUT_S, on_timeout="drop") as consumer:
        while True:
            take_some(consumer, answers, 0.2)
            if notes.counts[0]:
                time.sleep(0.03)


def take_some(consumer: shmbus.Consumer, answers: Notes, timeout: float) -> int:
    """One take; True while there was something."""
    groups = consumer.take(64, timeout=timeout)
    for group in groups:
        place = judge(group, answers)
        if answers.groups[place] & ACKED:
            answers.add(*place, DOUBLED)
        group.ack()
        answers.add(*place, ACKED)
        answers.counts[1] += 1
    return len(groups)


def judge(group: shmbus.Group, answers: Notes) -> tuple[int, int]:
    """Note that a group is about to be acknowledged, and whether it is what was put."""
    life, number = map(int, group.instance_id.split("-"))
    note = ACKING
    for index, sample in enumerate(group):
        right = content(life, number, index, size_of(life, number, index))
        if sample.index != index or not np.array_equal(sample["data"], right):
            note |= TORN
    answers.add(life, number, note)
    return life, number


class Soak:
    """The processes, and what is done to them."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.rng = random.Random(seed)
        self.notes, self.answers = Notes(), Notes()
        self.lives = 0
        self.moved_s = 0.0
        self.done = {"producer kills": 0, "consumer kills": 0, "stops": 0, "slow spells": 0}
        self.producers = [self.start_producer() for _ in range(PRODUCERS)]
        self.consumer = self.start_consumer()

    def fork(self, program: Callable[[], None]) -> int:
        pid = os.fork()
        if pid == 0:
            status = 1
            # However this ends, nobody is left behind.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                program()
                status = 0
            finally:
                os._exit(status)
        return pid

    def start_producer(self) -> int:
        life, seed = self.lives, self.rng.getrandbits(32)
        self.lives += 1
        return self.fork(lambda: produce(self.name, self.notes, life, seed))

    def start_consumer(self) -> int:
        return self.fork(lambda: consume(self.name, self.notes, self.answers))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def pause(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.random() * LONGEST_STOP_S)
        os.kill(pid, signal.SIGCONT)
        self.done["stops"] += 1

    def kill_consumer(self) -> None:
        self.kill(self.consumer)
        self.consumer = self.start_consumer()
        self.done["consumer kills"] += 1

    def act(self) -> None:
        """Do one of the things that go wrong."""
        rng = self.rng
        at = rng.randrange(PRODUCERS)
        what = rng.random()
        if what < 0.80 and self.lives < MAX_LIVES:
            self.kill(self.producers[at])
            self.producers[at] = self.start_producer()
            self.done["producer kills"] += 1
        elif what < 0.90:
            self.kill_consumer()
        elif what < 0.95:
            self.pause(self.producers[at])
        elif what < 0.98:
            self.pause(self.consumer)
        else:
            self.notes.counts[0] = 1
            time.sleep(rng.random() * LONGEST_STOP_S)
            self.notes.counts[0] = 0
            self.done["slow spells"] += 1

    def over(self) -> bool:
        """Whether there is nothing more to do."""
        return False

    def has_done_little(self) -> bool:
        """Whether a soak of so few deaths shows nothing: pauses and other work take its time."""
        return self.done["producer kills"] < LEAST_KILLS

    def run(self, seconds: float) -> int:
        """Act until time is over and enough was done; returns how often nothing moved too long."""
        end = time.monotonic() + seconds
        seen, self.moved_s = -1, time.monotonic()
        while (time.monotonic() < end or self.has_done_little()) and not self.over():
            self.act()
            time.sleep(self.rng.random() * 0.1)
            now = time.monotonic()
            if self.answers.counts[1] != seen:
                seen, self.moved_s = int(self.answers.counts[1]), now
            elif now - self.moved_s > HANG_S:
                return 1
            self.replace_finished()
        return 0

    def replace_finished(self) -> None:
        for at, pid in enumerate(self.producers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                assert os.waitstatus_to_exitcode(status) == 0, "a producer failed"
                self.producers[at] = self.start_producer()
        ended, status = os.waitpid(self.consumer, os.WNOHANG)
        assert not ended, f"the consumer failed with status {status}"

    def finish(self) -> shmbus.Ledger:
        """End all, and take what is left."""
        for pid in [*self.producers, self.consumer]:
            self.kill(pid)
        with shmbus.Consumer(
            self.name, group_timeout=0.5, on_timeout="drop", daemon=False
        ) as consumer:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                taken = take_some(consumer, self.answers, 0.1)
                stats = consumer.stats()
                if not taken and not stats.in_ring and not stats.stashed:
                    break
            return consumer.stats()


def audit(soak: Soak, ledger: shmbus.Ledger, hangs: int) -> dict[str, object]:
    """Compare what producers noted with what the consumer noted."""
    whole = (soak.notes.groups & WHOLE) != 0
    acking = (soak.answers.groups & ACKING) != 0
    begun = soak.notes.groups != 0
    return {
        **soak.done,
        "lives": soak.lives,
        "groups": int(acking.sum()),
        "records": ledger.committed,
        "acknowledged": ledger.acknowledged,
        "dropped": ledger.dropped,
        "balanced": ledger.balanced,
        "lost": int((whole & ~acking).sum()),
        "unknown": int((acking & ~begun).sum()),
        "doubled": int(((soak.answers.groups & DOUBLED) != 0).sum()),
        "torn or mixed": int(((soak.answers.groups & TORN) != 0).sum()),
        "hangs": hangs,
        "held at the end": ledger.capacity - ledger.free,
    }


def main() -> None:
    """Soak for so many seconds."""
    name, seconds, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    print(f"seed {seed}", file=sys.stderr)
    with shmbus.Bus.create(name, CAPACITY, max_producers=2 * PRODUCERS) as bus:
        soak = Soak(name, seed)
        hangs = soak.run(seconds)
        if hangs:
            print(f"nothing moved for {HANG_S} s: {bus.stats()}", file=sys.stderr)
        print(json.dumps(audit(soak, soak.finish(), hangs)))
    with contextlib.suppress(shmbus.BusNotFoundError):
        shmbus.unlink(name)


if __name__ == "__main__":
    main()
