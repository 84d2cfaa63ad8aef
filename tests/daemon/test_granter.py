"""What C grants while the daemon's loop sleeps: the reply that Python would send, or nothing."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import Daemon, Spawner, wait_until
from daemon.waiting_client import take_beside

from shmbus import Bus, Consumer, Producer
from shmbus.control import messages
from shmbus.stash.collector import Collector
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core

# Longer than anything here takes on a loaded machine.
DEADLINE_S = 30.0
#: A daemon that breaks ends within this; one that did not grant in C goes on, and is tried again.
ENDS_S = 10.0
TRIES = 5
SEED = 20261122
ID = 7


class Service:
    """A collector, its granter, and the socket of a client that waits."""

    def __init__(self, name: str, portion: int, records: int) -> None:
        self.collector = Collector(name, StashPolicy())
        self.lock = _core.RecursiveLock()
        self.granter = _core.Granter(
            self.collector.reader,
            self.collector.stash.table,
            self.lock,
            portion=portion,
            records=records,
        )
        self.ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)

    def arm(self, *, groups: int = 64, number: int = 1, head: bytes = b"") -> None:
        """Let the client wait for so many groups."""
        self.granter.arm(self.ours.fileno(), ID, _core.SPLIT_TRAIN, groups, number, head)

    def received(self) -> bytes:
        """Return what the client was sent."""
        try:
            return self.theirs.recv(1 << 20)
        except BlockingIOError:
            return b""

    def is_free(self) -> bool:
        """Whether another thread could enter the service now."""
        found: list[bool] = []

        def attempt() -> None:
            with self.lock.attempt() as mine:
                found.append(mine)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(DEADLINE_S)
        return found == [True]


@contextlib.contextmanager
def serving(name: str, portion: int = 1024, records: int = 1024) -> Iterator[Service]:
    with Bus.create(name, "4MiB"):
        service = Service(name, portion, records)
        try:
            yield service
        finally:
            service.collector.close()
            service.ours.close()
            service.theirs.close()


def put(name: str, groups: int = 1, size: int = 1, first: int = 0) -> None:
    """Put g0, g1 and so on, or from another number on."""
    tokens = np.arange(4, dtype=np.int32)
    with Producer(name) as producer:
        for number in range(first, first + groups):
            for index in range(size):
                producer.put(f"g{number}", group_size=size, index=index, tokens=tokens)


def reply_to(entries: list[_core.GroupEntry[_core.Trajectory]], number: int) -> bytes:
    """Return the reply that Python makes of these."""
    granted = [
        messages.Granted(number=number + i, size=entry.size, places=_core.places(entry.samples))
        for i, entry in enumerate(entries)
    ]
    return messages.frame(messages.Leases(id=ID, groups=granted))


@pytest.mark.parametrize(
    ("groups", "size", "number"),
    [(1, 1, 1), (3, 2, 127), (15, 1, 255), (16, 1, 300), (1, 11, 70_000), (40, 3, 2**33)],
)
def test_it_sends_what_python_would_send(
    bus_name: str, groups: int, size: int, number: int
) -> None:
    head = messages.frame(messages.Ended(numbers=[5, 6]))
    with serving(bus_name) as service:
        put(bus_name, groups, size)
        service.arm(number=number, head=head)
        found = service.granter.wait()
        assert found is not None
        left, entries, rest = found
        assert (left, rest, len(entries)) == ([], b"", groups)
        assert [entry.key for entry in entries] == [f"g{i}" for i in range(groups)]
        assert service.received() == head + reply_to(entries, number)
        assert service.collector.stash.leased_groups == groups
        service.lock.__exit__(None, None, None)


def test_it_grants_as_many_as_were_asked_for_oldest_first(bus_name: str) -> None:
    with serving(bus_name) as service:
        put(bus_name, 5)
        service.arm(groups=2)
        found = service.granter.wait()
        assert found is not None and [entry.key for entry in found[1]] == ["g0", "g1"]
        assert service.collector.stash.ready_groups == 3
        service.lock.__exit__(None, None, None)


def test_it_reads_nothing_while_it_is_not_armed_or_others_are_in_the_service(
    bus_name: str,
) -> None:
    with serving(bus_name) as service:
        put(bus_name)
        assert service.granter.wait() is None
        service.arm()
        inside, leave = threading.Event(), threading.Event()

        def enter() -> None:
            with service.lock:
                inside.set()
                leave.wait(DEADLINE_S)

        other = threading.Thread(target=enter)
        other.start()
        assert inside.wait(DEADLINE_S)
        assert service.granter.wait() is None
        leave.set()
        other.join(DEADLINE_S)
        service.granter.disarm()
        assert service.granter.wait() is None
        assert service.received() == b""
        assert len(service.collector.reader.poll(10)) == 1


def test_nobody_enters_the_service_before_the_grant_is_noted(bus_name: str) -> None:
    with serving(bus_name) as service:
        put(bus_name)
        service.arm()
        assert service.is_free()
        assert service.granter.wait() is not None
        assert not service.is_free()
        assert not service.granter.armed
        service.lock.__exit__(None, None, None)
        assert service.is_free()


def test_what_is_for_a_policy_is_left_to_it_and_nothing_is_granted(bus_name: str) -> None:
    with serving(bus_name) as service:
        with Producer(bus_name) as producer:
            for index in (0, 0, 1):
                producer.put("g", group_size=2, index=index, tokens=np.arange(4))
        service.arm()
        found = service.granter.wait()
        assert found is not None
        ((why, sample),), entries, rest = found
        assert (why, sample.index, entries, rest) == (_core.REFUSED_DUPLICATE, 0, [], b"")
        assert service.received() == b"" and service.collector.stash.ready_groups == 1
        service.lock.__exit__(None, None, None)


@pytest.mark.parametrize(("portion", "records"), [(2, 1024), (1024, 1)])
def test_what_is_too_much_for_one_look_or_one_reply_is_left_to_python(
    bus_name: str, portion: int, records: int
) -> None:
    with serving(bus_name, portion, records) as service:
        put(bus_name, 2)
        service.arm()
        assert service.granter.wait() == ([], [], b"")
        assert service.received() == b"" and service.collector.stash.ready_groups == 2
        service.lock.__exit__(None, None, None)


def test_what_a_full_socket_does_not_take_is_returned(bus_name: str) -> None:
    print("seed", SEED)
    filler = random.Random(SEED).randbytes(1 << 20)
    with serving(bus_name) as service:
        service.ours.setblocking(False)
        service.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        filled = 0
        try:
            while True:
                filled += service.ours.send(filler)
        except BlockingIOError:
            pass
        put(bus_name, 1, 11)
        service.arm()
        found = service.granter.wait()
        assert found is not None
        _, entries, rest = found
        received = b""
        while more := service.received():
            received += more
        assert received[filled:] + rest == reply_to(entries, 1)
        assert rest
        service.lock.__exit__(None, None, None)


def test_a_client_that_has_gone_is_nobodys_error(bus_name: str) -> None:
    with serving(bus_name) as service:
        service.theirs.close()
        put(bus_name)
        service.arm()
        found = service.granter.wait()
        assert found is not None and (len(found[1]), found[2]) == (1, b"")
        service.lock.__exit__(None, None, None)


# A grant that was written is not noted.
BROKEN = """
import sys
from shmbus.cli import main
from shmbus.daemon.service import Service
def fail(self, *granted):
    raise RuntimeError("broken by a test")
