"""Messages over TCP connections of the relay's own: cut ones, strangers, and a whole relay."""

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from conftest import take_groups, wait_until
from relay.local import COORDINATOR, put_group, stats

import shmbus
from shmbus.relay.direct import BufferPool, Direct, Endpoint
from shmbus.relay.host import Host, PartyPlan
from shmbus.relay.party import Mailbox, run_party

pytest_plugins = ["relay.relay_fixtures"]

HOST = "127.0.0.1"


class Pair:
    """Two ends, arrivals at the second, and requested introductions."""

    def __init__(self) -> None:
        self.came: list[tuple[list[bytes], bytes]] = []
        self.introduced: list[str] = []
        self.left = Direct("left", HOST, self.introduced.append, lambda packed, payload: None)
        self.right = Direct("right", HOST, self.introduced.append, self._take)

    def _take(self, packed: list[bytes], payload: bytes | memoryview) -> None:
        self.came.append((packed, bytes(payload)))

    def meet(self) -> None:
        self.left.learn(self.right.endpoint)
        wait_until(lambda: self.left._links["right"]._connection is not None)


@contextmanager
def pair() -> Iterator[Pair]:
    made = Pair()
    with closing(made.left), closing(made.right):
        yield made


def block(number: int, rooms: BufferPool) -> memoryview:
    room = rooms.take(200_000 + number)
    np.frombuffer(room, np.uint8)[:] = number % 251
    return room


def test_what_no_connection_takes_is_lost_and_an_introduction_is_asked_for() -> None:
    with pair() as both:
        both.left("right", [b"one"], b"payload")
        assert both.introduced == ["right"]
        both.meet()
        both.left("right", [b"two", b"three"], b"more")
        both.left("nobody", [b"four"], b"")
        wait_until(lambda: len(both.came) == 1)
        assert both.came == [([b"two", b"three"], b"more")]
        assert both.introduced == ["right", "nobody"]
        wait_until(lambda: "left" in both.right._links)


def test_blocks_are_whole_whenever_a_connection_is_cut_and_it_is_made_again() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng, rooms, cuts = random.Random(seed), BufferPool(), 0
    with pair() as both:
        both.meet()
        for number in range(300):
            payload = block(number, rooms) if number % 3 else memoryview(b"")
            both.left("right", [str(number).encode()], payload)
            if rng.random() < 0.05:
                rng.choice([both.left, both.right]).cut()
                cuts += 1
                time.sleep(rng.choice([0.0, 0.3]))
        assert cuts

        def last_came() -> bool:
            # A message over a connection cut a moment ago is lost.
            both.left("right", [b"last"], b"")
            return any(packed == [b"last"] for packed, _ in both.came)

        wait_until(last_came)
        for (packed,), payload in both.came:
            if packed != b"last":
                number = int(packed)
                nbytes = 200_000 + number if number % 3 else 0
                assert payload == bytes([number % 251]) * nbytes, "torn"
        print(f"{cuts} cuts, {len(both.came)} of 300 came")


def test_messages_that_the_socket_takes_in_part_are_whole_and_in_their_order() -> None:
    with pair() as both:
        reads = threading.Event()
        take = both._take

        def take_later(packed: list[bytes], payload: bytes | memoryview) -> None:
            assert reads.wait(60.0)
            take(packed, payload)

        both.right._deliver = take_later
        both.meet()
        link = both.left._links["right"]
        sent = 0
        # This thread's own sends, then the rest beyond the socket's room.
        while not link._count:
            both.left("right", [bytes([sent % 251]) * (1 << 20)], b"")
            sent += 1
            assert sent < 1000, "the socket takes everything"
        assert sent > 1
        for payload in (b"", b"block", b""):
            both.left("right", [bytes([sent % 251]) * 1000], payload)
            sent += 1
        reads.set()
        wait_until(lambda: len(both.came) == sent)
        for number, ((packed,), _) in enumerate(both.came):
            assert packed == bytes([number % 251]) * len(packed)
        assert [payload for _, payload in both.came[-3:]] == [b"", b"block", b""]
        wait_until(lambda: link._count == 0 and link._nbytes == 0)
        assert not both.introduced


def test_whoever_does_not_know_the_key_is_refused_and_told_nothing() -> None:
    with pair() as both:
        endpoint = both.right.endpoint
        with socket.create_connection((endpoint.host, endpoint.port)) as stranger:
            stranger.settimeout(10.0)
            nonce = stranger.recv(16)
            stranger.sendall(bytes(16) + bytes(32))
            assert len(nonce) == 16 and stranger.recv(1) == b""
        assert both.right.refused == 1 and not both.came
        wrong = endpoint._replace(key=bytes(32))
        both.left.learn(wrong)
        wait_until(lambda: both.right.refused >= 2)
        both.left("right", [b"one"], b"")
        assert not both.came and both.introduced == ["right"]
        both.meet()


def test_who_listens_without_the_key_gets_nothing() -> None:
    with socket.create_server((HOST, 0)) as listener, pair() as both:
        both.left.learn(Endpoint("right", HOST, listener.getsockname()[1], b"k" * 32))
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(16))
            connection.settimeout(10.0)
            while len(connection.recv(4096)) < 16:
                pass
            connection.sendall(bytes(32))
            both.left("right", [b"secret"], b"records")
            assert connection.recv(4096) == b""
        assert both.introduced == ["right"]


