"""A client that has stopped in its body keeps others from room for seconds, not for a minute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import wait_until
from gateways import Gateway, serving
from http_answers import read_answer
from http_requests import request_bytes, scored

from shmbus.gateway import settings
from shmbus.gateway.bodies import Arrival

#: Run in the gateway: seconds are long for a test.
SOON = "from shmbus.gateway import settings; settings.STALL_S, settings.STALL_CHECK_S = 0.3, 0.1"
#: MiB of all bodies; three quarters are for plain ones, and for one of them.
MEMORY = 5
GROUP = scored(list(range(100_000, 130_000)))

#: Heads of bodies that take nearly all room.
HEADS = {
    "a length": {"Content_Length": str((MEMORY << 20) * 3 // 4 - 1000)},
    "chunks": {"Content_Length": "", "Transfer_Encoding": "chunked"},
}


def held(gateway: Gateway) -> float:
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


def body(came: list[int], now_s: float) -> Arrival:
    """One that has come so far as the list says last."""
    return Arrival(lambda: came[-1], lambda: None, now_s)


def test_each_window_counts_by_itself() -> None:
    window, least = settings.STALL_S, int(settings.STALL_S * settings.SLOWEST_BYTES_PER_S)
    came = [0]
    arrival = body(came, 0.0)
    assert not arrival.is_slow(window - 0.1)
    came.append(100 * least)
    assert not arrival.is_slow(window)
    came.append(101 * least)
    assert not arrival.is_slow(2 * window)
    came.append(102 * least - 1)
    assert arrival.is_slow(3 * window)


def test_what_nobody_watched_is_held_against_nobody() -> None:
    arrival = body([0], 0.0)
    arrival.begin_window(100.0)
    assert not arrival.is_slow(100.0 + settings.STALL_S / 2)
    assert arrival.is_slow(100.0 + settings.STALL_S)
