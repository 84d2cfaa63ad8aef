"""A client that has stopped in its body keeps others from room for seconds, not for a minute."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest
from conftest import wait_until
from gateways import Gateway, serving
from http_answers import read_answer
from http_requests import request_bytes, scored

from shmbus.gateway import settings
from shmbus.gateway.arrivals import Arrival, Arrivals
from shmbus.gateway.incoming import Incoming

#: Run in the gateway: seconds are long for a test.
SOON = "from shmbus.gateway import settings; settings.STALL_S, settings.STALL_CHECK_S = 0.3, 0.1"
#: MiB of all bodies; three quarters are for plain ones, and for one of them.
MEMORY = 5
GROUP = scored(list(range(100_000, 130_000)))

#: Heads of bodies that take nearly all room: received by the gateway, and by the HTTP library.
HEADS = {
    "a length": {"Content_Length": str((MEMORY << 20) * 3 // 4 - 1000)},
    "chunks": {"Content_Length": "", "Transfer_Encoding": "chunked"},
}


def held(gateway: Gateway) -> float:
    """Bytes of room that are taken."""
    found = re.search(rb"\nshmbus_gateway_body_bytes\{.*\} (\S+)", gateway.get("/metrics").body)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("head", HEADS)
def test_a_body_that_stops_gives_its_room_to_who_waits(tmp_path: Path, head: str) -> None:
    options = ("--create", "16MiB", "--memory", MEMORY, "--body-limit", 4)
    stopped = request_bytes("POST", "/scored_data", b"", **HEADS[head])
    with (
        serving(tmp_path, "slow", *options, fault=SOON) as gateway,
        gateway.connect() as connection,
    ):
        connection.sendall(stopped)
        wait_until(lambda: held(gateway) > 3 << 20, what="the body to have its room")
        assert gateway.post("/scored_data", GROUP).status == 200
        answer = read_answer(connection)
        assert (answer.status, "while others wait" in answer.detail) == (408, True)
        wait_until(lambda: held(gateway) == 0, what="all room to be free")


class Body:
    """A body as one is judged."""

    def __init__(self, arrivals: Arrivals, now_s: float) -> None:
        self.came = 0
        self.ended = False
        arrivals.begin(Arrival(lambda: self.came, self.end, now_s))

    def end(self) -> None:
        self.ended = True


def test_each_window_counts_by_itself() -> None:
    arrivals = Arrivals()
    fast, slow, stops = (Body(arrivals, 0.0) for _ in range(3))
    window, least = settings.STALL_S, int(settings.STALL_S * settings.SLOWEST_BYTES_PER_S)
    arrivals.end_slow(window - 0.1)
    stops.came = 100 * least
    for turn in range(1, 4):
        fast.came += least
        slow.came += least if turn < 3 else least - 1
        arrivals.end_slow(turn * window)
        assert (fast.ended, slow.ended, stops.ended) == (False, turn == 3, turn > 1)


def test_what_nobody_watched_is_held_against_nobody() -> None:
    arrivals = Arrivals()
    body = Body(arrivals, 0.0)
    arrivals.begin_windows(100.0)
    arrivals.end_slow(100.0 + settings.STALL_S / 2)
    assert not body.ended
    arrivals.end_slow(100.0 + settings.STALL_S)
    assert body.ended


def test_what_the_kernel_still_has_of_a_body_has_come() -> None:
    async def found() -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            transport.pause_reading()
            theirs.sendall(b"x" * 1000)
            came = Incoming(transport, b"first", 5000).came()
            transport.close()
            return came

    assert asyncio.run(found()) == len(b"first") + 1000
