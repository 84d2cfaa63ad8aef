"""Who may ask what: the token, the name that a client asks by, and pages of other sites.

Bound to loopback, the gateway answers loopback names only, so that no web page reads it by way of a
name of its own that resolves to 127.0.0.1. What changes something is not for other sites' pages.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from shmbus.gateway.settings import Settings
from shmbus.http.access import Refusal, is_loopback

#: Routes that only look, and are asked for by dashboards in a browser.
_READING: Final = frozenset({"/", "/info", "/wandb_info", "/status", "/latest_example", "/healthz"})
#: What says only that the process lives; a supervisor has no token.
_OPEN: Final = frozenset({"/healthz"})


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _bearer_of(given: str) -> bytes | None:
    """Return the token of an Authorization; None for another scheme.

    A scheme may be written in any case (RFC 9110, section 11.1).
    """
    scheme, space, token = given.partition(" ")
    if not space or scheme.lower() != "bearer":
        return None
    return token.lstrip(" ").encode("utf-8", "surrogateescape")


class Access:
    """What a request needs."""

    def __init__(self, settings: Settings) -> None:
        self._token = None if settings.token is None else settings.token.encode()
        self._loopback_only = is_loopback(settings.host)

    def require(self, request: web.BaseRequest) -> None:
        """Refuse a request that may not be answered."""
        headers = request.headers
        host = headers.get("Host", "")
        if self._loopback_only and host and not is_loopback(host):
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                f"Host: expected a loopback name, since the gateway listens there only, got "
                f"{host}; ask for 127.0.0.1 or localhost, or start it with another --http",
                close=True,
            )
        if request.path not in _READING and self._from_another_site(request):
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                f"{request.path}: expected a request of a program, got one of a page of another "
                "site; ask without a browser",
                close=True,
            )
        if self._token is None or request.path in _OPEN:
            return
        given = headers.get("Authorization", "")
        token = _bearer_of(given)
        if token is None or not hmac.compare_digest(token, self._token):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "Authorization: expected 'Bearer' and the token of this gateway, got "
                f"{'another one' if given else 'none'}; send what --token-file holds",
                close=True,
            )

    def _from_another_site(self, request: web.BaseRequest) -> bool:
        origin = request.headers.get("Origin")
        if origin is not None and not is_loopback(_host_of(origin)):
            return True
        return request.headers.get("Sec-Fetch-Site") == "cross-site"

    def allow_origin(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Let a page of this machine read the answer of a route that only looks."""
        origin = request.headers.get("Origin")
        if origin is None or response.prepared:
            return
        if request.path in _READING and is_loopback(_host_of(origin)):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
            if request.method == "OPTIONS":
                response.headers["Access-Control-Allow-Methods"] = "GET"
                response.headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"
