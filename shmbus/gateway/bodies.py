"""Request bodies: read within a deadline, inflated within a limit, in total within a budget.

Invariants:

- Bodies together stay below the budget; later bodies wait unread, in order of arrival. Compressed
  bodies use a budget of their own: no body waits for room that only its own end frees.
- While bodies wait for room, an admitted but stalled body ends.
- A truncated, damaged or oversized gzip stream is refused before use.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import cast

from aiohttp import web
from isal import igzip_lib, isal_zlib

from shmbus.gateway import settings
from shmbus.http.access import Refusal
from shmbus.http.server import answer_expectation

_ISAL_ERROR = cast("type[Exception]", igzip_lib.IsalError)

#: For `isal_zlib.decompressobj`: a gzip header and trailer around the stream.
_GZIP = 31
#: Bytes of a gzip trailer's size field, and of the shortest member.
_SIZE_BYTES = 4
_SHORTEST = 18


class Arrival:
    """An admitted body with a count of received bytes and an abort."""

    def __init__(self, came: Callable[[], int], end: Callable[[], None], now_s: float) -> None:
        self._came = came
        self._since_s, self._before = now_s, 0
        self.end = end

    def begin_window(self, now_s: float) -> None:
        """Count from now on."""
        self._since_s, self._before = now_s, self._came()

    def is_slow(self, now_s: float) -> bool:
        """Return True if the last window brought too few bytes; otherwise begin a new window.

        The client is not blamed for bytes unread while this process was busy.
        """
        window_s = now_s - self._since_s
        if window_s < settings.STALL_S:
            return False
        if self._came() - self._before < settings.SLOWEST_BYTES_PER_S * window_s:
            return True
        self.begin_window(now_s)
        return False


class Budget:
    """Bytes shared by several bodies."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        #: Admitted bodies still arriving.
        self._arriving: dict[Arrival, None] = {}
        #: The time of the next check; None without waiting bodies.
        self._check_due_s: float | None = None
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many bodies wait for their part."""
        return len(self._queue)

    def acquire_now(self, count: int) -> bool:
        """Take `count` bytes unless bodies wait; return True on success."""
        if self._queue or self.used + count > self.total:
            return False
        self.used += count
        return True

    async def acquire(self, count: int) -> None:
        """Wait for `count` bytes, in order of arrival."""
        if self.acquire_now(count):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, turn)
        self._queue.append(entry)
        if self._check_due_s is None:
            self._begin_windows(time.monotonic())
            self._check_soon()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(count)
            else:
                with contextlib.suppress(ValueError):
                    self._queue.remove(entry)
                self._admit()
            raise

    def release(self, count: int) -> None:
        """Give `count` bytes back."""
        self.used -= count
        self._admit()

    @contextlib.contextmanager
    def arriving(self, came: Callable[[], int], end: Callable[[], None]) -> Iterator[None]:
        """Watch a body during the block: while bodies wait, a slow body ends."""
        arrival = Arrival(came, end, time.monotonic())
        self._arriving[arrival] = None
        try:
            yield
        finally:
            self._arriving.pop(arrival, None)

    def _check_soon(self) -> None:
        self._check_due_s = time.monotonic() + settings.STALL_CHECK_S
        asyncio.get_running_loop().call_later(settings.STALL_CHECK_S, self._check)

    def _check(self) -> None:
        now_s, due_s = time.monotonic(), self._check_due_s
        if not self._queue:
            self._check_due_s = None
            return
        if due_s is None or now_s - due_s > settings.STALL_CHECK_S:
            self._begin_windows(now_s)  # the delay is this process's own
        else:
            self._end_slow(now_s)
        self._check_soon()

    def _begin_windows(self, now_s: float) -> None:
        """Restart the windows: nothing was watched until now."""
        for arrival in self._arriving:
            arrival.begin_window(now_s)

    def _end_slow(self, now_s: float) -> None:
        """End slow bodies, for the waiting bodies."""
        for arrival in [each for each in self._arriving if each.is_slow(now_s)]:
            del self._arriving[arrival]
            arrival.end()

    def _admit(self) -> None:
        while self._queue and self.used + self._queue[0][0] <= self.total:
            count, turn = self._queue.popleft()
            if not turn.done():
                self.used += count
                turn.set_result(None)


def _encoding(request: web.BaseRequest) -> bool:
    """Return True for gzip; refuse every encoding but gzip and identity."""
    found = request.headers.getall("Content-Encoding", [])
    names = [name.strip().lower() for value in found for name in value.split(",")]
    if names in ([], [""], ["identity"]):
        return False
    if names in (["gzip"], ["x-gzip"]):
        return True
    raise Refusal(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"Content-Encoding: expected gzip, or none, got {', '.join(names)}; compress the body "
        "once, with gzip",
        close=True,
    )


def require_json(request: web.BaseRequest) -> None:
    """Refuse a body declared as anything but JSON."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise Refusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type: expected application/json, got {kind or 'none'}; send the body as JSON",
            close=True,
        )


