"""The gateway's HTTP server: from a request to its route, its status, its log line.

Invariants:

- Every request is answered or its connection ends: no error of a route leaves a client waiting.
- A refusal names the next step. Only a bug in shmbus is a 500, logged with its traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from aiohttp import web

import shmbus
from shmbus.gateway import settings as limits
from shmbus.gateway.answers import SERVER, json_answer, refusal_answer, text_answer
from shmbus.gateway.atropos_routes import AtroposRoutes
from shmbus.gateway.gateway import Gateway
from shmbus.gateway.settings import Settings
from shmbus.http.access import (
    Refusal,
    bearer_of,
    host_of,
    is_loopback,
    require_loopback_name,
    require_program,
)
from shmbus.http.server import HttpServer, connection_of, run_server, url_of, wait_for_any

logger = logging.getLogger(__name__)
#: A line for each request.
access_logger = logging.getLogger("shmbus.gateway.access")

Route = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

#: Routes polled many times a second: logged only at level debug.
_POLLED: Final = frozenset({"/status-env", "/status", "/healthz", "/metrics"})
#: Logged characters of a path.
_PATH_CHARS: Final = 200

#: Read-only routes, polled by dashboards in a browser.
_READING: Final = frozenset({"/", "/info", "/wandb_info", "/status", "/latest_example", "/healthz"})
#: Routes that only prove a living process; a supervisor lacks the token.
_OPEN: Final = frozenset({"/healthz"})


class Access:
    """Access control: the token, the host name of the request, and pages of other sites.

    Bound to loopback, the gateway answers only loopback names: no web page reads it through a
    foreign name that resolves to 127.0.0.1.
    """

    def __init__(self, settings: Settings) -> None:
        self._token = None if settings.token is None else settings.token.encode()
        self._loopback_only = is_loopback(settings.host)

    def require(self, request: web.BaseRequest) -> None:
        """Refuse a forbidden request."""
        if self._loopback_only:
            require_loopback_name(request, "the gateway")
        if request.path not in _READING:
            require_program(request)
        if self._token is None or request.path in _OPEN:
            return
        given = request.headers.get("Authorization", "")
        token = bearer_of(given)
        if token is None or not hmac.compare_digest(token, self._token):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "Authorization: expected 'Bearer' and the token of this gateway, got "
                f"{'a different token' if given else 'none'}; send the content of --token-file",
                close=True,
            )

    def allow_origin(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Let a page of this machine read a read-only route's answer."""
        origin = request.headers.get("Origin")
        if origin is None or response.prepared:
            return
        if request.path in _READING and is_loopback(host_of(origin)):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
            if request.method == "OPTIONS":
                response.headers["Access-Control-Allow-Methods"] = "GET"
                response.headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"


class Server:
    """Answers requests for a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._access = Access(gateway.settings)
        self.http = HttpServer(
            self._answer, max_connections=limits.MAX_CONNECTIONS, idle_s=limits.IDLE_S
        )
        self._routes: dict[tuple[str, str], Route] = {
            **AtroposRoutes(gateway).routes,
            ("GET", "/healthz"): self._healthz,
            ("GET", "/metrics"): self._metrics,
        }
        self._paths: dict[str, list[str]] = {}
        for method, path in self._routes:
            self._paths.setdefault(path, []).append(method)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        began_s = time.monotonic()
        route = request.path if request.path in self._paths else "other"
        status = sent = 0
        try:
            response = await self._guarded(request, route)
            status, sent = response.status, response.content_length or 0
            return response
        finally:
            self._note(request, route, status, time.monotonic() - began_s, sent)

    async def _guarded(self, request: web.BaseRequest, route: str) -> web.StreamResponse:
        """Answer, whatever happens in the route."""
        try:
            self._access.require(request)
            response = await self._dispatch(request)
        except Refusal as refusal:
            response = refusal_answer(refusal)
        except (ConnectionResetError, web.RequestPayloadError) as error:
            self._gateway.metrics.note_undelivered(route)
            connection_of(request).abort()
            raise asyncio.CancelledError(str(error)) from error
        except (
            shmbus.BusRemovedError, shmbus.BusClosedError, shmbus.VersionUnknownError,
        ) as error:  # fmt: skip
            response = refusal_answer(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error)))
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            text = "a mistake of the gateway, which its log shows; send the request again"
            response = refusal_answer(Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, text))
        self._access.allow_origin(request, response)
        return response

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        route = self._routes.get((request.method, request.path))
        if route is not None:
            return await route(request)
        allowed = self._paths.get(request.path)
        if allowed is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"{request.path[:200]}: unknown route; expected one of "
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
        self, request: web.BaseRequest, route: str, status: int, seconds: float, sent: int
    ) -> None:
        received = request.content.total_bytes
        self._gateway.metrics.note(route, status, seconds, received, sent)
        path = request.path[:_PATH_CHARS]
        polled = route in _POLLED and status == HTTPStatus.OK
        access_logger.log(
            logging.DEBUG if polled else logging.INFO,
            "%s %s",
            request.method,
            path if path.isprintable() else ascii(path)[1:-1],
            extra={
                "status": status, "ms": round(seconds * 1e3, 2), "received": received,
                "sent": sent, "peer": request.remote, "bus": self._gateway.settings.bus,
            },
        )  # fmt: skip

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
        gauges = {**self._gateway.gauges(), "connections": len(self.http)}
        text = self._gateway.metrics.expose(self._gateway.bus.name, gauges)
        return web.Response(
            body=text.encode(),
            headers={"Content-Type": "text/plain; version=0.0.4", "Server": SERVER},
        )


def serve(settings: Settings, parent: socket.socket | None = None) -> int:
    """Serve until SIGTERM, SIGINT, or the parent's end; return 1 after the bus's removal."""

    async def answer(stop: asyncio.Event) -> int:
        async with contextlib.AsyncExitStack() as stack:
            gateway = Gateway(settings)
            stack.push_async_callback(gateway.close)
            http = Server(gateway).http
            stack.push_async_callback(http.close)
            # Report an occupied port before any change of the bus.
            address = await http.bind(settings.host, settings.port)
            # Know a predecessor's state before its first client returns.
            await gateway.start()
            await http.start()
            # Freeze the long-lived objects: the collector need not scan them after a few requests.
            gc.collect()
            gc.freeze()
            logger.info("serving", extra={"bus": settings.bus, "http": url_of(*address)})
            await wait_for_any(stop, gateway.gone)
            logger.info("stopping", extra={"bus": settings.bus})
            return 1 if gateway.gone.is_set() else 0

    return run_server(answer, parent)
