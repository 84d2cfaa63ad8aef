"""The application of each HTTP server: routes, access rules, error answers, counters, log lines.

Invariants:

- Every request is answered or its connection ends: no error of a route leaves a client waiting.
- A refusal names the next step. Only a mistake of shmbus is a 500, logged with its traceback.
- HEAD is a GET without a body, for routes without effects only.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar

import msgspec
import uvloop
from aiohttp import web

from shmbus import errors
from shmbus.base.format import printable
from shmbus.http.access import Access, Refusal, Route
from shmbus.http.metrics import Metrics
from shmbus.http.server import HttpServer, connection_of, url_of

logger = logging.getLogger(__name__)

JSON: Final = {"Content-Type": "application/json"}
#: Logged characters of a path, and of a refusal.
_PATH_CHARS: Final = 200
_REFUSAL_CHARS: Final = 400

encode = msgspec.json.Encoder().encode


class Service(Protocol):
    """The subject of a server at `url`; its process ends once `gone` is set."""

    gone: asyncio.Event
    url: str

    async def start(self) -> None:
        """Begin, before the first request."""

    async def close(self) -> None:
        """End, after the last request."""


ServiceT = TypeVar("ServiceT", bound=Service)


def json_answer(content: object, status: int = HTTPStatus.OK) -> web.Response:
    """Return an answer of JSON; `content` is an object for msgspec, or bytes of JSON."""
    body = content if isinstance(content, bytes) else encode(content)
    return web.Response(body=body, status=status, headers=JSON)


class App:
    """The application of the server `name` for a bus.

    `refused` answers a refusal, with its message as clean text. Given `health` and `counts`, the
    application answers ``/healthz`` (health, content), without a token, and ``/metrics`` (gauges,
    counters). `path_of` finds the route's path; `options` are those of `HttpServer`.
    """

    def __init__(
        self,
        name: str,
        bus: str,
        access: Access,
        routes: Mapping[tuple[str, str], Route],
        refused: Callable[[Refusal, str], web.Response],
        *,
        health: Callable[[], tuple[bool, Mapping[str, Any]]] | None = None,
        counts: Callable[[], tuple[Mapping[str, float], Mapping[str, float]]] | None = None,
        open_metrics: bool = False,
        path_of: Callable[[web.BaseRequest], str] = lambda request: request.path,
        gone_status: HTTPStatus = HTTPStatus.SERVICE_UNAVAILABLE,
        **options: Any,
    ) -> None:
        self._name = name
        self._bus = bus
        self._access = access
        self._refused = refused
        self._path_of = path_of
        self._gone_status = gone_status
        self._metrics = Metrics(f"shmbus_{name}")
        self._access_log = logging.getLogger(f"shmbus.{name}.access")
        self._routes = dict(routes)
        if health is not None:
            self._health = health
            self._routes["GET", "/healthz"] = Route(self._healthz, True, True, polled=True)
        if counts is not None:
            self._counts = counts
            self._routes["GET", "/metrics"] = Route(self._expose, True, open_metrics, polled=True)
        self._routes |= {
            ("HEAD", path): route for (_, path), route in self._routes.items() if route.reads
        }
        self._methods: dict[str, list[str]] = {}
        for method, path in self._routes:
            self._methods.setdefault(path, []).append(method)

        def refuse(why: str) -> web.Response:
            return refused(Refusal(HTTPStatus.BAD_REQUEST, why, code="invalid_http"), why)

        self.http = HttpServer(self._answer, refuse=refuse, **options)

    # -- a request ------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        began_s = time.monotonic()
        path = self._path_of(request)
        route = self._routes.get((request.method, path))
        status = sent = 0
        why = ""
        try:
            try:
                response = await self._guarded(request, path, route)
            except Refusal as refusal:
                why = refusal.message.encode(errors="backslashreplace").decode()
                response = self._refused(refusal, why)
                response.headers.update(refusal.headers)
                if refusal.close:
                    response.force_close()
            except (ConnectionResetError, web.RequestPayloadError) as error:
                self._metrics.note_undelivered(self._named(path))
                connection_of(request).abort()
                raise asyncio.CancelledError(str(error)) from error
            self._access.allow_origin(request, route, response)
            status, sent = response.status, response.content_length or response.body_length
            return response
        finally:
            seconds, received = time.monotonic() - began_s, request.content.total_bytes
            self._metrics.note(self._named(path), status, seconds, received, sent)
            polled = route is not None and route.polled and status == HTTPStatus.OK
            level = logging.DEBUG if polled else logging.INFO
            if self._access_log.isEnabledFor(level):
                shown = path[:_PATH_CHARS]
                shown = shown if shown.isprintable() else ascii(shown)[1:-1]
                extra = {
                    "status": status, "ms": round(seconds * 1e3, 2), "received": received,
                    "sent": sent, "peer": request.remote, "bus": self._bus,
                }  # fmt: skip
                if why:
                    extra["refused"] = printable(why[:_REFUSAL_CHARS])
                self._access_log.log(level, "%s %s", request.method, shown, extra=extra)

    def _named(self, path: str) -> str:
        """Return a path's name in metrics: clients decide the number of other paths."""
        return path if path in self._methods else "other"

    async def _guarded(
        self, request: web.BaseRequest, path: str, route: Route | None
    ) -> web.StreamResponse:
        try:
            self._access.require(request, path, route)
            if route is not None:
                return await route.answer(request)
            return self._unrouted(request, path)
        except (errors.BusRemovedError, errors.BusClosedError) as error:
            raise Refusal(self._gone_status, str(error), code="bus_removed") from error
        except errors.VersionUnknownError as error:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="version_unknown"
            ) from error
        except (Refusal, ConnectionResetError, web.RequestPayloadError):
            raise
        except Exception as error:
            if isinstance(error, ConnectionError) and not connection_of(request).alive:
                raise ConnectionResetError("the client went while it was answered") from error
            logger.exception("%s %s failed", request.method, path[:_PATH_CHARS])
            raise Refusal(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"a mistake of the {self._name}, which its log shows; send the request again",
                code="internal",
            ) from error

    def _unrouted(self, request: web.BaseRequest, path: str) -> web.Response:
        methods = self._methods.get(path)
        if methods is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"{path[:_PATH_CHARS]}: unknown route; expected one of "
                f"{', '.join(sorted(self._methods))}",
                code="no_route",
                close=True,
            )
        allowed = {"Allow": ", ".join(methods)}
        if request.method == "OPTIONS":
            return web.Response(text="OK", headers=allowed)
        raise Refusal(
            HTTPStatus.METHOD_NOT_ALLOWED,
            f"{path}: expected {' or '.join(methods)}, got {request.method[:20]}",
            code="no_route",
            headers=allowed,
            close=True,
        )

    # -- operators ------------------------------------------------------------------------------

    async def _healthz(self, request: web.BaseRequest) -> web.Response:
        healthy, content = self._health()
        return json_answer(content, HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _expose(self, request: web.BaseRequest) -> web.Response:
        gauges, counters = self._counts()
        text = self._metrics.expose(self._bus, {**gauges, "connections": len(self.http)}, counters)
        return web.Response(
            body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4"}
        )

    # -- life -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def serving(self, service: ServiceT, host: str, port: int) -> AsyncIterator[ServiceT]:
        """Serve in the block; yield the service, begun before the first client."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(service.close)
            stack.push_async_callback(self.http.close)
            service.url = url_of(*await self.http.bind(host, port))
            await service.start()
            await self.http.start()
            yield service


def run(
    serving: Callable[[], contextlib.AbstractAsyncContextManager[Service]],
    say: Callable[[str], object],
    parent: socket.socket | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT, or the end of `parent`; return 1 if the service is gone."""

    async def serve() -> int:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if parent is not None:
            # Readable at its end: the starting process is gone.
            loop.add_reader(parent.fileno(), stop.set)
        async with serving() as service:
            # Freeze the long-lived objects: the collector need not scan them after a few requests.
            gc.collect()
            gc.freeze()
            say(service.url)
            waits = [asyncio.ensure_future(event.wait()) for event in (stop, service.gone)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            return 1 if service.gone.is_set() else 0

    loop: Any = uvloop.new_event_loop()
    try:
        status: int = loop.run_until_complete(serve())
        loop.run_until_complete(loop.shutdown_default_executor())
        return status
    finally:
        loop.close()
