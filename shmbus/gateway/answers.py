"""JSON answers, compressed for clients that accept gzip."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web
from isal import igzip_lib

import shmbus
from shmbus.gateway import settings
from shmbus.http.access import Refusal

JSON: Final = "application/json"
#: This program's name in answers.
SERVER: Final = f"shmbus/{shmbus.__version__}"
#: Level 1 of three: within a tenth of the best size, at a fraction of the time.
_LEVEL: Final = 1

_encoder = msgspec.json.Encoder()


def _compress(body: bytes) -> bytes:
    found: bytes = igzip_lib.compress(body, _LEVEL, flag=igzip_lib.COMP_GZIP)
    return found


async def json_answer(
    request: web.BaseRequest, content: Any, status: int = HTTPStatus.OK
) -> web.Response:
    """Return an answer; `content` is an object for msgspec, or bytes of JSON."""
    body = content if isinstance(content, bytes) else _encoder.encode(content)
    headers = {"Content-Type": JSON, "Server": SERVER}
    if len(body) >= settings.COMPRESS_FROM:
        headers["Vary"] = "Accept-Encoding"
        if "gzip" in request.headers.get("Accept-Encoding", "").lower():
            headers["Content-Encoding"] = "gzip"
            if len(body) > settings.LARGE_BYTES:
                loop = asyncio.get_running_loop()
                body = await loop.run_in_executor(None, _compress, body)
            else:
                body = _compress(body)
    return web.Response(body=body, status=status, headers=headers)


def refusal_answer(refusal: Refusal) -> web.Response:
    """Return the answer for a refused request, in FastAPI's form."""
    # A message may quote a client's bytes, perhaps invalid text.
    message = refusal.message.encode(errors="backslashreplace").decode()
    detail: Any = message
    if refusal.status == HTTPStatus.UNPROCESSABLE_ENTITY:
        detail = [{"type": "value_error", "loc": ["body"], "msg": message}]
    response = web.Response(
        body=_encoder.encode({"detail": detail}),
        status=refusal.status,
        headers={"Content-Type": JSON, "Server": SERVER},
    )
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    if refusal.close:
        response.force_close()
    return response


def text_answer(text: str, status: int = HTTPStatus.OK) -> web.Response:
    """Return an answer in plain text."""
    return web.Response(
        body=text.encode(),
        status=status,
        headers={"Content-Type": "text/plain; charset=utf-8", "Server": SERVER},
    )
