"""Bodies of requests: counted as bytes come, inflated within a limit, whole by a deadline."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from shmbus.http.server import answer_expectation
from shmbus.recorder import settings as limits
from shmbus.recorder.refusals import CallRefusal, bad_request

#: Encodings by zlib's number of window bits.
_ENCODINGS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_RAW_DEFLATE: Final = -15
#: Bytes per step of decompression; further sessions run between two steps.
_PIECE: Final = 1 << 20


async def read_body(request: web.BaseRequest, limit: int, take: Callable[[int], None]) -> bytearray:
    """Return a decoded body; `take` counts its bytes, and may refuse more."""
    inflate = _inflater_of(request)
    length = request.content_length
    if length is not None and length > limit:
        raise _too_large(length, limit)
    answer_expectation(request)
    seconds = limits.BODY_S + (limit if length is None else length) / limits.BODY_BYTES_PER_S
    timer = asyncio.get_running_loop().call_later(
        seconds, request.content.set_exception, _late(seconds)
    )
    raw = bytearray()
    try:
        async for data in request.content.iter_any():
            for part in (data,) if inflate is None else inflate.feed(data):
                take(len(part))
                raw += part
                if len(raw) > limit:
                    raise _too_large(len(raw), limit)
                if len(part) == _PIECE:
                    await asyncio.sleep(0)
    finally:
        timer.cancel()
    if inflate is not None and raw and not inflate.ended:
        raise _damaged("a stream that ends too early")
    return raw


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
        while data:
            if self._stream.eof:
                if self._bits != _ENCODINGS["gzip"]:
                    raise _damaged("bytes after the end of the stream")
                self._stream = zlib.decompressobj(self._bits)
            try:
                yield self._stream.decompress(data, _PIECE)
            except zlib.error as error:
                raise _damaged(str(error)) from error
            data = self._stream.unconsumed_tail or self._stream.unused_data


def _is_zlib(data: bytes) -> bool:
    return len(data) < 2 or (data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0)


def _inflater_of(request: web.BaseRequest) -> _Inflater | None:
    given = ",".join(request.headers.getall("Content-Encoding", []))
    names = [name for part in given.split(",") if (name := part.strip().lower())]
    if names in ([], ["identity"]):
        return None
    if len(names) > 1 or names[0] not in _ENCODINGS:
        raise CallRefusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "content_encoding",
            f"Content-Encoding: expected gzip, deflate or none, got {given[:80]}; send the body "
            "without an encoding",
            close=True,
        )
    return _Inflater(_ENCODINGS[names[0]])


def _too_large(length: int, limit: int) -> CallRefusal:
    return CallRefusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body_limit",
        f"expected a body of at most {limit} bytes, got {length} or more; shorten the "
        "conversation, or start the recorder with more --body-limit",
        close=True,
    )


def _late(seconds: float) -> CallRefusal:
    return CallRefusal(
        HTTPStatus.REQUEST_TIMEOUT,
        "body_timeout",
        f"expected the whole body within {seconds:.0f} s; send the body at once",
        close=True,
    )


def _damaged(got: str) -> CallRefusal:
    return bad_request(
        "content_encoding",
        f"expected a body in the encoding of its Content-Encoding, got {got}; encode the body "
        "again, or send the body without an encoding",
    )
