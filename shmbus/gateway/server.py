"""The gateway's HTTP server: from a request to its route, its status, its line in the log.

Invariants:

- Every request is answered or its connection ends: no error of a route leaves a client waiting.
- A refusal says what to do. Only a mistake in our own code is a 500, and it is logged with its
  traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

import shmbus
from shmbus.gateway import settings as limits
from shmbus.gateway.access import Access
from shmbus.gateway.answers import SERVER, json_answer, refusal_answer, text_answer
from shmbus.gateway.atropos_routes import AtroposRoutes
from shmbus.gateway.connection import Connection, Connections, connection_of
from shmbus.gateway.gateway import Gateway
from shmbus.gateway.heads import KnownRequest, Request
from shmbus.gateway.listener import Listener
from shmbus.gateway.polls import PATH, Polls
from shmbus.gateway.request_log import RequestLog
from shmbus.gateway.settings import SMALL_PIECE_BYTES, Settings
from shmbus.gateway.slime_routes import SlimeRoutes
from shmbus.http.access import Refusal

__all__ = ["AddressError", "Server", "serve"]

logger = logging.getLogger(__name__)
#: What aiohttp says of bytes that are no HTTP.
http_logger = logging.getLogger("shmbus.gateway.http")

Route = Callable[[Any], Awaitable[web.StreamResponse]]

#: Routes that are polled many times a second: a line each only at level debug.
_POLLED: Final = frozenset({"/status-env", "/status", "/healthz", "/metrics"})
#: Seconds between two searches for idle connections.
_SWEEP_S: Final = 5.0
#: Bytes of a body that waits for its part of the budget, twice as many at the most and one piece:
#: what the budget does not show of a connection.
_READ_AHEAD: Final = SMALL_PIECE_BYTES
#: Bytes of one header and of the request line.
_HEADER_BYTES: Final = 16 << 10


def _without_traceback(record: logging.LogRecord) -> bool:
    """Keep what clients send to one line: they decide how much of it there is."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.exc_info = None
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = f"no HTTP: {str(error)[:200]!r}", ()
    return True


class AddressError(RuntimeError):
    """The address cannot be taken; nobody was served."""


