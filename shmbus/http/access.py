"""Access rules of every HTTP server in this package: refused requests and allowed names."""

from __future__ import annotations

import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit

from aiohttp import web


class Refusal(Exception):
    """Ends a request with a status and a sentence."""

    def __init__(self, status: HTTPStatus, message: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.close = close


def is_loopback(host: str) -> bool:
    """Return True if an address, a name or a Host header means this machine's loopback interface.

    A server on loopback answers only these names: no web page reads it through a foreign name that
    resolves to 127.0.0.1.
    """
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
    """Return the token of an Authorization; None for another scheme.

    Schemes are case-insensitive (RFC 9110, section 11.1).
    """
    scheme, space, token = given.partition(" ")
    if not space or scheme.lower() != "bearer":
        return None
    return token.lstrip(" ").encode("utf-8", "surrogateescape")


def require_loopback_name(request: web.BaseRequest, who: str) -> None:
    """Refuse a request with a foreign name to a server on loopback."""
    host = request.headers.get("Host", "")
    if host and not is_loopback(host):
        raise Refusal(
            HTTPStatus.FORBIDDEN,
            f"Host: expected a loopback name, since {who} listens there only, got "
            f"{host}; ask for 127.0.0.1 or localhost, or start it with another --http",
            close=True,
        )


def require_program(request: web.BaseRequest) -> None:
    """Refuse requests from a foreign site's page."""
    origin = request.headers.get("Origin")
    foreign = origin is not None and not is_loopback(host_of(origin))
    if foreign or request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise Refusal(
            HTTPStatus.FORBIDDEN,
            f"{request.path}: expected a request of a program, got one of a page of another "
            "site; ask without a browser",
            close=True,
        )
