"""Polls: requests that come again byte by byte, answered without parsing them again.

An environment asks ``/status-env`` ten times a second, over a new connection each time, in the same
words. Reading them costs several times what the answer does.

Invariants:

- A request is known only after it was answered 200 the long way, with every check of who may ask;
  none of these looks at anything but its bytes. It is known to the byte, and was all that came.
- The answer is that of the long way, of the same instant. Whatever is not ordinary goes that way.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time

from shmbus.gateway.answers import JSON, SERVER
from shmbus.gateway.gateway import Gateway
from shmbus.gateway.settings import MAX_ENVS
from shmbus.http.access import Refusal

__all__ = ["PATH", "Polls"]

PATH: Final = "/status-env"
#: Bytes of a request that is remembered; those of environments have some 250.
_MOST_BYTES: Final = 1024

_encoder = msgspec.json.Encoder()


class _Poll:
    """A request that is known.

    Attributes
    ----------
    env_id : int
        Of whom it asks.
    stays : bool
        Whether it asks for its connection to be kept.
    kept : bool
        Whether a client asked more over a connection that had begun with it.
    ended : bool
        Whether a client ended such a connection after the answer.
    """

    __slots__ = ("ended", "env_id", "kept", "stays")

    def __init__(self, env_id: int, stays: bool) -> None:
        self.env_id = env_id
        self.stays = stays
        self.kept = False
        self.ended = False

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after it over its connection, as far as is known."""
        return not self.stays or (self.ended and not self.kept)


class Polls:
    """The polls that one gateway knows.

    Parameters
    ----------
    gateway : Gateway
        Whose state they ask for.
    logged : bool
        Whether each has a line in the log: then all go the long way.
    """

    def __init__(self, gateway: Gateway, logged: bool) -> None:
        self._gateway = gateway
        self._logged = logged
        #: By request; the oldest first.
        self._known: dict[bytes, _Poll] = {}
        #: How many polls were answered the short way.
        self.answered = 0

    def remember(self, received: bytes, request: web.BaseRequest) -> bool:
        """Know a request that was answered 200 the long way; returns whether it is known now.

        `received` is all that came over its connection.
        """
        if len(received) > _MOST_BYTES or request.version != (1, 1) or request.path != PATH:
            return False
        if received in self._known:
            return True
        _, _, body = received.partition(b"\r\n\r\n")
        if not body or len(body) != request.content_length:
            return False
        number = msgspec.json.decode(body, strict=False)["env_id"]
        if not isinstance(number, int):
            return False
        if len(self._known) >= MAX_ENVS:
            del self._known[next(iter(self._known))]
        self._known[received] = _Poll(number, request.keep_alive)
        return True

    def note_kept(self, received: bytes) -> None:
        """Note that a client asked more over a connection that began with this."""
        if found := self._known.get(received):
            found.kept = True

    def note_ended(self, received: bytes) -> None:
        """Note that a client ended a connection after the answer to this."""
        if found := self._known.get(received):
            found.ended = True

    def answer_last(self, received: bytes) -> bytes | None:
        """Return the answer to a poll that ends its connection; None to any other request.

        Clients of Atropos ask for their connections to be kept, and then end them.
        """
        found = self._known.get(received)
        return self._answer(found, received) if found is not None and found.is_last else None

    def answer(self, received: bytes) -> tuple[bytes, bool] | None:
        """Return the answer to a poll, and whether its connection stays; None if it is another."""
        found = self._known.get(received)
        if found is None:
            return None
        answer = self._answer(found, received)
        return None if answer is None else (answer, not found.is_last)

    def _answer(self, poll: _Poll, received: bytes) -> bytes | None:
        gateway = self._gateway
        if gateway.batch_queue.stale or self._logged:
            return None
        began_s = time.monotonic()
        try:
            available = gateway.batch_queue.available_to(poll.env_id)
            body = _encoder.encode(gateway.registry.status_env(poll.env_id, available))
        except Refusal:
            return None
        head = (
            f"HTTP/1.1 200 OK\r\nContent-Type: {JSON}\r\nServer: {SERVER}\r\n"
            f"Content-Length: {len(body)}\r\nDate: {rfc822_formatted_time()}\r\n"
            + ("Connection: close\r\n\r\n" if poll.is_last else "\r\n")
        )
        self.answered += 1
        seconds = time.monotonic() - began_s
        gateway.metrics.note(PATH, HTTPStatus.OK, seconds, len(received), len(body))
        return head.encode() + body
