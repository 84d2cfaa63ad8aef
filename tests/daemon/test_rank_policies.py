"""What a daemon promises without ranks holds with them: policies, and a status without riddles."""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
from conftest import Daemon, take_groups, two_ranks, wait_until

from shmbus import Consumer, Group, Producer
from shmbus.inspect.status import BusStatus, read_status

Served = Callable[..., Daemon]

LAG = 2


def put(producer: Producer, groups: range, *, size: int = 2, present: int = 2) -> None:
    for group in groups:
        for index in range(present):
            producer.put(
                f"g{group}", group_size=size, index=index, score=index,
                policy_version=producer.policy_version, tokens=np.full(10, group, np.int32),
            )  # fmt: skip


def oldest(groups: list[Group]) -> int:
    return min(trajectory.policy_version for group in groups for trajectory in group)


def settled(name: str, acknowledged: int) -> BusStatus:
    found: list[BusStatus] = []

    def read() -> bool:
        found[:] = [read_status(name)]
        return found[0].ledger.acknowledged == acknowledged

    wait_until(read, what=f"{acknowledged} acknowledged")
    return found[0]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", [{"groups": 2}, {"tokens": 40, "max_wait": 0.5}])
def test_the_lag_holds_at_delivery_whatever_backlog_there_was(
    daemon: Served, bus_name: str, ranks: int, size: dict[str, float]
) -> None:
    daemon("--capacity", "8MiB", "--max-policy-lag", LAG)
    with ExitStack() as stack, Producer(bus_name) as producer:
        put(producer, range(60))
        consumers = [
            stack.enter_context(Consumer(bus_name, rank=r, world_size=ranks)) for r in range(ranks)
        ]
        acknowledged = 0
        for version in range(12):
            for consumer in consumers:
                groups = consumer.take_shard(**size, timeout=20)
                assert version - oldest(groups) <= LAG
                acknowledged += sum(map(len, groups))
                consumer.ack(groups)
            consumers[0].policy_version = version + 1
            put(producer, range(100 * (version + 1), 100 * (version + 1) + 3 * ranks))
        ledger = settled(bus_name, acknowledged).ledger
        assert ledger.balanced
        assert ledger.dropped["stale"] > 0
        assert ledger.dropped["stale"] % 2 == 0


def test_a_shard_that_was_formed_stays_what_it_is_for_the_rank_that_comes_late(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB", "--max-policy-lag", LAG)
    with Producer(bus_name) as producer, two_ranks(bus_name) as (zero, one):
        put(producer, range(4))
        first = zero.take_shard(groups=2, timeout=10)
        zero.policy_version = 10
        second = one.take_shard(groups=2, timeout=10)
        assert {g.instance_id for g in first + second} == {"g0", "g1", "g2", "g3"}


def test_what_no_rank_holds_is_ready_and_not_leased(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer, two_ranks(bus_name) as (zero, one):
        put(producer, range(21))
        zero.take_shard(groups=2, timeout=10)
        wait_until(lambda: read_status(bus_name).ledger.leased == 4)
        found = settled(bus_name, 0)
        assert found.ledger.balanced
        assert (found.ledger.leased, found.ledger.stashed) == (4, 38)
        assert found.daemon is not None
        assert (found.daemon.groups_leased, found.daemon.groups_ready) == (2, 19)
        assert one.take_shard(groups=2, timeout=10)
        wait_until(lambda: read_status(bus_name).collector.leased_groups == 4)
        assert zero.stats().balanced


def test_ranks_that_left_in_order_leave_no_leases_that_nobody_holds(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer:
        put(producer, range(100))
    consumers = [Consumer(bus_name, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(5):
        for consumer in consumers:
            consumer.ack(consumer.take_shard(groups=3, timeout=10))
    # A further step, with one rank's part taken, and a request without a ready group.
    left = [group.instance_id for group in consumers[0].take_shard(groups=3, timeout=10)]
    consumers[1].take_shard(groups=3, timeout=10)
    assert consumers[1].take_shard(groups=40, timeout=0.1) == []
    for consumer in consumers:
        consumer.close()

    def released() -> bool:
        status = read_status(bus_name)
        assert status.daemon is not None
        return not status.daemon.leases and status.collector.leased_groups == 0

    wait_until(released, what="no lease to be left")
    status = settled(bus_name, 60)
    assert status.ledger.balanced and status.ledger.leased == 0
    assert status.daemon is not None
    assert (status.daemon.groups_leased, status.daemon.groups_ready) == (0, 70)
    assert status.collector.stashed_groups == 70
    # A returning rank gets its own groups first; the rest goes to any asker.
    with Consumer(bus_name, rank=0, world_size=2) as zero:
        assert [group.instance_id for group in zero.take_shard(groups=3, timeout=10)] == left
    with Consumer(bus_name) as plain:
        assert len({group.instance_id for group in take_groups(plain, 70)}) == 70
