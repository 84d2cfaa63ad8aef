"""Two rounds of one prompt under way at once never meet in one group."""

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import SHM_DIR, Spawner, wait_until

import shmbus
from shmbus import Bus, Consumer, Producer
from shmbus.store import snapshot
from shmbus_ext import _core

DATA = np.arange(10, dtype=np.int32)
SIZE = 4


WORKER = """
import sys
import numpy as np
from shmbus import Producer
name, size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Producer(name) as producer:
    for _ in range(rounds):
        round = producer.next_round()
        for index in range(size):
            producer.put(
                "q", group_size=size, index=index, score=round % 2**52, round=round, timeout=30,
                tokens=np.arange(10, dtype=np.int32),
            )
        print(round, flush=True)
"""


def test_rounds_of_workers_that_are_killed_in_the_middle_mix_with_no_other(
    bus_name: str, seed: int, spawn: Spawner
) -> None:
    rng = random.Random(seed)
    finished: set[int] = set()
    with Bus.create(bus_name, "1MiB"), Consumer(bus_name) as reader:
        found: list[int] = []
        killed = [spawn.script(WORKER, bus_name, SIZE, 10**9) for _ in range(2)]

        def drain() -> None:
            for group in reader.take(timeout=0.05):
                assert len({t.score for t in group}) == 1 and len(group) == SIZE
                found.append(int(group[0].score))
                group.ack()

        for child in killed:
            while "\n" not in child.output():
                drain()
        until = time.monotonic() + rng.uniform(0, 0.3)
        while time.monotonic() < until:
            drain()
        for child in killed:
            child.kill()
        others = [spawn.script(WORKER, bus_name, SIZE, 20) for _ in range(2)]
        while any(child.popen.poll() is None for child in others):
            drain()
        for child in (*killed, *others):
            finished |= {int(line) % 2**52 for line in child.output().split("\n")[:-1]}
        wait_until(lambda: drain() or finished <= set(found), what="all finished rounds")
        assert len(set(found)) == len(found)
        ledger = reader.stats()
        assert ledger.balanced and not ledger.dropped
        assert ledger.groups_open <= len(killed)


def test_a_round_is_never_handed_out_again_by_a_restored_bus_or_a_successor(
    bus_name: str, tmp_path: Path
) -> None:
    with Bus.create(bus_name, "1MiB"):
        producer = Producer(bus_name, attach="successor")
        seen = [producer.next_round() for _ in range(3)]
        # As after more rounds than microseconds have passed.
        with open(SHM_DIR / f"shmbus.{bus_name}", "r+b") as file:
            os.pwrite(file.fileno(), (seen[-1] + 10**12).to_bytes(8, "little"), _next_round_at())
        seen.append(producer.next_round())
        snapshot.take(bus_name, tmp_path / "s")
    snapshot.restore(tmp_path / "s", bus_name)
    with Producer(bus_name) as other:
        assert other.next_round() == seen[-1] + 1
    assert producer.next_round() == seen[-1] + 2
    shmbus.unlink(bus_name)
    with pytest.raises(shmbus.BusRemovedError):
        producer.next_round()
    producer.close()


def test_a_bus_begins_above_the_rounds_of_the_one_before(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        last = [producer.next_round() for _ in range(100)][-1]
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        assert producer.next_round() > last


def test_a_scribbled_counter_still_gives_rounds_that_put_takes(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        with open(SHM_DIR / f"shmbus.{bus_name}", "r+b") as file:
            os.pwrite(file.fileno(), b"\xff" * 8, _next_round_at())
        for _ in range(3):
            producer.put("q", group_size=1, index=0, round=producer.next_round(), tokens=DATA)


def _next_round_at() -> int:
    header = _core.layout()["bus_header"]
    return int(header["offsets"][header["names"].index("next_round")])
