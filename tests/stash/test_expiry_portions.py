"""Late groups: one look ends a bounded number, the oldest first, and the next look goes on."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import ends_of, wait_until
from counted_work import instructions

from shmbus import Bus, Producer
from shmbus.base import limits
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy

PORTION = limits.EXPIRE_GROUPS


def put_halves(producer: Producer, groups: int) -> None:
    x = np.zeros(1, np.int8)
    for group in range(groups):
        producer.put(f"g{group}", group_size=2, index=0, x=x)


@pytest.mark.parametrize("policy", [{}, {"on_timeout": "partial"}, {"sample_retries": 1}])
def test_a_look_ends_a_portion_of_the_late_groups(bus_name: str, policy: dict[str, Any]) -> None:
    costs = []
    for late in (PORTION + 10, 3 * PORTION):
        with Bus.create(f"{bus_name}-{late}", "64MiB") as bus, Producer(bus.name) as producer:
            collector = Collector(bus.name, StashPolicy(group_timeout_s=10.0, **policy))
            stash = collector.stash
            put_halves(producer, late)
            while collector.pump_once(0.0):
                pass
            left = [group.key for group in stash.oldest(late)]
            costs.append(instructions(partial(collector.expire, 20.0)))
            due_s = stash.next_deadline_s()
            assert due_s is not None and due_s <= 20.0
            if not stash.failures.groups:
                assert [group.key for group in stash.oldest(late)] == left[PORTION:]
            for _ in range(2):
                collector.expire(20.0)
            ended = stash.table.ready_groups + len(stash.discards) + len(stash.failures.groups)
            assert ended == late
            assert stash.table.oldest_born_s is None
            collector.close()
    assert costs[1] <= 1.2 * costs[0]


def test_a_take_goes_on_until_all_late_groups_have_ended(bus_name: str) -> None:
    with ends_of(Bus.create(bus_name, "64MiB"), group_timeout=0.01) as (producer, consumer):
        put_halves(producer, 2 * PORTION + 1)
        producer.put("whole", group_size=1, index=0, x=np.zeros(1, np.int8))
        consumer.ack(consumer.take(1, timeout=10))
        dropped = {"timeout": 2 * PORTION + 1}
        wait_until(
            lambda: consumer.take(1, timeout=0.1) == [] and consumer.stats().dropped == dropped
        )
