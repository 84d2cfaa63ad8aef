"""Groups that a daemon grants to a client that sleeps and polls by turns, over kills.

SHMBUS_TEST_GRANT_KILLS is how often the daemon is killed, at random instants; 2 where it is unset.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import numpy as np
from conftest import Daemon

from shmbus import Consumer, Producer

Served = Callable[..., Daemon]

KILLS = int(os.environ.get("SHMBUS_TEST_GRANT_KILLS", "2"))
# Longer than a daemon needs to come back on a loaded machine.
DEADLINE_S = 60.0


def test_each_group_is_delivered_once_however_often_the_daemon_is_killed(
    daemon: Served, bus_name: str, seed: int
) -> None:
    print("seed", seed)
    generator = random.Random(seed)
    served = daemon("--capacity", "4MiB")
    over = threading.Event()
    put: list[str] = []
    failed: list[BaseException] = []

    def produce() -> None:
        pauses = random.Random(seed + 1)
        with Producer(bus_name) as producer:
            while not over.is_set():
                key, size = f"g{len(put)}", pauses.choice((1, 1, 2, 5))
                for index in range(size):
                    tokens = np.full(4, index, np.int32)
                    producer.put(
                        key, group_size=size, index=index, tokens=tokens, timeout=DEADLINE_S
                    )
                put.append(key)
                time.sleep(pauses.uniform(0, 0.002))

    def kill() -> None:
        try:
            for _ in range(KILLS):
                time.sleep(generator.uniform(0.1, 0.5))
                served.kill()
                served.start()
        except BaseException as error:
            failed.append(error)
        finally:
            over.set()

    threads = [threading.Thread(target=each) for each in (produce, kill)]
    got: list[str] = []
    with Consumer(bus_name) as consumer:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + DEADLINE_S * (1 + KILLS)
        number = 0
        while any(thread.is_alive() for thread in threads) or len(got) < len(put):
            assert time.monotonic() < deadline, f"{len(got)} of {len(put)} groups came"
            number += 1
            for group in consumer.take(1, 0 if number // 64 % 2 else 0.01):
                tokens = [int(trajectory["tokens"][0]) for trajectory in group]
                assert tokens == list(range(len(group)))
                got.append(group.instance_id)
                consumer.ack([group])
        for thread in threads:
            thread.join()
        assert failed == []
        assert sorted(got) == sorted(put)
        assert consumer.take(1, 0) == []
        ledger = consumer.stats()
        assert ledger.balanced and ledger.leased == ledger.stashed == ledger.in_ring == 0
