"""Bodies of JSON within a budget of memory.

Invariant: bodies with groups together stay below the budget; later bodies wait unread, in order of
arrival. A body reserves its most bytes before its first byte, and waits for room only once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from http import HTTPStatus

from aiohttp import web

from shmbus.gateway import settings
from shmbus.http.access import Refusal
from shmbus.http.bodies import BodyReader


def _require_json(request: web.BaseRequest) -> None:
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise Refusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type: expected application/json, got {kind or 'none'}; send the body as JSON",
            close=True,
        )


async def small_body(request: web.BaseRequest) -> bytearray:
    """Return the body of a request with a few names and numbers."""
    _require_json(request)
    return await BodyReader(request, settings.SMALL_BYTES).read()


class Bodies:
    """Reads bodies of at most `limit` bytes, inflated, and `memory` bytes together."""

    def __init__(self, limit: int, memory: int) -> None:
        self._limit = min(limit, memory)
        self._option = "--body-limit" if limit <= memory else "--memory"
        self._memory = memory
        #: Reserved bytes, and bodies that wait for room.
        self.used = self.waiting = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def large(self, request: web.BaseRequest, deadline_s: float) -> AsyncIterator[bytearray]:
        """Yield a body with groups, counted in the budget; wait for room until `deadline_s`."""
        _require_json(request)
        reader = BodyReader(request, self._limit, self._option)
        reserved = reader.most
        await self._reserve(reserved, deadline_s)
        try:
            body = await reader.read(is_crowded=lambda: self.waiting > 0)
            self._release(reserved - len(body))
            reserved = len(body)
            yield body
        finally:
            self._release(reserved)

    async def _reserve(self, count: int, deadline_s: float) -> None:
        if not self.waiting and self.used + count <= self._memory:
            self.used += count
            return
        self.waiting += 1
        try:
            await asyncio.wait_for(self._wait(count), max(0.0, deadline_s - time.monotonic()))
        except asyncio.TimeoutError:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"body: expected room for {count} bytes in time, but the bodies that wait for the "
                f"bus have all {self._memory}; nothing was lost: send it again",
                close=True,
            ) from None
        finally:
            self.waiting -= 1

    async def _wait(self, count: int) -> None:
        async with self._turn:
            while self.used + count > self._memory:
                self._freed.clear()
                await self._freed.wait()
            self.used += count

    def _release(self, count: int) -> None:
        self.used -= count
        self._freed.set()
