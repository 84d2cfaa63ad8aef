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
import contextlib
import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from shmbus.base.format import unprinted
from shmbus.http.access import Access, Answer, Refusal, Route, host_of, is_loopback
from shmbus.http.app import App, json_answer, run
from shmbus.web import settings as limits
from shmbus.web.polling import GroupName, Polls, fits
from shmbus.web.settings import Settings

#: A browser's mark of a request from another site's page.
_FOREIGN: Final = frozenset({"cross-site", "same-site"})
_ROUND: Final = re.compile(r"-?[0-9]{1,19}")


class PageAccess(Access):
    """Conditions for a request of the page; `service` knows the address."""

    def __init__(self, settings: Settings, service: Polls) -> None:
        super().__init__("page", settings.host, settings.token)
        self._own_names = {settings.host, socket.gethostname()}
        self._service = service

    @property
    def cookie(self) -> str:
        """Name of the cookie; browsers share cookies between ports."""
        return f"shmbus-{urlsplit(self._service.url).port}"

    def require(self, request: web.BaseRequest, path: str, route: Route | None) -> None:
        """Refuse an inadmissible request, regardless of its target."""
        if request.method not in ("GET", "HEAD"):
            raise Refusal(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"expected GET, got {request.method[:20]!r}",
                headers={"Allow": "GET, HEAD"},
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
        foreign = request.headers.get("Sec-Fetch-Site") in _FOREIGN and path != "/"
        if (origin is not None and host_of(origin) != host) or foreign:
            raise Refusal(HTTPStatus.FORBIDDEN, "expected a request of this page, not another's")
        token = request.query.get("token") if path == "/" else None
        if token is not None and not self._is_token(token):
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                "the token of this address is another server's; use the address that `shmbus web` "
                "printed last",
            )
        if token is None and not self._is_token(request.cookies.get(self.cookie, "")):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "open the address that `shmbus web` printed: its token lets this browser in",
            )

    def allow_origin(
        self, request: web.BaseRequest, route: Route | None, response: web.StreamResponse
    ) -> None:
        """Let no further page read an answer."""
        if not response.prepared:
            response.headers.update(_HEADERS)
            response.headers.setdefault("Cache-Control", "no-store")

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)

    def _may_ask_by(self, host: str) -> bool:
        if is_loopback(host):
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if self._loopback_only:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._own_names
        return True


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


class Page:
    """The routes of the page."""

    def __init__(self, settings: Settings, polls: Polls, access: PageAccess) -> None:
        self._settings = settings
        self._polls = polls
        self._access = access
        self.routes = {
            **{
                ("GET", path): Route(_file_route(*file), True)
                for path, file in read_files().items()
            },
            ("GET", "/events"): Route(self._events, True),
            ("GET", "/group"): Route(self._group, True),
        }
        self._show = self.routes["GET", "/"].answer
        self.routes["GET", "/"] = Route(self._enter, True)

    async def _enter(self, request: web.BaseRequest) -> web.StreamResponse:
        """Show the page; exchange a token in the address for a cookie first."""
        if "token" not in request.query:
            return await self._show(request)
        answer = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": "/"})
        answer.set_cookie(
            self._access.cookie, self._settings.token, httponly=True, samesite="Strict", path="/"
        )
        return answer

    def _bus_of(self, request: web.BaseRequest) -> str:
        """Return the requested bus; "" for the overview."""
        name = request.query.get("bus", "")
        if not name and len(self._settings.buses) == 1:
            name = self._settings.buses[0]
        if name and not self._polls.may_watch(name):
            # The overview shows a bus's name with escapes for unprintable characters.
            shown, name = name, unprinted(name)
            if not self._polls.may_watch(name) and self._polls.may_await(shown):
                return shown
        if name and not self._polls.may_watch(name):
            raise Refusal(HTTPStatus.NOT_FOUND, "This server shows no such bus.")
        return name

    async def _group(self, request: web.BaseRequest) -> web.Response:
        name = self._bus_of(request)
        query = request.query
        if not _ROUND.fullmatch(query.get("round", "0")):
            raise Refusal(HTTPStatus.BAD_REQUEST, "round: expected a number")
        round = int(query["round"]) if "round" in query else None
        about = GroupName(query.get("id", ""), round, query.get("split", "train"))
        if not name or not fits(about):
            raise Refusal(HTTPStatus.BAD_REQUEST, "expected a bus, and a group's id")
        found = await self._polls.group(name, about)
        if found is None:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many questions; ask again")
        return json_answer(found)

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        """Send a page its events, until it leaves, falls behind, or the server ends."""
        name = self._bus_of(request)
        if self._polls.watching >= limits.MAX_WATCHING:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{limits.MAX_WATCHING} pages watch already; close one",
            )
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self._access.allow_origin(request, None, answer)
        if request.method == "HEAD":
            # The answer lacks a body, and would never end.
            answer.force_close()
            return answer
        viewer = self._polls.watch(name)
        try:
            await answer.prepare(request)
            while (message := await viewer.next()) is not None:
                await asyncio.wait_for(answer.write(message), limits.SEND_S)
        except (ConnectionError, asyncio.TimeoutError):
            answer.force_close()
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._polls.leave(name, viewer)
        return answer


def _file_route(kind: str, tag: str, body: bytes) -> Answer:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        headers = {"Cache-Control": "no-cache", "ETag": tag, "Content-Type": kind}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=HTTPStatus.NOT_MODIFIED, headers=headers)
        return web.Response(body=body, headers=headers)

    return answer


def _refused(refusal: Refusal, message: str) -> web.Response:
    answer = web.Response(status=refusal.status, text=f"{message}\n")
    answer.force_close()
    return answer


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Polls]:
    """Serve in the block."""
    polls = Polls(settings.buses)
    access = PageAccess(settings, polls)
    app = App(
        "web",
        ",".join(settings.buses),
        access,
        Page(settings, polls, access).routes,
        _refused,
        max_connections=limits.MAX_CONNECTIONS,
        idle_s=limits.IDLE_S,
        header_bytes=limits.HEADER_BYTES,
        ends_with_client=True,
    )
    async with app.serving(polls, settings.host, settings.port):
        yield polls


def serve(settings: Settings, parent: socket.socket | None, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent's end."""
    return run(lambda: serving(settings), lambda url: say(f"{url}/?token={settings.token}"), parent)
