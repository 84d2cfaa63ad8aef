"""Bodies of requests: counted as bytes come, inflated within a limit, whole by a deadline.

Invariants:

- A truncated, damaged or oversized body is refused before use.
- A body has a deadline by its size. While other bodies wait for room, a stalled body ends; a delay
  of this process is no stall.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from shmbus.http.access import Refusal
from shmbus.http.server import answer_expectation

#: Seconds for a body, plus a second for each BODY_BYTES_PER_S bytes.
BODY_S: Final = 60.0
BODY_BYTES_PER_S: Final = 128 << 10
#: Seconds between two looks at a body; least bytes a second while other bodies wait: far below any
#: network, and above a stopped client.
LOOK_S: Final = 2.5
SLOWEST_BYTES_PER_S: Final = 16 << 10
#: Encodings by zlib's number of window bits.
_ENCODINGS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_RAW_DEFLATE: Final = -15
#: Bytes per step of decompression; further requests run between two steps.
_PIECE: Final = 1 << 20


class BodyReader:
    """Reads a body of at most `limit` bytes, inflated; a too large length is refused at once.

    `option` names the server's option that raises the limit.
    """

    def __init__(self, request: web.BaseRequest, limit: int, option: str = "--body-limit") -> None:
        self._request = request
        self._content = request.content
        self._limit, self._option = limit, option
        self._inflate = _inflater_of(request)
        length = request.content_length
        if length is not None and length > limit:
            raise self._too_large(length)
        #: Most bytes to come.
        self.most = limit if length is None or self._inflate is not None else length
        self._deadline_s = 0.0
        self._is_crowded: Callable[[], bool] = bool
        #: Time of the last look, bytes at that time, and looks in a row that met a stall.
        self._looked_s = 0.0
        self._came = self._stalls = 0
        self._timer: asyncio.TimerHandle

    async def read(
        self,
        take: Callable[[int], object] = lambda count: None,
        is_crowded: Callable[[], bool] = lambda: False,
    ) -> bytearray:
        """Return the body; `take` counts bytes and may refuse; `is_crowded`: other bodies wait."""
        answer_expectation(self._request)
        self.begin(is_crowded)
        raw = bytearray()
        try:
            async for data in self._content.iter_any():
                for part in (data,) if self._inflate is None else self._inflate.feed(data):
                    if len(raw) + len(part) > self._limit:
                        raise self._too_large(len(raw) + len(part))
                    take(len(part))
                    raw += part
                    if len(part) == _PIECE:
                        await asyncio.sleep(0)
        finally:
            self._timer.cancel()
        if self._inflate is not None and not self._inflate.ended:
            raise _damaged("a stream that ends too early")
        return raw

    def begin(self, is_crowded: Callable[[], bool]) -> None:
        """Begin to look at the body's progress."""
        self._is_crowded = is_crowded
        self._looked_s = asyncio.get_running_loop().time()
        self._deadline_s = self._looked_s + BODY_S + self.most / BODY_BYTES_PER_S
        self._look_later()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = min(loop.time() + LOOK_S, self._deadline_s)
        self._timer = loop.call_at(due_s, self.look)

    def look(self) -> None:
        """End a late or stalled body."""
        now_s, came = asyncio.get_running_loop().time(), self._content.total_bytes
        slow = came - self._came < SLOWEST_BYTES_PER_S * LOOK_S
        in_time = now_s - self._looked_s < 2 * LOOK_S
        self._stalls = self._stalls + 1 if slow and in_time and self._is_crowded() else 0
        self._looked_s, self._came = now_s, came
        if now_s >= self._deadline_s:
            self._end("the whole body in time; send the body at once, or in parts")
        elif self._stalls > 1:
            self._end(
                f"{SLOWEST_BYTES_PER_S} bytes a second while other bodies wait for room, got "
                "fewer; send the body again"
            )
        else:
            self._look_later()

    def _end(self, expected: str) -> None:
        self._content.set_exception(
            Refusal(
                HTTPStatus.REQUEST_TIMEOUT, f"expected {expected}", code="body_timeout", close=True
            )
        )

    def _too_large(self, length: int) -> Refusal:
        return Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"expected a body of at most {self._limit} bytes, got {length} or more; send less at "
            f"once, or start the server with more {self._option}",
            code="body_limit",
            close=True,
        )


class _Inflater:
    """One encoded body; gzip may contain several members."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._stream: Any = None

    @property
    def ended(self) -> bool:
        """True at the end of a whole stream."""
        return self._stream is None or bool(self._stream.eof)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Return decoded bytes in pieces."""
        if self._stream is None:
            if self._bits == zlib.MAX_WBITS and not _is_zlib(data):
                # Clients send deflate with and without zlib's head.
                self._bits = _RAW_DEFLATE
            self._stream = zlib.decompressobj(self._bits)
        part = b""
        while data or (len(part) == _PIECE and not self._stream.eof):
            if self._stream.eof:
                if self._bits != _ENCODINGS["gzip"]:
                    raise _damaged("bytes after the end of the stream")
                self._stream = zlib.decompressobj(self._bits)
            try:
                part = self._stream.decompress(data, _PIECE)
            except zlib.error as error:
                raise _damaged(str(error)) from error
            yield part
            data = self._stream.unconsumed_tail or self._stream.unused_data


def _is_zlib(data: bytes) -> bool:
    return len(data) < 2 or (data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0)


def _inflater_of(request: web.BaseRequest) -> _Inflater | None:
    given = ",".join(request.headers.getall("Content-Encoding", []))
    names = [name for part in given.split(",") if (name := part.strip().lower())]
    if names in ([], ["identity"]):
        return None
    if len(names) > 1 or names[0] not in _ENCODINGS:
        raise Refusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding: expected gzip, deflate or none, once, got {given[:80]}; send the "
            "body without an encoding",
            code="content_encoding",
            close=True,
        )
    return _Inflater(_ENCODINGS[names[0]])


def _damaged(got: str) -> Refusal:
    return Refusal(
        HTTPStatus.BAD_REQUEST,
        f"expected a body in the encoding of its Content-Encoding, got {got}; encode the body "
        "again, or send the body without an encoding",
        code="content_encoding",
        close=True,
    )