class Server:
    """Answers requests for one gateway.

    Parameters
    ----------
    gateway : Gateway
        What they act on.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        http_logger.addFilter(_without_traceback)
        self._access = Access(gateway.settings)
        self._log = RequestLog(gateway.settings)
        self._inner = web.Server(
            self._answer,
            logger=http_logger,
            access_log=None,
            auto_decompress=False,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
            read_bufsize=_READ_AHEAD,
            lingering_time=0.0,
        )
        self._polls = Polls(gateway, self._log.polled)
        self.connections = Connections(self._inner, self._polls, self._begin_known)
        #: Answers to requests whose heads are known.
        self._known: set[asyncio.Task[None]] = set()
        self._short_posts = 0
        self._routes: dict[tuple[str, str], Route] = {
            **AtroposRoutes(gateway).routes,
            **SlimeRoutes(gateway).routes,
            ("GET", "/healthz"): self._healthz,
            ("GET", "/metrics"): self._metrics,
        }
        self._paths: dict[str, list[str]] = {}
        for method, path in self._routes:
            self._paths.setdefault(path, []).append(method)
        self._listener = Listener(self.connections, self._polls.answer_last)
        self._sweeping: asyncio.Task[None] | None = None

    # -- life -----------------------------------------------------------------------------------

    async def bind(self) -> tuple[str, int]:
        """Take the address, without answering anybody there yet; returns it."""
        settings = self._gateway.settings
        try:
            return await self._listener.bind(settings.host, settings.port)
        except OSError as error:
            raise AddressError(
                f"--http {settings.host}:{settings.port}: {error.strerror or error}; expected an "
                "address of this machine and a free port; choose another, or port 0 for any"
            ) from error

    async def start(self) -> None:
        """Answer, from now on."""
        self._listener.start()
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.connections.end_idle()

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        self._listener.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.connections.close()
        for task in self._known:
            task.cancel()
        await asyncio.gather(*self._known, return_exceptions=True)
        await self._inner.shutdown(timeout=1.0)

    # -- a request ------------------------------------------------------------------------------

    def _begin_known(self, connection: Connection, request: KnownRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._answer_known(connection, request))
        self._known.add(task)
        task.add_done_callback(self._known.discard)

    async def _answer_known(self, connection: Connection, request: KnownRequest) -> None:
        self._short_posts += 1
        try:
            response = await self._answer(request)
            assert isinstance(response, web.Response)
            if not request.answered:
                await connection.send(request, response)
            connection.end_known(request.head.keep_alive and response.keep_alive is not False)
        except ConnectionResetError:
            connection.abort()
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            connection.abort()

    async def _answer(self, request: Request) -> web.StreamResponse:
        began_s = time.monotonic()
        route = request.path if request.path in self._paths else "other"
        try:
            connection = connection_of(request)
        except ConnectionResetError as error:
            # It ended before its first request had its turn.
            self._gateway.metrics.note_undelivered(route)
            raise asyncio.CancelledError(str(error)) from error
        connection.busy += 1
        incoming = connection.incoming
        received = (request.content_length or 0) if incoming is None else incoming.length
        status = 0
        sent = 0
        try:
            response = await self._guarded(request, connection, route)
            status = response.status
            sent = response.content_length or 0
            polled = connection.received if route == PATH and status == HTTPStatus.OK else b""
            if not isinstance(request, KnownRequest):
                if polled and self._polls.remember(polled, request):
                    connection.note_poll(polled)
                if connection.plain_head is not None:
                    self.connections.heads.remember(connection.plain_head, request, status)
            if not connection.end_request():
                # What is left of its body would be taken for the next request.
                response.force_close()
            return response
        finally:
            connection.busy -= 1
            self.connections.touch(connection)
            self._note(request, route, status, time.monotonic() - began_s, received, sent)

    async def _guarded(
        self, request: Request, connection: Connection, route: str
    ) -> web.StreamResponse:
        """Answer, whatever happens in the route."""
        try:
            if not isinstance(request, KnownRequest):
                self._access.require(request)
            response = await self._dispatch(request)
        except Refusal as refusal:
            response = refusal_answer(refusal)
        except (ConnectionResetError, web.RequestPayloadError) as error:
            self._gateway.metrics.note_undelivered(route)
            connection.abort()
            raise asyncio.CancelledError(str(error)) from error
        except (shmbus.BusRemovedError, shmbus.BusClosedError) as error:
            response = refusal_answer(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            text = "a mistake of the gateway, which its log shows; send the request again"
            response = refusal_answer(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, text))
        if not isinstance(request, KnownRequest):
            self._access.allow_origin(request, response)
        return response

    async def _dispatch(self, request: Request) -> web.StreamResponse:
        route = self._routes.get((request.method, request.path))
        if route is not None:
            return await route(request)
        allowed = self._paths.get(request.path)
        if allowed is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"{request.path[:200]}: there is no such route; expected one of "
                f"{', '.join(sorted(self._paths))}",
                close=True,
            )
        if request.method == "OPTIONS":
            return text_answer("OK")
        answer = refusal_answer(
            Refusal(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{request.path}: expected {' or '.join(allowed)}, got {request.method}",
                close=True,
            )
        )
        answer.headers["Allow"] = ", ".join(allowed)
        return answer

    def _note(
        self,
        request: Request,
        route: str,
        status: int,
        seconds: float,
        received: int,
        sent: int,
    ) -> None:
        self._gateway.metrics.note(route, status, seconds, received, sent)
        polled = route in _POLLED and status == HTTPStatus.OK
        self._log.write(
            request.method, request.path, polled, status, seconds, received, sent, request.remote
        )

    async def _healthz(self, request: web.BaseRequest) -> web.StreamResponse:
        gateway = self._gateway
        healthy = not gateway.gone.is_set()
        answer = {
            "status": "ok" if healthy else "gone",
            "bus": gateway.bus.name,
            "collects": gateway.batch_queue.attached,
        }
        status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
        return await json_answer(request, answer, status)

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        gauges = {
            **self._gateway.gauges(),
            "connections": len(self.connections),
            "short_polls": self._polls.answered,
            "short_posts": self._short_posts,
        }
        text = self._gateway.metrics.expose(self._gateway.bus.name, gauges)
        return web.Response(
            body=text.encode(),
            headers={"Content-Type": "text/plain; version=0.0.4", "Server": SERVER},
        )


async def _run(settings: Settings, parent: socket.socket | None) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        # Readable at its end: whoever started this process has gone.
        loop.add_reader(parent.fileno(), stop.set)
    async with contextlib.AsyncExitStack() as stack:
        gateway = Gateway(settings)
        stack.push_async_callback(gateway.close)
        server = Server(gateway)
        stack.push_async_callback(server.close)
        # A port that is taken is told before anything of the bus is touched.
        host, port = await server.bind()
        # What a predecessor left is known before the first of its clients asks again.
        await gateway.start()
        await server.start()
        # What is there now stays: the collector need not look at it after each few requests.
        gc.collect()
        gc.freeze()
        shown = f"[{host}]" if ":" in host else host
        logger.info("serving", extra={"bus": settings.bus, "http": f"http://{shown}:{port}"})
        waits = [loop.create_task(event.wait()) for event in (stop, gateway.gone)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        logger.info("stopping", extra={"bus": settings.bus})
        return 1 if gateway.gone.is_set() else 0


def serve(settings: Settings, parent: socket.socket | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent or the bus has gone.

    Parameters
    ----------
    settings : Settings
        What and where.
    parent : socket, optional
        One end of a pair, of which the process that started this one holds the other.

    Returns
    -------
    int
        Exit status: 1 where the bus was removed.
    """
    loop: Any = uvloop.new_event_loop()
    try:
        found: int = loop.run_until_complete(_run(settings, parent))
        return found
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


assert limits.IDLE_S > _SWEEP_S
