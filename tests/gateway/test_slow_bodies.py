"""A client stopped in its body keeps room from its peers for seconds, not for a minute."""

from pathlib import Path

import pytest
from conftest import wait_until
from gateways import serving
from http_answers import read_answer
from http_requests import request_bytes, scored

#: Run in the gateway: seconds are long for a test.
SOON = "from shmbus.http import bodies; bodies.LOOK_S = 0.3"
#: MiB of every body together, and of a single body.
MEMORY = 4
GROUP = scored(list(range(100_000, 130_000)))

#: Heads of bodies that take nearly the whole room.
HEADS = {
    "a length": {"Content_Length": str((MEMORY << 20) - 1000)},
    "chunks": {"Content_Length": "", "Transfer_Encoding": "chunked"},
}


@pytest.mark.parametrize("head", HEADS)
def test_a_body_that_stops_gives_its_room_to_who_waits(tmp_path: Path, head: str) -> None:
    options = ("--create", "16MiB", "--memory", MEMORY, "--body-limit", 4)
    stopped = request_bytes("POST", "/scored_data", b"", **HEADS[head])
    with (
        serving(tmp_path, "slow", *options, fault=SOON) as gateway,
        gateway.connect() as connection,
    ):
        connection.sendall(stopped)
        wait_until(lambda: gateway.metric("body_bytes") > 3 << 20, what="the body to have its room")
        assert gateway.post("/scored_data", GROUP).status == 200
        answer = read_answer(connection)
        assert (answer.status, "wait for room" in answer.detail) == (408, True)
        wait_until(lambda: gateway.metric("body_bytes") == 0, what="all room to be free")
