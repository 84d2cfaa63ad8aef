"""Looks through a daemon: true at once, in memory where nothing is new, and nobody else's loss."""

from __future__ import annotations

import functools
import random
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from conftest import Daemon, wait_until

from shmbus import Consumer, Group, Ledger, Producer
from shmbus.client import looks
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


def stands(consumer: Consumer) -> bool:
    """Whether a request of its stands with the daemon, after one more look in vain."""
    assert consumer.take(1, 0) == []
    return source_of(consumer).state.open_take is not None


def look_until_it_stands(consumer: Consumer) -> None:
    # Not by `wait_until`, whose pauses are those of a caller that looks seldom.
    deadline = time.monotonic() + DEADLINE_S
    while not stands(consumer):
        assert time.monotonic() < deadline, "no request stands"


def ledger_of(name: str) -> Ledger:
    reply = ask_status(name)
    assert isinstance(reply, StatusReply)
    return reply.ledger


def leased(name: str) -> int:
    return ledger_of(name).leased


def test_a_look_finds_what_was_put_before_it_however_often_it_found_nothing(
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


def test_a_look_that_a_daemon_has_not_heard_of_yet_finds_what_is_complete_there(
    daemon: Served, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "REPLY_GRACE_S", DEADLINE_S)
    served = daemon("--capacity", "1MiB")
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            # A request stands for a moment only.
            assert time.monotonic() < deadline, "no request stood when the groups came"
            look_until_it_stands(consumer)
            put(producer, "g0")
            put(producer, "g1")
            wait_until(lambda: ledger_of(bus_name).in_ring == 0, what="the ring to be read")
            if ledger_of(bus_name).groups_leased == 1:
                break
            for group in consumer.take(2, 0):
                group.ack()
        for _ in range(50):
            # It is about to sleep; if others are to see that, they see it soon.
            if source_of(consumer).segment.collector_asleep:
                break
            time.sleep(0.002)
        served.child.send_signal(signal.SIGSTOP)
        goes_on = threading.Timer(0.2, served.child.send_signal, [signal.SIGCONT])
        goes_on.start()
        found = [group.instance_id for _ in range(2) for group in consumer.take(1, 0)]
        goes_on.join(DEADLINE_S)
        assert found == ["g0", "g1"]


@pytest.mark.parametrize("groups", [1, 64, None])
def test_looks_in_vain_ask_the_daemon_seldom(
    daemon: Served, bus_name: str, groups: int | None
) -> None:
    daemon("--capacity", "1MiB")
    with Consumer(bus_name) as consumer:
        take = consumer.take if groups is None else functools.partial(consumer.take, groups)
        state = source_of(consumer).state
        deadline = time.monotonic() + DEADLINE_S
        unasked = 0
        while unasked < 20 and time.monotonic() < deadline:
            before = state.last_id
            assert take(timeout=0) == []
            unasked += state.last_id == before
        assert unasked == 20


def test_looks_for_many_find_all_that_was_put_and_each_group_once(
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


def test_what_was_asked_ahead_and_answered_long_ago_is_no_answer_to_a_look(
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


def test_who_has_looked_often_takes_nothing_from_a_client_that_comes(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "1MiB")
    with Consumer(bus_name) as first, Producer(bus_name) as producer:
        for number in range(3):
            look_until_it_stands(first)
            with Consumer(bus_name) as second:
                put(producer, f"g{number}")
                groups = second.take(1, DEADLINE_S)
                assert [group.instance_id for group in groups] == [f"g{number}"]
                second.ack(groups)
        assert first.take(1, 0) == []


def test_two_who_look_find_each_group_once(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "1MiB")
    found: list[str] = []
    over = threading.Event()

    def look() -> None:
        with Consumer(bus_name) as consumer:
            while not over.is_set():
                groups = consumer.take(1, 0)
                found.extend(group.instance_id for group in groups)
                consumer.ack(groups)

    threads = [threading.Thread(target=look) for _ in range(2)]
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


def test_what_came_to_a_request_that_stood_is_delivered_again_when_its_client_leaves(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "1MiB")
    with Producer(bus_name) as producer:
        with Consumer(bus_name) as first:
            deadline = time.monotonic() + DEADLINE_S
            number = 0
            while not leased(bus_name):
                # A request stands for a moment only.
                assert time.monotonic() < deadline, "nothing came to a request that stood"
                for group in first.take(1, 0):
                    first.ack([group])
                look_until_it_stands(first)
                put(producer, f"g{number}")
                number += 1
        with Consumer(bus_name) as second:
            groups = second.take(64, DEADLINE_S)
            assert f"g{number - 1}" in [group.instance_id for group in groups]
            second.ack(groups)
            assert second.stats().balanced


def test_a_group_that_becomes_stale_between_two_looks_is_not_delivered(
    daemon: Served, bus_name: str
) -> None:
    daemon("--capacity", "1MiB", "--max-policy-lag", 1)
    with Consumer(bus_name, max_policy_lag=1) as consumer, Producer(bus_name) as producer:
        for _ in range(50):
            assert not stands(consumer)
        put(producer, "g0", version=0)
        consumer.policy_version = 5
        assert consumer.take(1, 0) == []
        assert consumer.stats().dropped["stale"] == 1


def test_a_look_while_the_daemon_is_killed_loses_nothing_and_doubles_nothing(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "1MiB")
    found: list[Group] = []
    with Consumer(bus_name) as consumer, Producer(bus_name) as producer:
        for number in range(2):
            look_until_it_stands(consumer)
            put(producer, f"g{number}")
            served.kill()
            served.start()

            def look() -> bool:
                found.extend(consumer.take(1, 0))
                return bool(found)

            wait_until(look, what="the group")
            assert [group.instance_id for group in found] == [f"g{number}"]
            consumer.ack(found)
            found.clear()
        assert consumer.take(1, 0) == []
        assert consumer.stats().balanced
