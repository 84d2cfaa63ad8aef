"""What every HTTP server of this package refuses, and by which names it may be asked."""

from __future__ import annotations

import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit


class Refusal(Exception):
    """Ends a request with a status and a sentence."""

    def __init__(self, status: HTTPStatus, message: str, *, close: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.close = close


def is_loopback(host: str) -> bool:
    """Whether an address, a name or a Host header is this machine's loopback interface.

    A server that listens on loopback answers these names only, so that no web page reads it by way
    of a name of its own that resolves to 127.0.0.1.
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
