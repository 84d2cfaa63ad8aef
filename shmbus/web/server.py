"""The page's HTTP server: its files, and a stream of events for each page that watches.

Invariants:

- Read-only: nothing that a request says changes a bus.
- A connection is answered, closed when it is silent or behind, or refused when there are too many;
  what one client does costs the others nothing.
- The page loads from here alone, and its policy lets it load nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from shmbus._format import unprinted
from shmbus.http.access import Refusal
from shmbus.http.server import HttpServer
from shmbus.http.serving import run, shown_address, stop_signals
from shmbus.web import settings as limits
from shmbus.web.access import Access
from shmbus.web.history import GroupName, fits
from shmbus.web.polling import Polls
from shmbus.web.settings import Settings

__all__ = ["Server", "serve"]

logger = logging.getLogger(__name__)

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "shmbus",
}


def read_files() -> dict[str, tuple[str, str, bytes]]:
    """Read the page's files: type, tag and content by path."""
    found = {}
    for path in sorted(_STATIC.rglob("*")):
        kind = _TYPES.get(path.suffix)
        if kind is not None:
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found["/" + path.relative_to(_STATIC).as_posix()] = (kind, tag, body)
    found["/"] = found.pop("/index.html")
    return found


class Server:
    """Answers requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.polls = Polls(settings.buses)
        self._files = read_files()
        self._http = HttpServer(
            self._answer,
            max_connections=limits.MAX_CONNECTIONS,
            idle_s=limits.IDLE_S,
            header_bytes=limits.HEADER_BYTES,
        )
        self._access: Access

    async def start(self) -> tuple[str, int]:
        """Listen; returns where."""
        host, port = await self._http.bind(self._settings.host, self._settings.port)
        self._access = Access(self._settings, port)
        await self._http.start()
        return host, port

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        await self.polls.close()
        await self._http.close()

    # -- a request ------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            self._access.require(request)
            return await self._route(request)
        except Refusal as refusal:
            logger.info("%s %s: %s", request.method, request.path[:200], refusal.status)
            return self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> web.Response:
        answer = web.Response(status=refusal.status, text=f"{refusal}\n", headers=_HEADERS)
        answer.headers["Cache-Control"] = "no-store"
        if refusal.status is HTTPStatus.METHOD_NOT_ALLOWED:
            answer.headers["Allow"] = "GET, HEAD"
        answer.force_close()
        return answer

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        token = request.query.get("token")
        if path == "/" and token is not None:
            self._access.require_token(token)
            return self._let_in()
        self._access.require_cookie(request)
        if path == "/events":
            return await self._events(request)
        if path == "/group":
            return await self._group(request)
        if path not in self._files:
            raise Refusal(HTTPStatus.NOT_FOUND, f"there is no {path[:200]!r} here")
        return self._file(request, *self._files[path])

    def _let_in(self) -> web.Response:
        answer = web.Response(status=HTTPStatus.SEE_OTHER, headers={**_HEADERS, "Location": "/"})
        answer.headers["Cache-Control"] = "no-store"
        answer.set_cookie(
            self._access.cookie, self._settings.token, httponly=True, samesite="Strict", path="/"
        )
        return answer

    def _file(self, request: web.BaseRequest, kind: str, tag: str, body: bytes) -> web.Response:
        headers = {**_HEADERS, "Cache-Control": "no-cache", "ETag": tag, "Content-Type": kind}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
        return web.Response(body=body, headers=headers)

    def _bus_of(self, request: web.BaseRequest) -> str:
        """Return the bus that is asked for; "" for the overview."""
        name = request.query.get("bus", "")
        if not name and len(self._settings.buses) == 1:
            name = self._settings.buses[0]
        if name and not self.polls.may_watch(name):
            # The overview names a bus as it is shown, with escapes for what does not print.
            shown, name = name, unprinted(name)
            if not self.polls.may_watch(name) and self.polls.may_await(shown):
                return shown
        if name and not self.polls.may_watch(name):
            raise Refusal(HTTPStatus.NOT_FOUND, "This server shows no such bus.")
        return name

    async def _group(self, request: web.BaseRequest) -> web.Response:
        """Answer with the history of one group."""
        name = self._bus_of(request)
        query = request.query
        try:
            round = int(query["round"]) if "round" in query else None
        except ValueError:
            raise Refusal(HTTPStatus.BAD_REQUEST, "round: expected a number") from None
        about = GroupName(query.get("id", ""), round, query.get("split", "train"))
        if not name or not fits(about):
            raise Refusal(HTTPStatus.BAD_REQUEST, "expected a bus, and a group's id")
        found = await self.polls.group(name, about)
        if found is None:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many questions; ask again")
        answer = web.Response(body=msgspec.json.encode(found), headers=_HEADERS)
        answer.headers["Cache-Control"] = "no-store"
        answer.headers["Content-Type"] = "application/json; charset=utf-8"
        return answer

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send a page what it watches, until it goes, is behind, or the server ends."""
        name = self._bus_of(request)
        if self.polls.watching >= limits.MAX_WATCHING:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{limits.MAX_WATCHING} pages watch already; close one",
            )
        answer = web.StreamResponse(headers=_HEADERS)
        answer.headers["Cache-Control"] = "no-store"
        answer.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        if request.method == "HEAD":
            # It has no body, and would never end.
            answer.force_close()
            return answer
        viewer = self.polls.watch(name)
        try:
            await answer.prepare(request)
            while (message := await viewer.next()) is not None:
                await asyncio.wait_for(answer.write(message), limits.SEND_S)
        except (ConnectionError, asyncio.TimeoutError):
            answer.force_close()
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.polls.leave(name, viewer)
        return answer


async def _run(settings: Settings, parent: socket.socket | None, say: Callable[[str], None]) -> int:
    stop = stop_signals(parent)
    async with contextlib.AsyncExitStack() as stack:
        server = Server(settings)
        stack.push_async_callback(server.close)
        host, port = await server.start()
        say(f"{shown_address(host, port)}/?token={settings.token}")
        await stop.wait()
    return 0


def serve(settings: Settings, parent: socket.socket | None, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent has gone."""
    return run(_run(settings, parent, say))
