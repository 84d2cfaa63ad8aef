"""Who may ask what: the token, the name that a client asks by, and pages of other sites.

Bound to loopback, the gateway answers loopback names only, so that no web page reads it by way of a
name of its own that resolves to 127.0.0.1. What changes something is not for other sites' pages.
"""

from __future__ import annotations

import hmac
from http import HTTPStatus
from typing import Final

from aiohttp import web

from shmbus.gateway.settings import Settings
from shmbus.http.access import (
    Refusal,
    bearer_of,
    host_of,
    is_loopback,
    require_loopback_name,
    require_program,
)

__all__ = ["Access"]

#: Routes that only look, and are asked for by dashboards in a browser.
_READING: Final = frozenset({"/", "/info", "/wandb_info", "/status", "/latest_example", "/healthz"})
#: What says only that the process lives; a supervisor has no token.
_OPEN: Final = frozenset({"/healthz"})


class Access:
    """What a request needs."""

    def __init__(self, settings: Settings) -> None:
        self._token = None if settings.token is None else settings.token.encode()
        self._loopback_only = is_loopback(settings.host)

    def require(self, request: web.BaseRequest) -> None:
        """Refuse a request that may not be answered."""
        headers = request.headers
        if self._loopback_only:
            require_loopback_name(request, "the gateway")
        if request.path not in _READING:
            require_program(request)
        if self._token is None or request.path in _OPEN:
            return
        given = headers.get("Authorization", "")
        token = bearer_of(given)
        if token is None or not hmac.compare_digest(token, self._token):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "Authorization: expected 'Bearer' and the token of this gateway, got "
                f"{'another one' if given else 'none'}; send what --token-file holds",
                close=True,
            )

    def allow_origin(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Let a page of this machine read the answer of a route that only looks."""
        origin = request.headers.get("Origin")
        if origin is None or response.prepared:
            return
        if request.path in _READING and is_loopback(host_of(origin)):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Vary"] = "Origin"
            if request.method == "OPTIONS":
                response.headers["Access-Control-Allow-Methods"] = "GET"
                response.headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"