Service.note_granted = fail
sys.exit(main())
"""


def test_a_daemon_that_ends_behind_a_grant_loses_nothing_and_doubles_nothing(
    spawn: Spawner, bus_name: str
) -> None:
    with Bus.create(bus_name, "1MiB"):
        broken = spawn.script(BROKEN, "serve", bus_name)
        wait_until(lambda: " serving " in broken.output(), what="the daemon to serve")
        with Consumer(bus_name) as consumer:
            number, ended = -1, False
            # Python grants where its thread has the lock: that group is acknowledged like any.
            while not ended and number < TRIES:
                number += 1
                taker, groups = take_beside(consumer, DEADLINE_S)
                put(bus_name, first=number)
                with contextlib.suppress(TimeoutError):
                    ended = broken.wait(ENDS_S) == 1
                if not ended:
                    taker.join(DEADLINE_S)
                    consumer.ack(groups)
            assert "broken by a test" in broken.output()
            served = Daemon(spawn, bus_name, ())
            taker.join(DEADLINE_S)
            assert [group.instance_id for group in groups] == [f"g{number}"]
            consumer.ack(groups)
            acked = number + 1
            wait_until(lambda: consumer.stats().acknowledged == acked, what="acknowledgements")
            assert consumer.take(timeout=0) == []
            assert consumer.stats().balanced
        served.stop()
