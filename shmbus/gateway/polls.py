"""Polls: requests that come again byte by byte, answered without parsing them again.

An environment asks ``/status-env`` ten times a second, over a new connection each time, in the same
words. Reading them costs several times what the answer does.

Invariants:

- A request is known only after it was answered 200 the long way, with every check of who may ask;
  none of these looks at anything but its bytes. It is known to the byte, and was all that came.
- The answer is that of the long way, of the same instant. Whatever is not ordinary goes that way.
"""

from __future__ import annotations

import logging
import time
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time

from shmbus.gateway.answers import JSON, SERVER
from shmbus.gateway.gateway import Gateway
from shmbus.gateway.refusal import Refusal
from shmbus.gateway.settings import MAX_ENVS

__all__ = ["PATH", "Polls"]

PATH: Final = "/status-env"
#: Bytes of a request that is remembered; those of environments have some 250.
_MOST_BYTES: Final = 1024

access_logger = logging.getLogger("shmbus.gateway.access")
_encoder = msgspec.json.Encoder()


class Polls:
    """The polls that one gateway knows.

    Parameters
    ----------
    gateway : Gateway
        Whose state they ask for.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        #: Environment, and whether the connection stays, by request; the oldest first.
        self._known: dict[bytes, tuple[int, bool]] = {}
        #: How many polls were answered the short way.
        self.answered = 0

    def remember(self, received: bytes, request: web.BaseRequest) -> None:
        """Know a request that was answered 200 the long way.

        `received` is all that came over its connection.
        """
        if len(received) > _MOST_BYTES or request.version != (1, 1) or request.path != PATH:
            return
        _, _, body = received.partition(b"\r\n\r\n")
        if not body or len(body) != request.content_length:
            return
        number = msgspec.json.decode(body, strict=False)["env_id"]
        if isinstance(number, int):
            if len(self._known) >= MAX_ENVS:
                del self._known[next(iter(self._known))]
            self._known[received] = (number, request.keep_alive)

    def answer(self, received: bytes) -> tuple[bytes, bool] | None:
        """Return the answer to a poll, and whether its connection stays; None if it is another."""
        found = self._known.get(received)
        if found is None or access_logger.isEnabledFor(logging.DEBUG):
            return None
        began_s = time.monotonic()
        gateway = self._gateway
        if gateway.supply.stale:
            return None
        env_id, stays = found
        try:
            counts = gateway.supply.counts_for(env_id)
            body = _encoder.encode(gateway.registry.status_env(env_id, counts))
        except Refusal:
            return None
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nServer: {SERVER}\r\n"
            f"Content-Length: {len(body)}\r\nDate: {rfc822_formatted_time()}\r\n"
            + ("\r\n" if stays else "Connection: close\r\n\r\n")
        )
        self.answered += 1
        seconds = time.monotonic() - began_s
        gateway.metrics.note(PATH, HTTPStatus.OK, seconds, len(received), len(body))
        return head.encode() + body, stays
