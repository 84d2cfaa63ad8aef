"""Full load under random deaths and stops, as a program: prints a JSON report.

Producers and a consumer of a small bus get killed and stopped at random; the consumer checks every
sample. Progress notes in shared memory let the audit at the end do without a mortal process.

Usage: ``PYTHONPATH=tests python tests/process/soak.py NAME SECONDS SEED [KILLS]``. A number of
kills ends the soak after so many deaths of producers, and makes most faults such deaths.
"""

import contextlib
import json
import mmap
import random
import sys
import time
from typing import Any

import numpy as np
from supervisor import Supervisor

import shmbus

CAPACITY = "16MiB"
PRODUCERS = 8
SIZE = 4
SIZES = (0, 3, 500, 2000, 9000, 18_000, 60_000, 300_000)
#: Least faults of a soak, however long they take.
LEAST = {"producer kills": 12, "consumer kills": 3}
MAX_LIVES = 16_384
GROUPS_A_LIFE = 8192
#: Notes of a group: begun by its producer, committed whole, acknowledgement begun, done; faults.
PUT, WHOLE, ACKING, ACKED, DOUBLED, TORN = 1, 2, 4, 8, 16, 32
#: Longer than any stop: ends only groups left incomplete by a dead producer.
GROUP_TIMEOUT_S = 20.0
LONGEST_STOP_S = 1.0
#: Longest pause of acknowledgements beside a running consumer; a longer pause is a hang.
HANG_S = 30.0
CYCLE = (np.arange(max(SIZES) + 251) % 251).astype(np.uint8)


def content(life: int, number: int, index: int, size: int) -> np.ndarray:
    start = (life * 131 + number * 17 + index * 61) % 251
    return CYCLE[start : start + size]


def size_of(life: int, number: int, index: int) -> int:
    at = (life * 7 + number * 13 + index * 29) % 97
    return SIZES[-1] if at == 0 else SIZES[at % (len(SIZES) - 1)]


def sample_of(life: int, number: int, index: int) -> dict[str, Any]:
    data = content(life, number, index, size_of(life, number, index))
    return {"instance_id": f"{life}-{number}", "group_size": SIZE, "index": index, "data": data}


class Notes:
    """A byte for each group of each life, in memory shared by forked processes."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, MAX_LIVES * GROUPS_A_LIFE)
        self.groups = np.frombuffer(memory, np.uint8).reshape(MAX_LIVES, GROUPS_A_LIFE)
        self.counts = np.frombuffer(mmap.mmap(-1, 4096), np.int64)

    def add(self, life: int, number: int, note: int) -> None:
        """Add a note; a single process at a time writes a group's byte."""
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
        way = rng.random()
        if way < 0.1:
            samples = [sample_of(life, group, index) for index in left]
            producer.put_many(samples, timeout=None)
            left.clear()
        else:
            sample = sample_of(life, group, left.pop())
            if way < 0.7:
                producer.put(**sample, meta={"way": way}, timeout=None)
            else:
                data = sample.pop("data")
                fields = {"data": ("u1", data.size)}
                if way < 0.8:
                    producer.reserve(**sample, fields=fields, timeout=None).abort()
                with producer.reserve(**sample, fields=fields, timeout=None) as slot:
                    slot["data"][:] = data
        if not left:
            # The producer's bytes; the consumer's lie in a second array.
            notes.add(life, group, WHOLE)
            del under_way[at]
    producer.close()


def consume(name: str, notes: Notes, answers: Notes) -> None:
    with shmbus.Consumer(name, group_timeout=GROUP_TIMEOUT_S, on_timeout="drop") as consumer:
        while True:
            take_some(consumer, answers, 0.2)
            if notes.counts[0]:
                time.sleep(0.03)


