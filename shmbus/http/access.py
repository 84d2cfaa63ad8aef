"""Access rules of the HTTP servers: tokens, names of this machine, pages of other sites.

Invariant: a server on loopback answers only loopback names, so that no web page reads an answer
through a foreign name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from aiohttp import web


class Refusal(Exception):
    """Ends a request with a status, a sentence, and a word for programs."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        code: str = "refused",
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}
        self.close = close


Answer: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """The answer to a method and a path."""

    answer: Answer
    #: Without effects: for HEAD too, and for pages of this machine.
    reads: bool = False
    #: Without the server's token.
    open: bool = False
    #: Polled many times a second: logged only at level debug.
    polled: bool = False


def is_loopback(host: str) -> bool:
    """Return True if an address, a name or a Host header means this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_of(origin: str) -> str:
    """Return the host of an Origin; "" for an invalid Origin."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def bearer_of(given: str) -> bytes | None:
    """Return the token of a Bearer authorization, in any case of letters (RFC 9110), or None."""
    scheme, space, token = given.partition(" ")
    if not space or scheme.lower() != "bearer":
        return None
    return token.lstrip(" ").encode("utf-8", "surrogateescape")


class Access:
    """Access rules of a server for programs."""

    def __init__(self, name: str, host: str, token: str | None) -> None:
        self._name = name
        self._token = None if token is None else token.encode()
        self._loopback_only = is_loopback(host)

    def require(self, request: web.BaseRequest, path: str, route: Route | None) -> None:
        """Refuse a forbidden request; `route` is None for an unknown route."""
        host = request.headers.get("Host", "")
        if self._loopback_only and host and not is_loopback(host):
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                f"Host: expected a loopback name, since the {self._name} listens there only, got "
                f"{host}; ask for 127.0.0.1 or localhost, or start it with another --http",
                close=True,
            )
        origin = request.headers.get("Origin")
        foreign = origin is not None and not is_loopback(host_of(origin))
        foreign |= request.headers.get("Sec-Fetch-Site") == "cross-site"
        if foreign and (route is None or not route.reads):
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                f"{path}: expected a request of a program, got one of a page of another site; ask "
                "without a browser",
                close=True,
            )
        if self._token is None or (route is not None and route.open):
            return
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(bearer_of(given) or b"", self._token):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                f"Authorization: expected 'Bearer' and the token of this {self._name}, got "
                f"{'a different token' if given else 'none'}; send the content of --token-file",
                code="token",
                headers={"WWW-Authenticate": "Bearer"},
                close=True,
            )

    def allow_origin(
        self, request: web.BaseRequest, route: Route | None, response: web.StreamResponse
    ) -> None:
        """Let a page of this machine read the answer of a reading route."""
        origin = request.headers.get("Origin")
        if origin is None or response.prepared or not is_loopback(host_of(origin)):
            return
        asked = request.method == "OPTIONS" and "HEAD" in response.headers.get("Allow", "")
        if asked or (route is not None and route.reads):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
        if asked:
            response.headers["Access-Control-Allow-Methods"] = "GET"
            response.headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"
