"""What a small journal, a bus that has gone, and words that are too long do to a relay: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import wait_until
from relay.local import COORDINATOR, put_group, relay, stats, take

import shmbus
from shmbus.relay import messages as m
from shmbus.stash.stash import StashPolicy

pytest_plugins = ["relay.relay_fixtures"]


@pytest.fixture
def small(bus_name: str) -> Iterator[dict[str, str]]:
    """A source, and a trainer's bus whose journal has 128 entries."""
    names = {"a": f"{bus_name}.a", "t": f"{bus_name}.t"}
    for name, capacity in zip(names.values(), ("4MiB", "1MiB"), strict=True):
        shmbus.Bus.create(name, capacity).close()
    yield names
    for name in names.values():
        shmbus.unlink(name)


def test_more_small_records_than_the_journal_has_entries_cross(small: dict[str, str]) -> None:
    groups = 300
    with shmbus.Producer(small["a"]) as producer:
        for i in range(groups):
            producer.put(f"q{i}", group_size=1, index=0, score=1.0, tokens=np.ones(2, np.int32))
    with relay([small["a"]], [small["t"]]), shmbus.Consumer(small["t"]) as consumer:
        seen: list[str] = []
        while len(seen) < groups:
            found = consumer.take(timeout=30.0)
            assert found, f"{len(seen)} of {groups} groups"
            for group in found:
                seen.append(group.instance_id)
                group.ack()
        assert sorted(seen) == sorted(f"q{i}" for i in range(groups))
        wait_until(lambda: stats(small["a"]).acknowledged == groups)


@pytest.mark.parametrize(
    ("there", "reason"), [(140, "malformed"), (139, "timeout")], ids=["too-large", "late"]
)
def test_a_group_of_more_records_than_the_journal_has_entries_is_dropped(
    small: dict[str, str], there: int, reason: str
) -> None:
    policy = StashPolicy(group_timeout_s=0.5, on_timeout="drop")
    with relay([small["a"]], [small["t"]], policy=policy) as made:
        with shmbus.Producer(small["a"]) as producer:
            for i in range(there):
                producer.put("many", group_size=140, index=i, score=1.0)
        wait_until(lambda: stats(small["a"]).dropped == {reason: there})
        wait_until(lambda: made.coordinator.note().dropped == {reason: there})
        put_group([small["a"]], 1)
        with shmbus.Consumer(small["t"]) as consumer:
            take(consumer, 1)


def test_a_record_of_a_bus_that_has_gone_ends_nothing_of_another_one(
    buses: dict[str, str],
) -> None:
    """Its entry of the journal is not another record's while a record on the bus names it."""
    with (
        relay([buses["a"], buses["b"]], [buses["t"]]) as made,
        shmbus.Consumer(buses["t"]) as consumer,
    ):
        sink = made.parties[buses["t"]]
        put_group([buses["a"]], 1)
        (gone,) = take(consumer, 1)
        wait_until(lambda: len(sink.sink.settled) == 4)
        shmbus.unlink(buses["a"])
        shmbus.Bus.create(buses["a"], "4MiB").close()
        wait_until(lambda: not sink.sink.settled)
        put_group([buses["b"]], 2)
        (held,) = take(consumer, 1)
        wait_until(lambda: len(sink.sink.settled) == 4)
        gone.ack()
        wait_until(lambda: not sink.sink.left_behind)
        assert not sink.sink.ended and stats(buses["b"]).acknowledged == 0
        held.ack()
        wait_until(lambda: stats(buses["b"]).acknowledged == 4)
        wait_until(lambda: not sink.journal._entries)
