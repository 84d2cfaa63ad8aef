"""Making space on a nearly full bus: only the runs that hold little are looked at, in shares."""

from typing import Any

import numpy as np
import pytest
from conftest import ends_of, wait_until

from shmbus import Bus, Consumer, Producer
from shmbus.stash.collector import Collector
from shmbus.stash.stash import Stash

BODY = np.zeros(1500, np.int8)


def collector_of(consumer: Consumer) -> Collector:
    assert isinstance(consumer._source, Collector)
    return consumer._source


def leave_stragglers(producer: Producer, consumer: Consumer, runs: int, **sample: Any) -> int:
    """Fill runs with groups that are acknowledged, and one sample in each that waits on."""
    for number in range(runs):
        producer.put(f"s{number}", group_size=2, index=0, body=BODY, **sample)
        for filler in range(40):
            producer.put(f"f{number}.{filler}", group_size=1, index=0, body=BODY)
        while groups := consumer.take(99, timeout=0):
            consumer.ack(groups)
    return runs


def test_a_nearly_full_bus_of_waiting_samples_is_not_walked_for_stragglers(
    bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[int] = []
    monkeypatch.setattr(Stash, "waiting_samples", lambda stash: walks.append(1) or [])
    bus = Bus.create(bus_name, "1MiB", max_producers=2)
    with ends_of(bus) as (producer, consumer):
        number = 0
        while bus._segment.free_extents() >= bus._segment.extent_count / 8:
            producer.put(f"w{number}", group_size=2, index=0, body=BODY)
            number += 1
        collector = collector_of(consumer)
        wait_until(lambda: consumer.take(timeout=0.02) or consumer.stats().in_ring == 0)
        for _ in range(5):
            collector._upkeep.next_evacuation_s = 0.0
            assert consumer.take(timeout=0.001) == []
        assert walks == [] and collector.reader.stragglers(1 << 20) == []


def test_each_look_for_stragglers_visits_a_share_and_the_next_goes_on_there(bus_name: str) -> None:
    with ends_of(Bus.create(bus_name, "2MiB", max_producers=2)) as (producer, consumer):
        count = leave_stragglers(producer, consumer, 12)
        producer.put("last", group_size=1, index=0, body=np.zeros(65536, np.int8))
        consumer.ack(consumer.take(timeout=10))
        reader = collector_of(consumer).reader
        shares = [reader.stragglers(1) for _ in range(2 * count)]
        assert max(map(len, shares)) < count / 2
        assert len({each[3] for share in shares for each in share}) >= count - 1
        assert {name for share in shares for name, *_ in share} <= {f"s{n}" for n in range(count)}


@pytest.mark.parametrize("failing", [False, True])
def test_samples_of_failing_groups_make_way_as_those_of_incomplete_ones(
    bus_name: str, failing: bool
) -> None:
    bus = Bus.create(bus_name, "1MiB", max_producers=2)
    with ends_of(bus, sample_retries=3, retry_backoff=(60.0, 60.0)) as (producer, consumer):
        number = 0

        def moved() -> int:
            nonlocal number
            number += leave_stragglers(producer, consumer, 1, round=number)
            if failing:
                producer.fail("s0", index=1, reason="no", group_size=2, round=number - 1)
            return consumer.stats().moved

        wait_until(moved)
        assert consumer.stats().balanced
