"""Who may see the page: the token once, its cookie from then on, and no other site.

Invariants:

- Bound to loopback, only loopback names are answered: no name of another site that resolves to
  127.0.0.1 reads anything.
- The token leaves the address at once; the cookie is HttpOnly and SameSite=Strict.
- Only GET and HEAD without a body; whatever else is refused before anything is read.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from shmbus.http.access import Refusal, is_loopback
from shmbus.web.settings import Settings

__all__ = ["Access"]

#: What a browser says of a request that another site's page made.
_FOREIGN: Final = frozenset({"cross-site", "same-site"})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Access:
    """What a request needs."""

    def __init__(self, settings: Settings, port: int) -> None:
        self._token = settings.token.encode()
        self._loopback_only = is_loopback(settings.host)
        self._own_names = {settings.host, socket.gethostname()}
        self.cookie = f"shmbus-{port}"

    def require(self, request: web.BaseRequest) -> None:
        """Refuse a request that may not be answered, whatever it asks for."""
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
        if (origin is not None and not _same_host(origin, host)) or foreign:
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
        """Refuse another token."""
        if hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token):
            return
        raise Refusal(
            HTTPStatus.FORBIDDEN,
            "the token of this address is another server's; use the address that `shmbus web` "
            "printed last",
        )

    def require_cookie(self, request: web.BaseRequest) -> None:
        """Refuse a request without the cookie that the token is exchanged for."""
        given = request.cookies.get(self.cookie, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "open the address that `shmbus web` printed: its token lets this browser in",
            )


def _same_host(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False
