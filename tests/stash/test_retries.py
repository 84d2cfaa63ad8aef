"""Asking for samples again, step by step: what a collector's look and a death have between them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import Spawner, wait_until

from shmbus import Bus, Producer
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy

# Takes what is wanted, and answers when it is told to; then it stays.
TAKER = """
import sys, time, numpy as np, shmbus
producer = shmbus.Producer(sys.argv[1])
while not (found := producer.requests.retries()):
    time.sleep(0.002)
print("took", flush=True)
while producer.policy_version < 1:
    time.sleep(0.002)
for w in found:
    producer.put(w.instance_id, group_size=2, index=w.index, x=np.ones(8))
print("answered", flush=True)
time.sleep(600)
"""
RETRIES = 1


@pytest.fixture
def collector(bus_name: str) -> Iterator[Collector]:
    """A collector that asks once for what one of its bus's two producers says has failed."""
    with Bus.create(bus_name, "1MiB", max_producers=2):
        collector = Collector(
            bus_name, StashPolicy(sample_retries=RETRIES, retry_backoff_s=(0.0, 0.0))
        )
        with Producer(bus_name) as producer:
            producer.put("a", group_size=2, index=0, x=np.ones(8))
            producer.fail("a", 1, "flaky", group_size=2)
        assert not collector.pump_once(0.0)
        yield collector
        collector.close()


def sweep(collector: Collector) -> None:
    """What a collector does once a second."""
    collector.reader.sweep()
    collector._retries.check_claimants()


def test_an_answer_that_comes_after_the_last_look_at_the_ring_is_no_failed_attempt(
    collector: Collector, bus_name: str, spawn: Spawner
) -> None:
    taker = spawn.script(TAKER, bus_name)
    taker.expect("took")
    sweep(collector)
    # The ring has been read to its end; now the taker answers, dies, and has an heir.
    collector.policy_version = 1
    taker.expect("answered")
    taker.kill()
    with Producer(bus_name), Producer(bus_name):
        collector._retries.update(1.0, drained=True)
        assert len(collector.stash.failures.requests) == 1
        collector.pump_once(2.0)
        (group,) = collector.lease(1)
        assert [sample.index for sample in group.samples] == [0, 1]
        assert collector.stash.given_up == 0


def test_a_death_counts_once_all_that_the_dead_committed_is_read(
    collector: Collector, bus_name: str, spawn: Spawner
) -> None:
    taker = spawn.script(TAKER, bus_name)
    taker.expect("took")
    taker.kill()

    def given_up() -> bool:
        sweep(collector)
        collector._retries.update(1.0, drained=False)
        assert len(collector.stash.failures.requests) == 1
        collector._retries.update(1.0, drained=True)
        return collector.stash.given_up == 1

    # The kernel may take a moment to drop a dead process's locks.
    wait_until(given_up)
    assert not collector.stash.failures.requests
