"""Polls of /status-env, as environments throttle themselves by them ten times a second."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import wait_until
from gateways import REGISTRATION, Gateway, serving
from http_answers import Answer, read_answer
from http_requests import request_bytes, reset, scored


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all that need no options."""
    with serving(tmp_path_factory.mktemp("children"), "polls", "--create", "4MiB") as found:
        yield found


@pytest.fixture
def polled(shared: Gateway) -> Gateway:
    """It with a trainer, an environment, and a poll."""
    assert shared.get("/reset_data").status == 200
    shared.register()
    shared.register_env()
    assert poll(shared).status == 200
    return shared


def poll(gateway: Gateway, **headers: str) -> Answer:
    """Ask once, over a new connection."""
    return gateway.get("/status-env", {"env_id": 0}, **headers)


def test_polls_are_told_of_the_bus_that_the_trainer_reads_itself(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    assert gateway.post("/register", {**REGISTRATION, "reads_bus": True}).status == 200
    gateway.register_env()
    for count in range(3):
        assert poll(gateway).json()["queue_size"] == count
        assert gateway.post("/scored_data", scored([1], [1], env_id=0)).status == 200


def test_what_each_environment_is_told_follows_queue_and_shares(polled: Gateway) -> None:
    """The aggregate of all that waits is made again whenever a part of it changes."""

    def told(env: int) -> tuple[int, int, float]:
        request = {"env_id": env}
        polled.get("/status-env", request)
        found = polled.get("/status-env", request).json()
        return found["queue_size"], found["self_queue_size"], found["unallocated_fraction"]

    assert told(0) == (0, 0, 1.0)
    polled.post("/scored_data", scored([1], [1], env_id=0))
    assert told(0) == (1, 1, 1.0)
    other = polled.register_env(min_batch_allocation=0.5)
    assert (told(0), told(other)) == ((1, 1, 0.5), (1, 0, 0.5))
    for _ in range(2):
        polled.post("/scored_data", scored([1], [1], env_id=other))
    # Of the other's two groups, one is its quota of the batch of four.
    assert (told(0), told(other)) == ((2, 1, 0.5), (3, 2, 0.5))
    polled.post("/disconnect-env", {"env_id": other})
    assert told(0) == (3, 1, 1.0)
    assert len(polled.batch()) == 2
    assert told(0)[0] == 1
    assert polled.post("/register", {**REGISTRATION, "batch_size": 8}).status == 200
    assert told(0)[0] == 3


def test_polls_of_one_connection_and_then_another_request(polled: Gateway) -> None:
    request = request_bytes("GET", "/status-env", {"env_id": 0}, User_Agent="keeps")
    with polled.connect() as connection:
        for _ in range(2):
            connection.sendall(request)
            assert read_answer(connection).status == 200
    with polled.connect() as connection:
        for _ in range(20):
            connection.sendall(request)
            assert read_answer(connection).json()["queue_size"] == 0
        connection.sendall(request_bytes("POST", "/scored_data", scored([1], [1])))
        assert read_answer(connection).json() == {"status": "received"}
        connection.sendall(request)
        assert read_answer(connection).json()["queue_size"] == 1


def test_a_poll_in_two_pieces_or_two_in_one_are_answered(polled: Gateway) -> None:
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
    for count in range(1, 6):
        assert polled.post("/scored_data", scored([1], [1], env_id=0)).status == 200
        assert poll(polled).json()["queue_size"] == count


def test_a_poll_of_an_environment_that_is_gone_is_404(polled: Gateway) -> None:
    assert polled.get("/reset_data").status == 200
    assert poll(polled).status == 404


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
