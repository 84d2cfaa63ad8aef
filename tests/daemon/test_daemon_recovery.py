"""Leases of a stopped trainer over a restart of the daemon: no other client gets its groups."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Child, Daemon, Spawner, beside, client_of, wait_until

from shmbus import Consumer, Group, Producer
from shmbus.base import limits
from shmbus.control import messages

Served = Callable[..., Daemon]

#: Seconds before a group is delivered as is; far below a new daemon's wait for clients.
GROUP_TIMEOUT_S = 0.3
#: Seconds for a new daemon to end its wait for clients, and for groups to time out.
ADOPTED_S = limits.RECLAIM_WAIT_S + 3 * GROUP_TIMEOUT_S

# Holds a group until told to acknowledge.
HOLD = """
import os, sys, time
from shmbus import Consumer
name, go = sys.argv[1:]
consumer = Consumer(name)
groups = consumer.take(1, timeout=20)
print("holding", len(groups[0]))
while not os.path.exists(go):
    time.sleep(0.01)
consumer.ack(groups)
print("acknowledged")
time.sleep(600)
"""


def put(producer: Producer, key: str, indices: Sequence[int], score: float = 0.0) -> None:
    for index in indices:
        producer.put(
            key, group_size=4, index=index, score=score, tokens=np.arange(8, dtype=np.int32)
        )


def take_one(consumer: Consumer) -> Group:
    (group,) = consumer.take(1, timeout=10)
    return group


class Held:
    """A partial group in the hands of a trainer."""

    def __init__(self, daemon: Served, name: str, spawn: Spawner, go: Path) -> None:
        self.go = go
        self.daemon = daemon(
            "--capacity", "8MiB", "--group-timeout", GROUP_TIMEOUT_S, "--on-timeout", "partial"
        )
        self.producer = Producer(name)
        put(self.producer, "held", range(3))
        self.trainer: Child = spawn.script(HOLD, name, go)
        self.trainer.expect("holding 3")

    def stop_trainer(self) -> None:
        self.trainer.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.trainer.send_signal(signal.SIGCONT)
        self.go.touch()
        self.trainer.expect("acknowledged")


@pytest.fixture
def held(daemon: Served, bus_name: str, spawn: Spawner, tmp_path: Path) -> Held:
    return Held(daemon, bus_name, spawn, tmp_path / "go")


def test_a_partial_group_of_a_stopped_trainer_is_nobody_elses_after_a_restart(
    held: Held, bus_name: str
) -> None:
    held.stop_trainer()
    # In the run of the held group, and in a second run: a single group, never in two parts.
    with Producer(bus_name) as second, held.producer as first:
        put(first, "beside", [0, 1])
        put(second, "beside", [2, 3])
        held.daemon.restart()
        with Consumer(bus_name) as other:
            assert other.take(timeout=ADOPTED_S) == []
            # The same prompt sampled again is a new group, and not the rest of this group.
            put(second, "held", range(4), score=1.0)
            assert other.take(timeout=3 * GROUP_TIMEOUT_S) == []
            ledger = other.stats()
            assert ledger.balanced and ledger.leased + ledger.stashed == 11
            held.go_on()
            came = {group.instance_id: group for group in (take_one(other), take_one(other))}
            assert came.keys() == {"beside", "held"}
            assert all(group.complete for group in came.values())
            assert [t.score for t in came["held"]] == [1.0] * 4
            other.ack(came.values())
            wait_until(lambda: other.stats().acknowledged == 11)
            assert other.stats().balanced and not other.stats().dropped


def test_what_a_stopped_trainer_acknowledged_without_a_daemon_is_nobody_elses(
    held: Held, bus_name: str
) -> None:
    held.daemon.kill()
    held.go.touch()
    held.trainer.expect("acknowledged")
    held.stop_trainer()
    held.daemon.start()
    with Consumer(bus_name) as other:
        assert other.take(timeout=ADOPTED_S) == []
        held.go_on()
        wait_until(lambda: other.stats().acknowledged == 3)
        assert other.take(timeout=3 * GROUP_TIMEOUT_S) == []
        assert other.stats().balanced


def test_a_partial_group_of_a_trainer_that_died_stopped_is_delivered_again(
    held: Held, bus_name: str
) -> None:
    held.stop_trainer()
    held.daemon.restart()
    with Consumer(bus_name) as other:
        assert other.take(timeout=ADOPTED_S) == []
        held.trainer.kill()
        group = take_one(other)
        assert (group.instance_id, len(group)) == ("held", 3)
        group.ack()
        wait_until(lambda: other.stats().acknowledged == 3)


def test_a_claim_whose_connection_broke_while_the_daemon_waited_for_others_is_heard_again(
    held: Held, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Consumer(bus_name) as mine, Consumer(bus_name) as other:
        put(held.producer, "mine", range(4))
        group = take_one(mine)
        held.stop_trainer()
        held.daemon.kill()
        # Far less patience than the daemon needs for an answer.
        monkeypatch.setattr(limits, "RECLAIM_WAIT_S", 0.1)
        monkeypatch.setattr(limits, "HELLO_WAIT_S", 0.2)
        held.daemon.start()
        assert other.take(timeout=ADOPTED_S) == []
        group.ack()
        wait_until(lambda: other.stats().acknowledged == 4)


def test_what_a_daemon_granted_that_died_before_its_locks_were_there_is_the_next_ones(
    daemon: Served, bus_name: str
) -> None:
    served = daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        put(producer, "a", range(4))
        client = client_of(consumer)
        # Unlike a take, whose groups are locked at its return.
        answer = client.connection.request(
            lambda id_: messages.Take(id=id_, max_groups=1), None, limits.CLIENT_WAIT_S, takes=False
        )
        assert answer is not None and isinstance(answer[0], messages.Leases)
        with client.lock:
            served.kill()
            assert client.borrow(*answer) == []
            assert producer._segment.locks_held(1 + client.leases.borrower.client) == []
        served.start()
        take_one(consumer).ack()
        wait_until(lambda: consumer.stats().acknowledged == 4)


def test_what_a_dead_daemon_had_granted_last_is_not_taken_for_the_next_ones(
    daemon: Served, bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        for key in ("a", "b", "c"):
            put(producer, key, range(4))
        client = client_of(consumer)
        borrow, wires = client.borrow, [client.connection.wire]

        def late(*arguments: Any) -> Any:
            # The watcher reaches the next daemon before the thread with the reply goes on.
            if len(wires) == 1:
                served.restart()
                wires.append(wait_until(lambda: client.connection.wire not in (None, wires[0])))
            return borrow(*arguments)

        monkeypatch.setattr(client, "borrow", late)
        taken = [take_one(consumer) for _ in range(3)]
        assert [group.instance_id for group in taken] == ["a", "b", "c"]
        consumer.ack(taken)
        assert wait_until(lambda: consumer.stats().acknowledged == 12)


def test_what_is_acknowledged_while_no_daemon_is_there_is_told_by_close(
    daemon: Served, bus_name: str, spawn: Spawner
) -> None:
    served = daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer:
        put(producer, "once", range(4))
    consumer = Consumer(bus_name)
    group = take_one(consumer)
    served.kill()
    group.ack()
    with beside(consumer.close):
        served.start()
    with Consumer(bus_name) as successor:
        wait_until(lambda: successor.stats().acknowledged + successor.stats().groups_ready)
        assert successor.take(timeout=0) == [] and successor.stats().acknowledged == 4
