"""No batch is older at its delivery than `max_policy_lag`, with ranks and whatever the backlog."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import numpy as np
import pytest
from conftest import DEFAULT_DEADLINE_S, PATIENCE, Daemon
from fork_server import TEMPLATE

from shmbus import Producer
from trainer_adapter import OnlineDataHandler

LAG = 2
STEPS = 12
GROUPS = 2
BACKLOG = 200
WAIT_S = DEFAULT_DEADLINE_S * PATIENCE


def train(name: str, rank: int, ranks: int, turns: Barrier, lags: Queue[list[int]]) -> None:
    """Take steps in time with the other ranks, as their all-reduce has them do."""
    found = []
    with OnlineDataHandler(
        name, groups_per_batch=GROUPS, rank=rank, world_size=ranks, max_policy_lag=LAG
    ) as handler:
        for step in range(STEPS):
            turns.wait(WAIT_S)
            batch = handler.next_batch(WAIT_S)
            found.append(step - int(batch.policy_versions.min()))
            turns.wait(WAIT_S)
            handler.ack(batch)
            if rank == 0:
                handler.set_policy_version(step + 1)
        lags.put(found)
        turns.wait(WAIT_S)


def put(producer: Producer, count: int) -> None:
    round = producer.next_round()
    version = producer.policy_version
    for group in range(count):
        for index in range(2):
            producer.put(
                f"g{group}", group_size=2, index=index, score=index, policy_version=version,
                round=round, tokens=np.arange(10, dtype=np.int32), timeout=WAIT_S,
            )  # fmt: skip


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_rank_is_over_limit(daemon: Callable[..., Daemon], bus_name: str, ranks: int) -> None:
    daemon("--capacity", "8MiB", "--max-policy-lag", LAG)
    turns, lags = TEMPLATE.Barrier(ranks), TEMPLATE.Queue()
    over = threading.Event()
    with Producer(bus_name) as producer:
        put(producer, BACKLOG)
        processes = [
            TEMPLATE.Process(target=train, args=(bus_name, rank, ranks, turns, lags), daemon=True)
            for rank in range(ranks)
        ]

        def feed() -> None:
            while not over.wait(0.005):
                if producer.pressure() < 0.5:
                    put(producer, 2 * ranks)

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            for process in processes:
                process.start()
            found = [lags.get(timeout=WAIT_S) for _ in processes]
            for process in processes:
                process.join(WAIT_S)
        finally:
            over.set()
            feeder.join()
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        print(found)
        assert all(0 <= lag <= LAG for rank in found for lag in rank)
        assert all(LAG in rank for rank in found)
        assert [process.exitcode for process in processes] == [0] * ranks
