"""A source faster than its sibling: a trainer's bus never fills with halves of groups."""

import tempfile
import time

import numpy as np
from fork_server import TEMPLATE
from relay.relay_storm import Plan, work

import shmbus

GROUPS = 300
SIZE = 4
#: 100 kB a sample: the trainer's bus has room for halves of 80 groups, a source's for 320.
TOKENS = 25_000
SAMPLE_BYTES = 4 * TOKENS
TRAINER_BYTES = 16 << 20
SOURCE_BYTES = 4 * TRAINER_BYTES
#: Lead of the fast source in samples: these halves alone fill the trainer's bus.
AHEAD = TRAINER_BYTES // SAMPLE_BYTES + 20
PAUSE_S = 0.001
#: Seconds without a group that count as standing still.
SILENT_S = 10.0


def produce(name: str, first: int, fast: str) -> None:
    """Put every second sample of each group; the slow source keeps behind the fast one."""
    with shmbus.Producer(name) as producer, shmbus.Bus.open(fast) as other:
        for group in range(GROUPS):
            while name != fast and other.stats().committed < 2 * min(GROUPS, group + AHEAD // 2):
                time.sleep(PAUSE_S)
            for index in range(first, SIZE, 2):
                producer.put(
                    f"q{group}", group_size=SIZE, index=index, score=float(index), timeout=None,
                    tokens=np.full(TOKENS, group, np.int32),
                )  # fmt: skip
            time.sleep(PAUSE_S)


def test_a_source_far_ahead_of_the_other_never_stops_a_relay(bus_name: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        plan = Plan(bus_name, directory)
        buses = [shmbus.Bus.create(name, SOURCE_BYTES) for name in plan.sources]
        buses += [shmbus.Bus.create(name, TRAINER_BYTES) for name in plan.trainers]
        children = [
            TEMPLATE.Process(target=work, args=(plan, each), daemon=True) for each in plan.parties
        ]
        children += [
            TEMPLATE.Process(target=produce, args=(name, i, plan.sources[0]), daemon=True)
            for i, name in enumerate(plan.sources)
        ]
        try:
            for child in children:
                child.start()
            taken, moved_s, most_ahead = 0, time.monotonic(), 0
            with shmbus.Consumer(plan.trainers[0]) as consumer:
                while taken < GROUPS:
                    for group in consumer.take(timeout=0.1):
                        number = int(group.instance_id[1:])
                        assert all((t["tokens"] == number).all() for t in group)
                        group.ack()
                        taken, moved_s = taken + 1, time.monotonic()
                    fast, slow, trainer = (bus.stats() for bus in buses)
                    most_ahead = max(most_ahead, fast.committed - slow.committed)
                    assert time.monotonic() - moved_s < SILENT_S, f"stands still: {trainer}"
            print(f"{GROUPS} groups; the fast source was up to {most_ahead} samples ahead")
            # In the order of arrival these halves alone would have filled the trainer's bus.
            assert most_ahead * SAMPLE_BYTES > TRAINER_BYTES
        finally:
            for child in children:
                if child.pid is not None:
                    child.kill()
                    child.join()
            for bus in buses:
                bus.unlink()
