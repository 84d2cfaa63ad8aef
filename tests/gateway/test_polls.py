"""Polls of /status-env that are answered by their bytes: the same answers, in fewer steps."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from gateways import ENVIRONMENT, REGISTRATION, Gateway, request_bytes, reset, scored
from http_answers import Answer, read_answer


@pytest.fixture
def polled(gateway: Gateway) -> Gateway:
    """A gateway with a trainer, an environment, and a poll of it that is known."""
    gateway.register()
    gateway.register_env()
    assert poll(gateway).status == 200
    return gateway


def poll(gateway: Gateway, **headers: str) -> Answer:
    """Ask once, over a new connection."""
    return gateway.get("/status-env", {"env_id": 0}, **headers)


def short_polls(gateway: Gateway) -> int:
    """How many were answered by their bytes."""
    found = re.search(r"short_polls\{.*\} (\d+)", gateway.get("/metrics").body.decode())
    assert found is not None
    return int(found[1])


def until_short(gateway: Gateway, **headers: str) -> Answer:
    """Poll until one is answered by its bytes: after each look at the bus one goes the long way."""
    while True:
        before = short_polls(gateway)
        answer = poll(gateway, **headers)
        if short_polls(gateway) > before:
            return answer


def of_its_second(answer: Answer) -> Answer:
    """Without what changes each second."""
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", answer.headers.pop("date"))
    return answer


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}, {"User_Agent": "x" * 200}])
def test_both_ways_answer_the_same(polled: Gateway, headers: dict[str, str]) -> None:
    # Too long to be remembered: always the long way.
    long_way = of_its_second(poll(polled, X_Padding="x" * 2000, **headers))
    assert of_its_second(until_short(polled, **headers)) == long_way


def test_polls_of_one_connection_and_then_another_request(polled: Gateway) -> None:
    with polled.connect() as connection:
        for _ in range(20):
            connection.sendall(request_bytes("GET", "/status-env", {"env_id": 0}))
            assert read_answer(connection).json()["queue_size"] == 0
        connection.sendall(request_bytes("POST", "/scored_data", scored([1], [1])))
        assert read_answer(connection).json() == {"status": "received"}
        connection.sendall(request_bytes("GET", "/status-env", {"env_id": 0}))
        assert read_answer(connection).json()["queue_size"] == 1
    assert short_polls(polled) > 0


def test_a_poll_in_two_pieces_or_two_in_one_are_answered(polled: Gateway) -> None:
    until_short(polled)
    request = request_bytes("GET", "/status-env", {"env_id": 0})
    for at in (1, 20, len(request) - 1):
        with polled.connect() as connection:
            connection.sendall(request[:at])
            time.sleep(0.02)
            connection.sendall(request[at:])
            assert read_answer(connection).status == 200
    with polled.connect() as connection:
        connection.sendall(request * 3)
        data = b""
        while data.count(b"HTTP/1.1 200 OK") < 3 or not data.endswith(b"}"):
            data += connection.recv(4096)


def test_a_poll_sees_what_was_posted_before_it(polled: Gateway) -> None:
    until_short(polled)
    for count in range(1, 6):
        assert polled.post("/scored_data", scored([1], [1], env_id=0)).status == 200
        assert poll(polled).json()["queue_size"] == count
    assert until_short(polled).json()["queue_size"] == 5


def test_a_known_poll_of_an_environment_that_is_gone_is_404(polled: Gateway) -> None:
    until_short(polled)
    assert polled.get("/reset_data").status == 200
    assert poll(polled).status == 404


def test_a_poll_with_another_token_is_not_the_same(
    bus_name: str, gateway_of: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("right")
    gateway = gateway_of("--create", "1MiB", "--token-file", tmp_path / "token")
    bearer = {"Authorization": "Bearer right"}
    gateway.post("/register", {**REGISTRATION, "batch_size": 2}, **bearer)
    gateway.get("/batch", **bearer)
    assert gateway.post("/register-env", ENVIRONMENT, **bearer).json()["status"] == "success"
    for _ in range(20):
        assert poll(gateway, **bearer).status == 200
        assert poll(gateway).status == 401
        assert poll(gateway, Authorization="Bearer wrong").status == 401
    metrics = gateway.get("/metrics", **bearer).body.decode()
    assert re.search(r"short_polls\{.*\} [1-9]", metrics)


def test_clients_that_poll_and_hang_up_leave_no_connection(polled: Gateway) -> None:
    request = request_bytes("GET", "/status-env", {"env_id": 0})

    def hang_up(times: int) -> None:
        for number in range(times):
            connection = polled.connect()
            connection.sendall(request)
            if number % 2:
                connection.recv(10)
            reset(connection)

    threads = [threading.Thread(target=hang_up, args=(50,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def connections() -> bool:
        text = polled.get("/metrics").body.decode()
        return bool(re.search(r"gateway_connections\{.*\} 1\n", text))

    wait_until(connections, what="the connections to be forgotten")
