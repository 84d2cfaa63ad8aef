"""Asking for samples again, step by step: between a collector's look and a death."""

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import Spawner, wait_until
from counted_work import instructions

from shmbus import Bus, Producer
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext._core import RETRY_ENTRIES

# Takes a wanted sample, answers when told, and stays.
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
    """A collector that asks once for a failed sample of one of its bus's two producers."""
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
    collector.reader.sweep()
    collector._retries.check_claimants()


def test_an_answer_that_comes_after_the_last_look_at_the_ring_is_no_failed_attempt(
    collector: Collector, bus_name: str, spawn: Spawner
) -> None:
    taker = spawn.script(TAKER, bus_name, until="took")
    sweep(collector)
    # The ring was read to its end; now the taker answers, dies, and gets an heir.
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
    taker = spawn.script(TAKER, bus_name, until="took")
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


def work_of_a_failure(name: str, failing: int, backoff_s: float) -> int:
    """Instructions for a further failure beside more failing groups than rows in the table."""
    policy = StashPolicy(sample_retries=3, retry_backoff_s=(backoff_s, backoff_s))
    with Bus.create(name, "16MiB"), Producer(name) as producer:
        collector = Collector(name, policy)
        for group in range(failing):
            producer.fail(f"g{group}", 0, "flaky", group_size=2)
        while collector.pump_once(0.0):
            pass
        collector.pump_once(10.0)
        producer.fail("one more", 0, "flaky", group_size=2)
        found = instructions(lambda: collector.pump_once(20.0))
        assert len(collector.stash.failures.requests) == failing + 1
        collector.close()
    return found


@pytest.mark.parametrize("backoff_s", [1.0, 1000.0])
def test_a_failure_costs_the_same_beside_many_that_fail(bus_name: str, backoff_s: float) -> None:
    few, many = (work_of_a_failure(f"{bus_name}-{n}", n, backoff_s) for n in (300, 6_000))
    assert many <= 1.1 * few


def test_a_free_row_asks_for_what_has_been_due_longest(collector: Collector) -> None:
    failures = collector.stash.failures
    with Producer(collector.segment.name) as producer:
        for group in range(RETRY_ENTRIES + 3):
            producer.fail(f"g{group}", 0, "flaky", group_size=2)
        collector.pump_once(1.0)
        collector.pump_once(2.0)
        unasked = [key for (key, _), r in failures.requests.items() if r.deadline_s is None]
        assert len(unasked) == 4
        producer.put("g0", group_size=2, index=0, x=np.ones(8))
        collector.pump_once(3.0)
    assert [key for (key, _), r in failures.requests.items() if r.deadline_s is None] == unasked[1:]
