"""Polls through a daemon, `take(timeout=0)`: true at once, and nobody else's loss."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
from conftest import Daemon, wait_until

from shmbus import Consumer, Group, Ledger, Producer
from shmbus.client.daemon_client import DaemonClient
from shmbus.control.ask import ask_status
from shmbus.control.messages import StatusReply

Served = Callable[..., Daemon]

# Longer than anything here takes on a loaded machine.
DEADLINE_S = 30.0
SEED = 20261122
ROUNDS = 100


def put(producer: Producer, key: str, index: int = 0, size: int = 1, version: int = 0) -> None:
    tokens = np.arange(4, dtype=np.int32)
    producer.put(key, group_size=size, index=index, policy_version=version, tokens=tokens)


def source_of(consumer: Consumer) -> DaemonClient:
    source = consumer._source
    assert isinstance(source, DaemonClient)
    return source


def ledger_of(name: str) -> Ledger:
    reply = ask_status(name)
    assert isinstance(reply, StatusReply)
    return reply.ledger


def test_a_poll_finds_what_was_put_before_it_however_often_it_found_nothing(
    daemon: Served, bus_name: str
) -> None:
    print("seed", SEED)
    generator = random.Random(SEED)
    daemon("--capacity", "4MiB")
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        for number in range(ROUNDS):
            for _ in range(generator.randint(0, 30)):
                assert consumer.take(1, 0) == []
            if generator.random() < 0.2:
                time.sleep(generator.uniform(0, 0.015))
            size = generator.randint(1, 3)
            for index in range(size):
                assert consumer.take(1, 0) == []
                put(producer, f"g{number}", index, size)
            (group,) = consumer.take(1, 0)
            assert (group.instance_id, len(group)) == (f"g{number}", size)
            consumer.ack([group])
        assert consumer.take(1, 0) == []
        ledger = consumer.stats()
        assert (ledger.groups_leased, ledger.in_ring, ledger.stashed) == (0, 0, 0)
        assert ledger.balanced


def test_polls_for_many_find_all_that_was_put_and_each_group_once(
    daemon: Served, bus_name: str
) -> None:
    print("seed", SEED)
    generator = random.Random(SEED)
    daemon("--capacity", "4MiB")
    expected, found = 0, []
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        for _ in range(ROUNDS):
            # More than one reply holds, so that the next one is asked ahead.
            new = generator.choice([0, 1, 3, 40])
            for number in range(expected, expected + new):
                put(producer, f"g{number}")
            expected += new
            for _ in range(generator.randint(1, 4)):
                while groups := consumer.take(16, 0):
                    found += [group.instance_id for group in groups]
                    consumer.ack(groups)
            assert found == [f"g{number}" for number in range(expected)]
        assert consumer.stats().balanced


def test_what_was_asked_ahead_and_answered_long_ago_is_no_answer_to_a_poll(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "1MiB")
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        for number in range(16):
            put(producer, f"g{number}")
        groups = consumer.take(16, DEADLINE_S)
        while len(groups) < 16:
            groups += consumer.take(16 - len(groups), DEADLINE_S)
        consumer.ack(groups)
        for number in range(16, 32):
            put(producer, f"g{number}")
        wait_until(lambda: ledger_of(bus_name).in_ring == 0, what="the ring to be read")
        # All that was asked for, so that as many are asked ahead; the daemon has none.
        assert len(consumer.take(16, 0)) == 16
        client = source_of(consumer)
        assert client.state.open_take is not None
        wire = client.connection.wire
        assert wire is not None and wire.wait(DEADLINE_S)
        put(producer, "new")
        assert [group.instance_id for group in consumer.take(16, 0)] == ["new"]


def test_two_who_poll_find_each_group_once(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "1MiB")
    found: list[str] = []
    over = threading.Event()

    def poll() -> None:
        with Consumer(bus_name) as consumer:
            while not over.is_set():
                groups = consumer.take(1, 0)
                found.extend(group.instance_id for group in groups)
                consumer.ack(groups)

    threads = [threading.Thread(target=poll) for _ in range(2)]
    with Producer(bus_name) as producer:
        for thread in threads:
            thread.start()
        for number in range(50):
            put(producer, f"g{number}")
            time.sleep(0.001)
        wait_until(lambda: len(found) >= 50, what="all groups to be found")
    over.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(found) == sorted(f"g{number}" for number in range(50))


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
            served.kill()
            served.start()

            def poll() -> bool:
                found.extend(consumer.take(1, 0))
                return bool(found)

            wait_until(poll, what="the group")
            assert [group.instance_id for group in found] == [f"g{number}"]
            consumer.ack(found)
            found.clear()
        assert consumer.take(1, 0) == []
        assert consumer.stats().balanced
