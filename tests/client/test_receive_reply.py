"""A reply that grants groups, received in one call: taken whole, or left as it came."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import numpy as np
import pytest

from shmbus import Bus, Producer
from shmbus.control import messages
from shmbus.segment import lifecycle
from shmbus_ext import _core

ID = 300
GROUPS = 5
# Bytes of a reply above which the call leaves it: BORROWER_RECEIVED_BYTES of the core.
MOST_BYTES = 1 << 16
# Far more than a call takes that finds something.
PATIENCE_MS = 20_000


class Client:
    """A borrower, the trajectories that its daemon has read, and both ends of a connection."""

    def __init__(self, name: str) -> None:
        self.bus = Bus.create(name, "1MiB", max_producers=4)
        with Producer(name) as producer:
            for number in range(GROUPS):
                tokens = np.arange(4, dtype=np.int32)
                producer.put(f"g{number}", group_size=1, index=0, tokens=tokens)
        self.reader = _core.Reader(lifecycle.open_segment(name), "test")
        self.reader.lend()
        self.read = self.reader.poll(GROUPS)
        self.borrower = _core.Borrower(lifecycle.open_segment(name, read_only=True))
        self.known: dict[int, _core.ClientLease] = {}
        self.ours, self.theirs = socket.socketpair()

    def close(self) -> None:
        self.borrower.close()
        self.reader.close()
        self.bus.close()
        self.ours.close()
        self.theirs.close()

    def granted(self, first: int = 1, groups: int = GROUPS) -> list[messages.Granted]:
        """Return so many groups, of one sample each, by numbers from `first` on."""
        places = [_core.places([t]) for t in self.read]
        return [
            messages.Granted(number=first + i, size=1, places=places[i % GROUPS])
            for i in range(groups)
        ]

    def receive(self, timeout_ms: int = PATIENCE_MS) -> int | None:
        return self.borrower.receive_reply(self.ours.fileno(), ID, timeout_ms, self.known)

    def unread(self) -> bytes:
        """Return what is in the socket, and take it out."""
        try:
            return self.ours.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""

    def holds_nothing(self) -> bool:
        return not self.known and not self.borrower.ready and self.borrower.locks() == (0, 0)

    def end_all(self) -> None:
        """Let go of all leases."""
        self.borrower.give_back_ready(self.known)


@pytest.fixture
def client(bus_name: str) -> Iterator[Client]:
    made = Client(bus_name)
    yield made
    made.close()


def frames_of_a_reply(client: Client, first: int = 1) -> bytes:
    return messages.frame(messages.Leases(id=ID, groups=client.granted(first)))


@pytest.mark.parametrize("first", [1, 127, 200, 70_000, 2**33, 2**63 - GROUPS])
@pytest.mark.parametrize("ended", [None, 0, 3, 20, 70_000])
def test_what_it_takes_is_ready_known_and_locked_and_out_of_the_socket(
    client: Client, first: int, ended: int | None
) -> None:
    reply = frames_of_a_reply(client, first)
    if ended is not None:
        reply = messages.frame(messages.Ended(numbers=list(range(ended)))) + reply
    later = messages.frame(messages.Done(id=1))
    client.theirs.setblocking(False)
    client.theirs.sendall(reply + later)
    if len(reply) > MOST_BYTES:
        assert client.receive() is None and client.holds_nothing()
        assert client.unread() == reply + later
        return
    assert client.receive() == GROUPS
    assert client.unread() == later
    ready = list(client.borrower.ready)
    assert [lease.number for lease in ready] == list(range(first, first + GROUPS))
    assert client.known == {lease.number: lease for lease in ready}
    for number, lease in enumerate(ready):
        assert (lease.key, lease.size, lease.step) == (f"g{number}", 1, -1)
        assert lease.samples[0]["tokens"].tolist() == [0, 1, 2, 3]
    assert client.borrower.locks()[0] == 1  # all records are in one extent
    client.end_all()
    assert client.holds_nothing()


def test_what_a_reply_confirms_is_forgotten_with_its_locks(client: Client) -> None:
    client.theirs.sendall(frames_of_a_reply(client))
    assert client.receive() == GROUPS
    ended = [client.known[number] for number in (2, 4)]
    for lease in ended:
        client.borrower.ready.remove(lease)
        client.borrower.end(lease, _core.DROP_CORRUPT)
    assert client.borrower.unconfirmed == 2
    confirmation = messages.frame(messages.Ended(numbers=[2, 4, 99]))
    client.theirs.sendall(confirmation + frames_of_a_reply(client, 10))
    assert client.receive() == GROUPS
    assert client.borrower.unconfirmed == 0
    assert sorted(client.known) == [1, 3, 5, 10, 11, 12, 13, 14]


def others(client: Client) -> list[bytes]:
    """Return what is no plain reply to this request, though the last of them are no nonsense."""
    granted = client.granted()
    return [
        b"\0", b"nonsense" * 4, b"\xff" * 40, messages.frame(messages.Done(id=ID)),
        messages.frame(messages.Refused(kind="busy", message="no", id=ID)),
        messages.frame(messages.Leases(id=ID)),
        messages.frame(messages.Leases(id=ID + 1, groups=granted)),
        messages.frame(messages.Leases(id=ID, groups=granted, step=0)),
        messages.frame(messages.Ended(numbers=[1])),
        messages.frame(messages.Ended(numbers=[1], unknown=[2])) + frames_of_a_reply(client),
        messages.frame(messages.Done(id=1)) + frames_of_a_reply(client),
        messages.frame(messages.Leases(id=ID, groups=client.granted(groups=2000))),
    ]  # fmt: skip


def test_all_else_is_left_in_the_socket_and_changes_nothing(client: Client) -> None:
    for sent in others(client):
        client.theirs.sendall(sent)
        assert client.receive() is None, sent[:80]
        assert client.holds_nothing()
        assert client.unread() == sent


def test_a_reply_in_parts_is_left_until_it_is_whole(client: Client) -> None:
    confirmation = messages.frame(messages.Ended(numbers=[7]))
    reply = confirmation + frames_of_a_reply(client)
    for size in range(1, len(reply)):
        client.theirs.sendall(reply[:size])
        assert client.receive() is None
        assert client.holds_nothing()
        client.theirs.sendall(reply[size:])
        assert client.receive() == GROUPS
        client.end_all()


def test_groups_with_a_place_that_holds_nothing_are_left_all_of_them(client: Client) -> None:
    good = client.granted()
    place = good[0].places
    for wrong in (b"", bytes(7), bytes(24), b"\xff" * 24, place[:-1] + b"\1", place[1:] + place):
        groups = [*good[:2], messages.Granted(number=9, size=1, places=wrong), *good[2:]]
        sent = messages.frame(messages.Leases(id=ID, groups=groups))
        client.theirs.sendall(sent)
        assert client.receive() is None
        assert client.holds_nothing()
        assert client.unread() == sent


def test_changed_bytes_are_taken_as_the_decoder_takes_them_or_not_at_all(
    client: Client, seed: int
) -> None:
    generator = random.Random(seed)
    reply = messages.frame(messages.Ended(numbers=[1, 500])) + frames_of_a_reply(client, 200)
    taken = 0
    for _ in range(3000):
        changed = bytearray(reply)
        for _ in range(generator.choice([1, 1, 2, 8])):
            changed[generator.randrange(len(changed))] = generator.choice(
                [0, 1, 0x7F, 0x90, 0x91, 0xC4, 0xCC, 0xCD, 0xCF, 0xDC, 0xDD, 0xFF, 200]
            )
        client.theirs.sendall(changed)
        count = client.receive()
        left = client.unread()
        if count is None:
            assert client.holds_nothing() and left == changed
            continue
        taken += 1
        bodies = messages.FrameBuffer().feed(bytes(changed[: len(changed) - len(left)]))
        decoded = messages.decode_reply(bodies[-1])
        assert isinstance(decoded, messages.Leases) and decoded.id == ID
        assert [g.number for g in decoded.groups] == [x.number for x in client.borrower.ready]
        assert [g.size for g in decoded.groups] == [x.size for x in client.borrower.ready]
        client.end_all()
    print("taken", taken)
    assert taken


def test_where_the_connection_is_over_nothing_is_taken(client: Client) -> None:
    sent = frames_of_a_reply(client)
    client.theirs.sendall(sent)
    client.theirs.close()
    assert client.receive() is None
    assert client.holds_nothing()
    assert client.unread() == sent


def test_it_says_that_nothing_came(client: Client) -> None:
    assert client.receive(0) == -1
    assert client.receive(5) == -1
    assert client.holds_nothing()


class Woken(Exception):
    """What a signal's handler raises here."""


def test_a_signal_ends_the_wait_and_one_that_raises_nothing_does_not(client: Client) -> None:
    heard = 0

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard += 1
        if heard == 3:
            raise Woken

    before = signal.signal(signal.SIGALRM, hear)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with pytest.raises(Woken):
            client.receive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard == 3
    client.theirs.sendall(frames_of_a_reply(client))
    assert client.receive() == GROUPS
    client.end_all()


def test_a_borrower_that_was_closed_takes_nothing(client: Client) -> None:
    client.theirs.sendall(frames_of_a_reply(client))
    client.borrower.close()
    with pytest.raises(Exception, match="closed"):
        client.receive()
