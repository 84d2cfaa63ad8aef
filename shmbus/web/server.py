"""The page's HTTP server: access, files, and a stream of events for each page.

Invariants:

- Read-only: no request changes a bus.
- A connection is answered, closed when silent or behind, or refused above a limit; a client's
  behaviour costs other clients nothing.
- The page loads from here alone, and its policy forbids other sources.
- Bound to loopback, only loopback names are answered: no name of another site that resolves to
  127.0.0.1 reads anything.
- The token leaves the address at once; the cookie is HttpOnly and SameSite=Strict.
- Only GET and HEAD without a body; every other request is refused before a read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import socket
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from shmbus.base.format import unprinted
from shmbus.http.access import Refusal, host_of, is_loopback
from shmbus.http.server import HttpServer, run_server, url_of
from shmbus.web import settings as limits
from shmbus.web.polling import GroupName, Polls, fits
from shmbus.web.settings import Settings

#: A browser's mark of a request from another site's page.
_FOREIGN: Final = frozenset({"cross-site", "same-site"})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Access:
    """Conditions for a request."""

    def __init__(self, settings: Settings, port: int) -> None:
        self._token = settings.token.encode()
        self._loopback_only = is_loopback(settings.host)
        self._own_names = {settings.host, socket.gethostname()}
        self.cookie = f"shmbus-{port}"

    def require(self, request: web.BaseRequest) -> None:
        """Refuse an inadmissible request, regardless of its target."""
        if request.method not in ("GET", "HEAD"):
            raise Refusal(
                HTTPStatus.METHOD_NOT_ALLOWED, f"expected GET, got {request.method[:20]!r}"
            )
        if request.can_read_body:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "expected no body")
        host = request.headers.get("Host", "")
        if len(request.headers.getall("Host", [])) != 1 or not self._may_ask_by(host):
            raise Refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"Host: expected a name of this machine, got {host[:200]!r}; use the printed "
                "address",
            )
        origin = request.headers.get("Origin")
        foreign = request.headers.get("Sec-Fetch-Site") in _FOREIGN and request.path != "/"
        if (origin is not None and host_of(origin) != host) or foreign:
            raise Refusal(HTTPStatus.FORBIDDEN, "expected a request of this page, not another's")

    def _may_ask_by(self, host: str) -> bool:
        if is_loopback(host):
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return not self._loopback_only and (_is_address(name) or name in self._own_names)

    def require_token(self, given: str) -> None:
        """Refuse a wrong token."""
        if hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token):
            return
        raise Refusal(
            HTTPStatus.FORBIDDEN,
            "the token of this address is another server's; use the address that `shmbus web` "
            "printed last",
        )

    def require_cookie(self, request: web.BaseRequest) -> None:
        """Refuse a request without the cookie given in exchange for the token."""
        given = request.cookies.get(self.cookie, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "open the address that `shmbus web` printed: its token lets this browser in",
            )


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
        """Listen, and return the address."""
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
        """Return the requested bus; "" for the overview."""
        name = request.query.get("bus", "")
        if not name and len(self._settings.buses) == 1:
            name = self._settings.buses[0]
        if name and not self.polls.may_watch(name):
            # The overview shows a bus's name with escapes for unprintable characters.
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
        """Send a page its events, until it leaves, falls behind, or the server ends."""
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
            # The answer lacks a body, and would never end.
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


def serve(settings: Settings, parent: socket.socket | None, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent's end."""

    async def show(stop: asyncio.Event) -> int:
        server = Server(settings)
        try:
            say(f"{url_of(*await server.start())}/?token={settings.token}")
            await stop.wait()
        finally:
            await server.close()
        return 0

    return run_server(show, parent)
