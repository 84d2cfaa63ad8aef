"""Polls through a daemon, `take(timeout=0)`: true at once, and nobody else's loss."""

import signal
from collections.abc import Callable

import numpy as np
from conftest import Daemon, client_of, take_groups, wait_until

from shmbus import Consumer, Group, Producer
from shmbus.inspect.status import read_status

Served = Callable[..., Daemon]

# Longer than anything here takes on a loaded machine.
DEADLINE_S = 30.0


def put(producer: Producer, key: str, index: int = 0, size: int = 1, version: int = 0) -> None:
    tokens = np.arange(4, dtype=np.int32)
    producer.put(key, group_size=size, index=index, policy_version=version, tokens=tokens)


def test_what_was_asked_ahead_and_answered_long_ago_is_no_answer_to_a_poll(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "1MiB")
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        for number in range(16):
            put(producer, f"g{number}")
        consumer.ack(take_groups(consumer, 16))
        served.child.send_signal(signal.SIGSTOP)  # then it answers with all of them at once
        for number in range(16, 32):
            put(producer, f"g{number}")
        served.child.send_signal(signal.SIGCONT)
        wait_until(lambda: read_status(bus_name).ledger.in_ring == 0, what="the ring to be read")
        # The whole request, to ask for as many ahead; the daemon is empty.
        assert len(consumer.take(16, 0)) == 16
        client = client_of(consumer)
        assert client.state.open_take is not None
        wire = client.connection.wire
        assert wire is not None and wire.wait(DEADLINE_S)
        put(producer, "new")
        assert [group.instance_id for group in consumer.take(16, 0)] == ["new"]


def test_a_group_that_becomes_stale_between_two_polls_is_not_delivered(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "1MiB", "--max-policy-lag", 1)
    with Consumer(bus_name, max_policy_lag=1) as consumer, Producer(bus_name) as producer:
        assert consumer.take(1, 0) == []
        put(producer, "g0", version=0)
        consumer.policy_version = 5
        assert consumer.take(1, 0) == []
        assert consumer.stats().dropped["stale"] == 1


def test_a_poll_while_the_daemon_is_killed_loses_nothing_and_doubles_nothing(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "1MiB")
    found: list[Group] = []
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        for number in range(2):
            assert consumer.take(1, 0) == []
            put(producer, f"g{number}")
            served.restart()

            def poll() -> bool:
                found.extend(consumer.take(1, 0))
                return bool(found)

            wait_until(poll, what="the group")
            assert [group.instance_id for group in found] == [f"g{number}"]
            consumer.ack(found)
            found.clear()
        assert consumer.take(1, 0) == []
        assert consumer.stats().balanced
