"""Clients that drop their connection and return: the daemon knows their real holdings."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Daemon, client_of, wait_until

from shmbus import Consumer, Group, Producer
from shmbus.base import limits
from shmbus.client.daemon_client import DaemonClient
from shmbus.control import messages
from shmbus.control.wire import Wire

Served = Callable[..., Daemon]
DATA = np.arange(8, dtype=np.int32)
GROUPS = 40


def fill(name: str, count: int = GROUPS) -> set[str]:
    with Producer(name) as producer:
        for number in range(count):
            producer.put(f"g{number}", group_size=1, index=0, tokens=DATA)
    return {f"g{number}" for number in range(count)}


def grant_and_forget(client: DaemonClient, request: Callable[[int], messages.Request]) -> None:
    """Have groups granted, and leave before their receipt, like an interrupted take."""
    answer = client.connection.request(request, None, limits.CLIENT_WAIT_S, takes=False)
    assert answer is not None and isinstance(answer[0], messages.Leases) and answer[0].groups
    client.connection.abandon()


def test_what_a_client_holds_stays_its_own_and_what_it_never_received_is_ready_again(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    keys = fill(bus_name)
    with Consumer(bus_name) as consumer, Consumer(bus_name) as other:
        # Enough to make the daemon rest before it listens to this client again.
        held: list[Group] = []
        while len(held) < GROUPS // 2:
            held += consumer.take(1, timeout=10)
        consumer.ack(held.pop())
        keys.discard("g19")
        grant_and_forget(client_of(consumer), lambda id_: messages.Take(id=id_, max_groups=GROUPS))
        rest: list[Group] = []
        wait_until(lambda: rest.extend(other.take(GROUPS, timeout=0.1)) or len(rest) >= GROUPS // 2)
        assert {group.instance_id for group in held + rest} == keys
        consumer.ack(held)
        other.ack(rest)
        wait_until(lambda: other.stats().acknowledged == GROUPS)
        assert other.stats().balanced


def test_a_rank_that_returns_has_its_place_and_gets_the_same_shard(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    fill(bus_name, 4)
    first, second = (Consumer(bus_name, rank=rank, world_size=2) for rank in range(2))
    with first, second:
        grant_and_forget(
            client_of(first), lambda id_: messages.TakeStep(id=id_, groups=2, timeout_s=10.0)
        )
        mine = first.take_shard(groups=2, timeout=10)
        others = second.take_shard(groups=2, timeout=10)
        assert sorted(g.instance_id for g in mine + others) == ["g0", "g1", "g2", "g3"]
        first.ack(mine)
        second.ack(others)


def test_a_thread_goes_on_where_another_gives_the_connection_up(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "8MiB")
    with Consumer(bus_name) as consumer:
        found: list[Group] = []
        threads = [
            threading.Thread(target=lambda: found.extend(consumer.take(1, timeout=30)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        client = client_of(consumer)
        for _ in range(20):
            client.connection.abandon()
            assert consumer.stats().balanced
        keys = fill(bus_name, 3)
        for thread in threads:
            thread.join(30)
        assert {group.instance_id for group in found} == keys
        consumer.ack(found)
        wait_until(lambda: consumer.stats().acknowledged == 3)


def test_a_daemon_that_drains_lets_a_client_return_to_end_what_it_holds(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB", "--drain-timeout", 60)
    fill(bus_name, 1)
    with Consumer(bus_name) as consumer:
        (group,) = consumer.take(timeout=10)
        served.child.send_signal(15)
        wait_until(lambda: " draining " in served.child.output(), what="the drain")
        client_of(consumer).connection.abandon()
        wait_until(lambda: client_of(consumer).connection.wire, what="the connection")
        group.ack()
        served.child.finish()


def test_a_consumer_that_is_dropped_is_not_kept_by_its_watcher(
    daemon: Served, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Wire.end

    def end_slowly(wire: Wire) -> None:
        # The watcher woke, and dialled again if allowed, before the finalizer goes on.
        end(wire)
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.3)

    daemon("--capacity", "8MiB")
    keys = fill(bus_name, 2)
    consumer = Consumer(bus_name)
    held = consumer.take(1, timeout=10)
    monkeypatch.setattr(Wire, "end", end_slowly)
    del held, consumer
    monkeypatch.undo()
    with Consumer(bus_name) as other:
        found: list[Group] = []
        wait_until(lambda: found.extend(other.take(2, timeout=0.1)) or len(found) == 2)
        assert {group.instance_id for group in found} == keys
        other.ack(found)