def test_lengths_that_no_block_has_end_the_connection_before_anything_is_allocated() -> None:
    with pair() as both:
        both.meet()
        connection = both.left._links["right"]._connection
        assert connection is not None
        connection.sendall((1 << 62).to_bytes(8, "little") * 2)
        wait_until(lambda: not both.right._connections)
        both.left("right", [b"one"], b"")
        both.meet()
        assert not both.came


def test_a_room_that_is_read_is_not_given_out_again_and_a_free_one_is() -> None:
    rooms = BufferPool()
    first = rooms.take(1000)
    first[:] = bytes([7]) * 1000
    part = first[10:20]
    del first
    for _ in range(5):
        rooms.take(900)[:] = bytes([8]) * 900
    assert part == bytes([7]) * 10 and len(rooms._kept) == 2
    del part
    views = [rooms.take(1000) for _ in range(2)]
    assert len(rooms._kept) == 2
    for i, view in enumerate(views):
        view[:] = bytes([i]) * 1000
    assert views[0][0] == 0


class DirectRelay:
    def __init__(self, sources: list[str], sinks: list[str]) -> None:
        self.hosts: dict[str, Host] = {}
        self.directs: dict[str, Direct] = {}
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        plans = [PartyPlan("source", name, COORDINATOR, name) for name in sources]
        plans += [PartyPlan("sink", name, COORDINATOR, name) for name in sinks]
        plans += [PartyPlan("coordinator", COORDINATOR, COORDINATOR, "", "", sources, sinks)]
        for plan in plans:
            self._start(plan)

    def _start(self, plan: PartyPlan) -> None:
        def introduce(to: str) -> None:
            if to in self.directs:
                self.directs[to].learn(self.directs[plan.address].endpoint)

        def deliver(packed: list[bytes], payload: bytes | memoryview) -> None:
            self.hosts[plan.address].deliver(packed, payload)

        self.directs[plan.address] = Direct(plan.address, HOST, introduce, deliver)
        host = self.hosts[plan.address] = Host(plan, self.directs[plan.address])
        mailbox: Mailbox = host._mailbox
        # Host.start would run for the life of the process.
        thread = threading.Thread(
            target=run_party, args=(host._make, mailbox, lambda: not self._over.is_set())
        )
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for direct in self.directs.values():
            direct.close()


def test_cut_connections_lose_double_and_tear_nothing(buses: dict[str, str]) -> None:
    a, b, t = buses.values()
    with (
        closing(DirectRelay([a, b], [t])) as made,
        shmbus.Consumer(t) as consumer,
    ):
        put_group([a, b], 0)
        take_groups(consumer, 1)[0].ack()
        for round_ in range(3):
            for group in range(1, 21):
                put_group([a, b], 100 * round_ + group, values=5000)
            for direct in made.directs.values():
                direct.cut()
            for group in take_groups(consumer, 20):
                for sample in group:
                    number = int(group.instance_id[1:])
                    assert (sample["tokens"] == np.full(5000, number, np.int32)).all(), "torn"
                group.ack()
        wait_until(lambda: all(stats(bus).undelivered == 0 for bus in buses.values()))
        assert stats(t).committed == 61 * 4


def test_whoever_connects_and_says_nothing_keeps_nobody_else_out() -> None:
    with pair() as both:
        host, port = both.right.endpoint.host, both.right.endpoint.port
        silent = [socket.create_connection((host, port), 5.0) for _ in range(40)]
        wait_until(lambda: len(both.right._connections) >= 32)
        assert len(both.right._connections) == 32
        for each in silent:
            each.close()
        both.meet()
        both.left("right", [b"one"], b"payload")
        wait_until(lambda: both.came)


def test_a_slow_greeting_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmbus.relay.direct._MEET_S", 0.3)
    with pair() as both:
        slow = socket.create_connection((both.right.endpoint.host, both.right.endpoint.port), 5.0)
        slow.settimeout(30.0)
        assert len(slow.recv(16, socket.MSG_WAITALL)) == 16
        sent = 0
        with pytest.raises(OSError):
            while True:
                slow.send(b"x")
                sent += 1
                time.sleep(0.02)
        assert sent < 16 + 32
        slow.close()


SHORT = """
import logging, os, resource, sys, threading
from shmbus.relay.direct import Direct
logging.basicConfig(stream=sys.stdout, format="%(message)s")
came = threading.Event()
end = Direct("right", "127.0.0.1", lambda *said: None, lambda *said: came.set())
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, hard))
print(end.endpoint.port, end.endpoint.key.hex(), flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print("came" if came.wait(60.0) else "nothing came", flush=True)
"""


def test_a_process_that_had_no_descriptor_left_takes_connections_again() -> None:
    with pair() as both, subprocess.Popen(
        [sys.executable, "-c", SHORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        port, key = child.stdout.readline().split()
        many = [socket.create_connection((HOST, int(port)), 30.0) for _ in range(8)]
        assert "takes no connection: [Errno 24]" in child.stdout.readline()
        for each in many:
            each.close()
        child.stdin.write("\n")
        child.stdin.flush()
        both.left.learn(Endpoint("right", HOST, int(port), bytes.fromhex(key)))
        wait_until(lambda: both.left._links["right"]._connection is not None)
        both.left("right", [b"one"], b"")
        wait_until(lambda: "came" in child.stdout.readline())  # type: ignore[union-attr]
