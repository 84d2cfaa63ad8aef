"""Connections that come with their first request, or with less than one."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from gateways import Gateway
from http_answers import read_answer
from http_requests import request_bytes, reset, scored

from shmbus_ext import _core

FEW_DESCRIPTORS = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
"""


@pytest.fixture
def listener() -> Any:
    """A listening socket that does not wait."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.setblocking(False)
        yield found


def accept(listener: socket.socket) -> tuple[int, bytes]:
    """Accept one, as soon as it is there."""
    while (found := _core.accept_request(listener.fileno())) is None:
        time.sleep(0.001)
    return found


def test_a_connection_comes_with_what_was_sent_over_it(listener: socket.socket) -> None:
    assert _core.accept_request(listener.fileno()) is None
    with socket.create_connection(listener.getsockname(), timeout=20) as client:
        client.sendall(b"GET /")
        descriptor, first = accept(listener)
        assert (first, os.get_blocking(descriptor), os.get_inheritable(descriptor)) == (
            b"GET /", False, False
        )  # fmt: skip
        _core.answer_and_close(descriptor, b"answer")
        assert client.recv(100) == b"answer"
        assert client.recv(100) == b""
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_a_connection_over_which_nothing_was_sent_is_accepted_too(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname(), timeout=20):
        descriptor, first = accept(listener)
        assert first == b""
        os.close(descriptor)


def test_a_client_that_has_gone_is_no_error(listener: socket.socket) -> None:
    client = socket.create_connection(listener.getsockname(), timeout=20)
    client.sendall(b"GET /")
    descriptor, _ = accept(listener)
    reset(client)
    _core.answer_and_close(descriptor, b"answer")
    # One goes before it is accepted, with something sent, and one without.
    for sent in (b"gone", b""):
        client = socket.create_connection(listener.getsockname(), timeout=20)
        client.sendall(sent)
        reset(client)
    with socket.create_connection(listener.getsockname(), timeout=20) as living:
        living.sendall(b"lives")
        while (found := accept(listener))[1] != b"lives":
            _core.answer_and_close(found[0], b"answer")
        _core.answer_and_close(found[0], b"answer")
        assert living.recv(100) == b"answer"


def test_what_is_no_listener_is_an_error() -> None:
    with socket.socket() as bound, pytest.raises(OSError):
        _core.accept_request(bound.fileno())


@pytest.fixture
def gateway(spawn: Any, bus_name: str) -> Gateway:
    """One that listens on every address of a name."""
    return Gateway(spawn, bus_name, ("--create", "1MiB", "--http", "localhost:0"))


def test_every_address_is_listened_on_and_clients_that_send_late_hold_nobody_up(
    gateway: Gateway,
) -> None:
    for *_, address in socket.getaddrinfo("localhost", gateway.port, type=socket.SOCK_STREAM):
        with socket.create_connection(address[:2], timeout=20) as connection:
            connection.sendall(request_bytes("GET", "/info"))
            assert read_answer(connection).status == 200
    silent = [gateway.connect() for _ in range(50)]
    # Longer than the kernel holds them back.
    for _ in range(15):
        assert gateway.get("/info").status == 200
        time.sleep(0.1)
    for connection in silent:
        with connection:
            connection.sendall(request_bytes("GET", "/info"))
            assert read_answer(connection).status == 200


def test_without_a_free_descriptor_connections_wait(gateway_of: Any) -> None:
    gateway = gateway_of("--create", "4MiB")
    gateway.kill()
    child = gateway.start(FEW_DESCRIPTORS)
    held = [gateway.connect() for _ in range(70)]
    for connection in held:
        connection.sendall(b"GET /info HTTP/1.1\r\n")
    while "no connection is accepted for" not in child.output():
        time.sleep(0.01)
    spent = cpu_s(child.pid)
    time.sleep(0.6)
    # Neither does it try again and again meanwhile.
    assert cpu_s(child.pid) - spent < 0.5
    for connection in held:
        connection.close()
    assert gateway.post("/scored_data", scored([1], [1])).status == 200


def cpu_s(pid: int) -> float:
    """Seconds of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