def take_some(consumer: shmbus.Consumer, answers: Notes, timeout: float) -> int:
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
    """Note a coming acknowledgement, and whether the group equals the put."""
    life, number = map(int, group.instance_id.split("-"))
    note = ACKING
    for index, sample in enumerate(group):
        right = content(life, number, index, size_of(life, number, index))
        if sample.index != index or not np.array_equal(sample["data"], right):
            note |= TORN
    answers.add(life, number, note)
    return life, number


class Soak(Supervisor):
    #: The fault counted by the program's argument.
    COUNTED = "producer kills"

    def __init__(self, name: str, seed: int, kills: int = 0) -> None:
        super().__init__(seed)
        self.name, self.seed, self.kills = name, seed, kills
        self.notes, self.answers = Notes(), Notes()
        self.moved_s = 0.0
        for at in range(PRODUCERS):
            self.start(f"producer {at}", self.produce)
        self.start("consumer", self.consume)

    def produce(self, life: int) -> None:
        produce(self.name, self.notes, life, self.seed + life)

    def consume(self, life: int) -> None:
        consume(self.name, self.notes, self.answers)

    def kill_consumer(self) -> None:
        self.restart("consumer")
        self.done["consumer kills"] += 1

    def kill_producer(self) -> None:
        self.restart(self.rng.choice(self.named("producer")))
        self.done["producer kills"] += 1

    def stop(self, name: str) -> None:
        self.pause(name, LONGEST_STOP_S)
        self.done["stops"] += 1

    def counted(self) -> None:
        self.kill_producer()

    def act(self) -> None:
        what = self.rng.random()
        if self.kills and what < 0.9:
            self.counted()
        elif what < 0.80 and self.starts < MAX_LIVES:
            self.kill_producer()
        elif what < 0.90:
            self.kill_consumer()
        elif what < 0.95:
            self.stop(self.rng.choice(self.named("producer")))
        elif what < 0.98:
            self.stop("consumer")
        else:
            self.notes.counts[0] = 1
            time.sleep(self.rng.random() * LONGEST_STOP_S)
            self.notes.counts[0] = 0
            self.done["slow spells"] += 1

    def goes_on(self, end: float) -> bool:
        """Whether time or faults are left; pauses and other work take a soak's time."""
        if self.kills:
            return self.done[self.COUNTED] < self.kills
        little = any(self.done[fault] < least for fault, least in LEAST.items())
        return little or time.monotonic() < end

    def run(self, seconds: float) -> int:
        """Act until time is over and enough was done; return the number of hangs."""
        end = time.monotonic() + seconds
        seen, self.moved_s = -1, time.monotonic()
        while self.goes_on(end):
            self.act()
            time.sleep(self.rng.random() * (0.02 if self.kills else 0.1))
            now = time.monotonic()
            if self.answers.counts[1] != seen:
                seen, self.moved_s = int(self.answers.counts[1]), now
            elif now - self.moved_s > HANG_S:
                return 1
            self.replace_finished()
        return 0

    def finish(self) -> shmbus.Ledger:
        self.end()
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
    """Compare the producers' notes with the consumer's."""
    whole = (soak.notes.groups & WHOLE) != 0
    acking = (soak.answers.groups & ACKING) != 0
    begun = soak.notes.groups != 0
    return {
        **soak.done,
        "lives": soak.starts,
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
        "capacity": ledger.capacity,
    }


def main() -> None:
    """Soak for so many seconds, or for so many kills of producers."""
    name, seconds, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    print(f"seed {seed}", file=sys.stderr)
    with shmbus.Bus.create(name, CAPACITY, max_producers=2 * PRODUCERS) as bus:
        soak = Soak(name, seed, *map(int, sys.argv[4:]))
        hangs = soak.run(seconds)
        if hangs:
            print(f"nothing moved for {HANG_S} s: {bus.stats()}", file=sys.stderr)
        print(json.dumps(audit(soak, soak.finish(), hangs)))
    with contextlib.suppress(shmbus.BusNotFoundError):
        shmbus.unlink(name)


if __name__ == "__main__":
    main()
