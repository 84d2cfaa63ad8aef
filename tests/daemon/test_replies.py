"""Replies to a client: in order and whole, whoever sends them and however slowly they are read."""

import asyncio
import random
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
import uvloop

from shmbus.control import messages
from shmbus.daemon.connection import MAX_UNSENT_BYTES, Replies
from shmbus.daemon.leases import Session

DEADLINE_S = 60.0
SEED = 20261122

Work = Callable[[Replies, "Ending", socket.socket], Awaitable[None]]


class Ending(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self.too_many = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(None)

    def give_up(self) -> None:
        self.too_many += 1
        assert self.transport is not None
        self.transport.abort()


def over_a_socket(work: Work) -> None:
    """Run `work` with replies to the other end of a socket, in the daemon's kind of loop."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        transport, ending = await asyncio.get_running_loop().connect_accepted_socket(Ending, ours)
        fd = transport.get_extra_info("socket").fileno()
        replies = Replies(transport, fd, threading.RLock(), ending.give_up)
        theirs.setblocking(False)
        try:
            await asyncio.wait_for(work(replies, ending, theirs), DEADLINE_S)
        finally:
            transport.abort()
            theirs.close()

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_frames_of_two_threads_arrive_whole_and_in_order_however_slowly_they_are_read() -> None:
    print("seed", SEED)
    generator = random.Random(SEED)
    frames = [bytes([i % 251]) * generator.randint(1, 6000) for i in range(600)]
    expected = b"".join(frames)

    async def work(replies: Replies, ending: Ending, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        turns = [threading.Event() for _ in range(len(frames) + 1)]
        turns[0].set()

        def send_every_other() -> None:
            for i in range(0, len(frames), 2):
                assert turns[i].wait(DEADLINE_S)
                with replies._lock:
                    replies.send(frames[i])
                turns[i + 1].set()

        ring = threading.Thread(target=send_every_other)
        ring.start()
        received = b""
        for i in range(1, len(frames), 2):
            await loop.run_in_executor(None, turns[i].wait, DEADLINE_S)
            with replies._lock:
                replies.send(frames[i])
            turns[i + 1].set()
            if generator.random() < 0.3:
                received += await loop.sock_recv(theirs, generator.randint(1, 20_000))
        while len(received) < len(expected):
            received += await loop.sock_recv(theirs, 1 << 20)
        ring.join()
        assert received == expected
        assert not ending.too_many

    over_a_socket(work)


@pytest.mark.parametrize("burst", [False, True])
def test_a_client_that_reads_nothing_is_given_up_once_and_sent_no_more(burst: bool) -> None:
    async def work(replies: Replies, ending: Ending, theirs: socket.socket) -> None:
        frame = b"x" * (1 << 20)
        for _ in range(4 * MAX_UNSENT_BYTES // len(frame)):
            replies.send(frame)
            assert len(replies._unsent) <= MAX_UNSENT_BYTES + len(frame)
            if not burst:  # within one event of the loop
                await asyncio.sleep(0)
        await ending.lost
        replies.send(frame)
        assert ending.too_many == 1

    over_a_socket(work)


def test_a_reply_to_a_client_that_has_gone_is_nobodys_error() -> None:
    async def work(replies: Replies, ending: Ending, theirs: socket.socket) -> None:
        theirs.close()
        replies.send(b"hello")
        await ending.lost

    over_a_socket(work)


def test_confirmations_go_with_the_reply_that_follows_them() -> None:
    sent: list[tuple[messages.Reply, ...]] = []
    hello = messages.Hello(version=messages.VERSION, bus="run1")
    session = Session(0, hello, lambda *replies: sent.append(replies))
    session.note_ended([1, 2], [3])
    session.send(messages.Leases(id=7))
    session.send(messages.Leases(id=8))
    ended = messages.Ended(numbers=[1, 2], unknown=[3])
    assert sent == [(ended, messages.Leases(id=7)), (messages.Leases(id=8),)]
