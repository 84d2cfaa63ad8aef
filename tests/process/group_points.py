"""A death and a stop at each named point of a producer of whole groups, as a program.

Uses parts of failpoints.py; test_failpoints.py builds, runs and judges it. The child puts groups of
a split, the first to name it.
"""

import numpy as np
from failpoints import EXTENT, meet, pattern, play, verdict
from supervisor import Child, deadline

import shmbus

GROUPS, SIZE = 40, 3
SPLIT = "a split of more than one word"

#: Point: passes before the signal; late passes lie behind several wraps.
POINTS: dict[str, tuple[int, ...]] = {
    "split-naming": (1, 2, 4),
    "commit-intended": (1, 25),
    "group-filled": (1, 25),
    "record-exposed": (1, 25),
    "commit-marked": (1, 25),
    "run-leased": (1, 9),
}


def write_groups(name: str) -> None:
    with shmbus.Producer(name) as producer:
        for number in range(GROUPS):
            size = 2000 if number % 7 == 3 else 100 + number * 97 % 900
            samples = [{"data": pattern(number * SIZE + index, size)} for index in range(SIZE)]
            producer.put_group(f"g{number}", samples, split=SPLIT, round=number)


def whole_case(name: str, failpoint: str, action: str) -> dict[str, object]:
    """Signal the producer; the collector goes on, and a second producer names the split."""
    seen: list[int] = []
    faults: list[str] = []
    naming = failpoint.startswith("split-naming")

    def take(timeout: float) -> int:
        groups = consumer.take(64, timeout, split=SPLIT)
        for group in groups:
            number = int(group.instance_id[1:])
            seen.append(number)
            if len(group) != SIZE:
                faults.append(f"group {number} has {len(group)} samples")
            for sample in group:
                wanted = pattern(number * SIZE + sample.index, len(sample["data"]))
                if not np.array_equal(sample["data"], wanted):
                    faults.append(f"sample {sample.index} of group {number} is torn")
            group.ack()
        return len(groups)

    with shmbus.Bus.create(name, "64KiB", max_producers=2, extent_bytes=EXTENT):
        consumer = shmbus.Consumer(name)
        child = Child(lambda: write_groups(name), failpoint)

        def beside() -> None:
            if naming:
                consumer.take(1, 0.002)  # of another split: a take names the split, too
            else:
                take(0.002)

        def stopped() -> None:
            nonlocal naming
            naming = False

        signalled = meet(child, beside, stopped)
        with shmbus.Producer(name) as healthy:
            samples = [{"data": pattern(999 * SIZE + index, 9)} for index in range(SIZE)]
            healthy.put_group("g999", samples, split=SPLIT)
        for _ in deadline("the last groups"):
            stats = consumer.stats()
            if not take(0.01) and stats.in_ring == 0 and stats.producers == 0:
                break
        ledger = consumer.stats()
        if list(ledger.splits) != ["train", SPLIT]:
            faults.append(f"the splits are {list(ledger.splits)}")
        elif ledger.splits[SPLIT].acknowledged != ledger.acknowledged:
            faults.append(f"the split counts {ledger.splits[SPLIT]} of {ledger.acknowledged}")
        if ledger.groups_open or ledger.stashed:
            faults.append(f"half a group is there: {ledger}")
        consumer.close()
    if sorted(seen)[:-1] != list(range(len(seen) - 1)):
        faults.append(f"lost or doubled: {sorted(seen)}")
    if action == "stop" and len(seen) != GROUPS + 1:
        faults.append(f"{len(seen)} groups came after it went on")
    return verdict(signalled, faults, ledger, child)


if __name__ == "__main__":
    play({"whole": POINTS}, {"whole": whole_case})
