"""A client that leaves in the middle of an answer is no mistake of the server."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from aiohttp import web
from conftest import wait_until
from http_requests import request_bytes, reset
from threaded_server import in_thread

from shmbus.http.access import Access, Route
from shmbus.http.app import App
from shmbus.http.server import connection_of


@pytest.mark.parametrize("followed", [False, True])
def test_a_client_that_leaves_within_an_answer_is_counted_and_no_mistake(
    followed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)
    ends: list[bool] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.Response(body=bytes(64 << 20))
        connection = connection_of(request)
        if followed:
            return await connection.deliver(request, response, ends.append, 60.0)
        await response.prepare(request)
        await response.write_eof()
        return response

    @asynccontextmanager
    async def serving() -> AsyncIterator[Any]:
        app = App(
            "server", "bus", Access("server", "127.0.0.1", None),
            {("GET", "/x"): Route(answer, True)},
            lambda refusal, why: web.Response(status=refusal.status, text=why),
            max_connections=9, idle_s=60.0,
        )  # fmt: skip
        service: Any = SimpleNamespace(start=nothing, close=nothing, metrics=app._metrics)
        async with app.serving(service, "127.0.0.1", 0):
            yield service

    async def nothing() -> None:
        return None

    with caplog.at_level(logging.WARNING, "shmbus"), in_thread(serving) as service:
        port = int(service.url.rpartition(":")[2])
        for _ in range(5):
            client = socket.create_connection(("127.0.0.1", port), timeout=60)
            client.sendall(request_bytes("GET", "/x", None, Host="127.0.0.1"))
            assert client.recv(1000)
            reset(client)
        line = 'shmbus_server_undelivered_total{bus="bus",route="/x"} 5'
        wait_until(lambda: line in service.metrics.expose("bus", {}))
    assert ends == [False] * 5 * followed
    assert not caplog.records
