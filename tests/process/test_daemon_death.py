"""Load over a daemon that is killed, with ranks and producers that are killed: nothing is lost.

What a rank acknowledges it writes down before and after, so that a death in between is told from a
group that was delivered twice.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Child, Daemon, Spawner, client_of, wait_until

from shmbus import Bus, Consumer, Producer

PRODUCERS = 4
RANKS = 2
KILLS = 5
# Seconds of load; the suite runs the short form.
LOAD_S = float(os.environ.get("SHMBUS_TEST_LOAD_S", "4"))

PRODUCE = """
import sys, time
import numpy as np
from shmbus import Producer
name, who, stop = sys.argv[1:]
import os
with Producer(name) as producer:
    print("putting")
    number = 0
    while not os.path.exists(stop):
        tokens = 50 + (number * 37) % 400
        producer.put_many([
            dict(instance_id=f"{who}-{os.getpid()}-{number}", group_size=4, index=i,
                 tokens=np.full(tokens, number, np.int32))
            for i in range(4)
        ])
        number += 1
        time.sleep(0.002)
print("done")
"""

TRAIN = """
import sys, os
from shmbus import Consumer
name, rank, log, stop = sys.argv[1:]
with Consumer(name, rank=int(rank), world_size=2) as consumer, open(log, "a", buffering=1) as out:
    print("training")
    while not os.path.exists(stop):
        for group in consumer.take_shard(tokens=4000, max_wait=0.05, timeout=0.5):
            key = ",".join(f"{t.producer_id}:{t.sequence}" for t in group)
            assert len({t["tokens"][0] for t in group}) == 1
            assert all((t["tokens"] == t["tokens"][0]).all() for t in group)
            out.write(f"begin {key}\\n")
            group.ack()
            out.write(f"ended {key}\\n")
print("done")
"""


def entries(logs: list[Path], kind: str) -> Counter[str]:
    """How often each trajectory stands in the logs behind `kind`."""
    found: Counter[str] = Counter()
    for log in logs:
        for line in log.read_text().splitlines():
            if line.startswith(kind + " "):
                found.update(line.split(" ")[1].split(","))
    return found


class Cast:
    """The processes of one run, each to be killed and replaced."""

    def __init__(self, spawn: Spawner, name: str, directory: Path) -> None:
        self.name = name
        self._spawn = spawn
        self._directory = directory
        self.logs: list[Path] = []
        self.producing, self.training = directory / "stop-producing", directory / "stop-training"
        self.producers = [self._producer(i) for i in range(PRODUCERS)]
        self.ranks = [self._rank(i) for i in range(RANKS)]

    def _producer(self, who: int) -> Child:
        return self._spawn.script(PRODUCE, self.name, who, self.producing)

    def _rank(self, rank: int) -> Child:
        log = self._directory / f"rank-{rank}-{len(self.logs)}.log"
        log.touch()
        self.logs.append(log)
        return self._spawn.script(TRAIN, self.name, rank, log, self.training)

    def replace_producer(self, who: int) -> None:
        self.producers[who].kill()
        self.producers[who] = self._producer(who)

    def replace_rank(self, rank: int) -> None:
        self.ranks[rank].kill()
        self.ranks[rank] = self._rank(rank)

    def acknowledged(self) -> int:
        return len(entries(self.logs, "ended"))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_trajectory_is_acknowledged_once_whoever_is_killed(
    spawn: Spawner, daemon: Callable[..., Daemon], bus_name: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    served = daemon("--capacity", "32MiB", "--group-timeout", 2, "--on-timeout", "partial")
    cast = Cast(spawn, bus_name, tmp_path)
    wait_until(cast.acknowledged, what="a first acknowledgement")
    for kill in range(KILLS):
        time.sleep(LOAD_S / KILLS / 3)
        served.kill()
        if kill % 2:
            time.sleep(rng.uniform(0, 0.3))
        before = cast.acknowledged()
        served.start()
        wait_until(
            lambda before=before: cast.acknowledged() > before,  # type: ignore[misc]
            what=f"acknowledgements after restart {kill + 1}",
        )
        time.sleep(LOAD_S / KILLS / 3)
        cast.replace_producer(rng.randrange(PRODUCERS))
        cast.replace_rank(kill % RANKS)
        time.sleep(LOAD_S / KILLS / 3)
    cast.producing.touch()
    for producer in cast.producers:
        producer.finish()
    cast.training.touch()
    for rank in cast.ranks:
        rank.finish()
    rest = tmp_path / "rest.log"
    with Consumer(bus_name) as consumer, rest.open("w") as out:
        while (ledger := consumer.stats()).leased or ledger.stashed or ledger.in_ring:
            for group in consumer.take(64, timeout=0.1):
                key = ",".join(f"{t.producer_id}:{t.sequence}" for t in group)
                out.write(f"begin {key}\n")
                group.ack()
                out.write(f"ended {key}\n")
    served.stop()
    logs = [*cast.logs, rest]
    begun, ended = entries(logs, "begin"), entries(logs, "ended")
    twice = {key for key, count in ended.items() if count > 1}
    assert not twice
    bus = Bus.open(bus_name)
    stats = bus.stats()
    bus.close()
    print(f"{stats.committed} trajectories, {len(ended)} acknowledgements written down")
    assert stats.committed == stats.acknowledged == len(begun)
    assert not stats.dropped and not stats.undelivered
    bus.unlink()


def test_what_a_dead_daemon_had_granted_last_is_not_taken_for_the_next_ones(
    daemon: Callable[..., Daemon], bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        for key in ("a", "b", "c"):
            producer.put(key, group_size=1, index=0, tokens=np.arange(8, dtype=np.int32))
        client = client_of(consumer)
        borrow, wires = client.borrow, [client.connection.wire]

        def late(*arguments: Any) -> Any:
            # The watcher reaches the next daemon before the thread with the reply goes on.
            if len(wires) == 1:
                served.kill()
                served.start()
                wires.append(wait_until(lambda: client.connection.wire not in (None, wires[0])))
            return borrow(*arguments)

        monkeypatch.setattr(client, "borrow", late)
        taken = [consumer.take(1, timeout=10)[0] for _ in range(3)]
        assert [group.instance_id for group in taken] == ["a", "b", "c"]
        consumer.ack(taken)
        assert wait_until(lambda: consumer.stats().acknowledged == 3)
