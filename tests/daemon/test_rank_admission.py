"""Allowed neighbours: ranks, consumers without a rank, and the refusals."""

import os
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Daemon, client_of, two_ranks, wait_until

from shmbus import BusBusyError, Consumer, Producer

Served = Callable[..., Daemon]


def put(name: str, count: int) -> None:
    with Producer(name) as producer:
        for group in range(count):
            producer.put(f"g{group}", group_size=1, index=0, tokens=np.zeros(3, np.int32))


def test_a_consumer_without_a_rank_is_told_which_ranks_have_the_bus(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    with Consumer(bus_name, rank=1, world_size=2, label="trainer-1"):
        with pytest.raises(BusBusyError) as refused:
            Consumer(bus_name)
        said = str(refused.value)
        assert (
            f"ranks of a world of 2 are attached (rank 1 is pid {os.getpid()} (trainer-1))" in said
        )
        assert f"`shmbus status {bus_name}`" in said and "pass rank and world_size=2" in said
    with Consumer(bus_name) as plain:
        put(bus_name, 1)
        assert len(plain.take(timeout=10)) == 1


def test_a_rank_is_told_which_consumers_would_take_its_groups(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    with Consumer(bus_name, label="notebook"):
        with pytest.raises(BusBusyError) as refused:
            Consumer(bus_name, rank=0, world_size=2)
        said = str(refused.value)
        assert f"without a rank are attached (pid {os.getpid()} (notebook))" in said
        assert "the groups of rank 0 of 2; close those first" in said
    Consumer(bus_name, rank=0, world_size=2).close()


def test_who_comes_right_after_another_has_left_is_not_refused(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    for _ in range(20):
        put(bus_name, 40)
        with Consumer(bus_name) as plain:
            plain.ack(plain.take(40, timeout=10))
        for size in (2, 3):
            with Consumer(bus_name, rank=0, world_size=size):
                pass


def test_ranks_that_return_to_a_restarted_daemon_have_the_bus_and_others_are_told(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB")
    put(bus_name, 4)
    with two_ranks(bus_name) as (zero, one):
        served.kill()
        # Neither can come back before the other consumer has been admitted.
        with client_of(zero).lock, client_of(one).lock:
            served.start()
            plain = Consumer(bus_name)
        assert len(zero.take_shard(groups=1, timeout=10)) == 1
        with pytest.raises(
            BusBusyError, match=rf"rank 0 is pid {os.getpid()} \(.*\), this process"
        ):
            wait_until(lambda: plain.take(timeout=1))
        plain.close()
        assert len(one.take_shard(groups=1, timeout=10)) == 1


def test_take_of_a_rank_is_its_shard_of_a_step_of_at_most_so_many_groups(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    put(bus_name, 7)
    with two_ranks(bus_name) as (zero, one):
        assert [len(zero.take(2, timeout=10)), len(one.take(2, timeout=10))] == [2, 2]
        # Three remain: one a rank, since a step gives every rank the same number.
        assert [len(zero.take(2, timeout=10)), len(one.take(2, timeout=10))] == [1, 1]