class Bodies:
    """Reads bodies of `limit` bytes, inflated; compressed bodies get a quarter of `memory`."""

    def __init__(self, limit: int, memory: int) -> None:
        compressed = memory // 4
        # The need of a body must fit, or the body would wait for ever.
        self.limit = min(limit, memory - compressed)
        self.plain = Budget(memory - compressed)
        self.compressed = Budget(compressed)
        self._compressed_limit = min(self.limit, compressed)

    def _too_large(self, got: str) -> Refusal:
        return Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"body: expected at most {self.limit} bytes, got {got}; send fewer groups at "
            "once, or start the gateway with a larger --body-limit",
            close=True,
        )

    async def small(self, request: web.BaseRequest) -> bytes | bytearray:
        """Return the body of a request with a few names and numbers."""
        require_json(request)
        if (request.content_length or 0) > settings.SMALL_BYTES:
            raise self._small_refusal(request.path)
        body = await self._read(request, settings.SMALL_BYTES, self._small_refusal(request.path))
        if _encoding(request):
            body = _inflate(body, settings.SMALL_BYTES, self._small_refusal(request.path))
        return body

    def _small_refusal(self, path: str) -> Refusal:
        return Refusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"{path}: expected at most {settings.SMALL_BYTES} bytes, got more; this "
            "route takes no groups",
            close=True,
        )

    @contextlib.asynccontextmanager
    async def large(
        self, request: web.BaseRequest, deadline_s: float
    ) -> AsyncIterator[bytes | bytearray]:
        """Yield the body of a request with groups; its bytes count in the budget during the block.

        `deadline_s` limits the wait for the budget, by `time.monotonic`.
        """
        require_json(request)
        is_gzip = _encoding(request)
        budget = self.compressed if is_gzip else self.plain
        limit = self._compressed_limit if is_gzip else self.limit
        said = request.content_length
        if said is not None and said > limit:
            raise self._too_large(str(said))
        # Without a length, reserve the limit.
        reserved = limit if said is None else said
        too_large = self._too_large("more")
        await self._acquire(budget, reserved, deadline_s)
        content = request.content
        try:
            with budget.arriving(
                lambda: content.total_bytes, lambda: content.set_exception(_stalled())
            ):
                body = await self._read(request, limit, too_large)
            if said is None:
                budget.release(reserved - len(body))
                reserved = len(body)
            if not is_gzip:
                yield body
                return
            inflated_bytes = min(_said_size(body), self.limit)
            await self._acquire(self.plain, inflated_bytes, deadline_s)
            try:
                inflated = _inflate(
                    body,
                    inflated_bytes,
                    too_large if inflated_bytes == self.limit else _bad_gzip("more than it says"),
                )
                del body
                budget.release(reserved)
                reserved = 0
                yield inflated
            finally:
                self.plain.release(inflated_bytes)
        finally:
            budget.release(reserved)

    async def _acquire(self, budget: Budget, count: int, deadline_s: float) -> None:
        if budget.acquire_now(count):
            return
        left = max(0.0, deadline_s - time.monotonic())
        try:
            await asyncio.wait_for(budget.acquire(count), left)
        except asyncio.TimeoutError:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"body: expected room for {count} bytes in time, but the bodies that wait for the "
                f"bus have all {budget.total}; nothing was lost: send it again",
                close=True,
            ) from None

    async def _read(
        self, request: web.BaseRequest, limit: int, too_large: Refusal
    ) -> bytes | bytearray:
        seconds = settings.BODY_S * (1 + (request.content_length or limit) / settings.SLOW_BYTES)
        answer_expectation(request)
        try:
            return await asyncio.wait_for(self._collect(request, limit, too_large), seconds)
        except asyncio.TimeoutError:
            raise Refusal(
                HTTPStatus.REQUEST_TIMEOUT,
                f"body: expected all of it within {seconds:g} s; send it faster, or in parts",
                close=True,
            ) from None

    async def _collect(
        self, request: web.BaseRequest, limit: int, too_large: Refusal
    ) -> bytes | bytearray:
        content = request.content
        part = await content.readany()
        if len(part) == request.content_length:
            return part
        # In place: a join of pieces would double the counted memory.
        body = bytearray(request.content_length or 0)
        total = 0
        while part:
            body[total : total + len(part)] = part
            total += len(part)
            if total > limit:
                raise too_large
            part = await content.readany()
        return body


def _stalled() -> Refusal:
    return Refusal(
        HTTPStatus.REQUEST_TIMEOUT,
        f"body: expected {settings.SLOWEST_BYTES_PER_S} bytes a second of it while others wait for "
        "room, got fewer; send it again",
        close=True,
    )


def _said_size(body: bytes | bytearray) -> int:
    """Return the inflated size claimed by a gzip stream's last member."""
    if len(body) < _SHORTEST or body[:2] != b"\x1f\x8b":
        raise _bad_gzip("a body that is no gzip stream")
    return int.from_bytes(body[-_SIZE_BYTES:], "little")


def _bad_gzip(got: str) -> Refusal:
    return Refusal(
        HTTPStatus.BAD_REQUEST,
        f"Invalid gzip payload: expected one whole gzip stream, got {got}; compress it again, or "
        "leave Content-Encoding out",
    )


def _inflate(body: bytes | bytearray, limit: int, too_large: Refusal) -> bytes:
    """Return the content of a single-member gzip stream, at most `limit` bytes."""
    stream = isal_zlib.decompressobj(wbits=_GZIP)
    try:
        found: bytes = stream.decompress(body, limit + 1)
    except (_ISAL_ERROR, EOFError, OSError) as error:
        raise _bad_gzip(f"damaged bytes ({error})") from error
    if len(found) > limit:
        # A bomb, or the first of several members.
        raise too_large
    if not stream.eof:
        raise _bad_gzip("one that ends too early")
    if stream.unused_data:
        raise _bad_gzip("bytes after its end")
    return found
