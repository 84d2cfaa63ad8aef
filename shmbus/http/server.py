"""aiohttp's server, with limits on clients' use of it, and delivery reports of answers.

Invariants:

- A client has `idle_s` to send the head of a request, and as long to read an answer; then its
  connection ends. While a request is handled, its connection is left alone.
- At most `max_connections` are open, fewer if this process may not open as many files: a new
  connection ends the connection with the longest idle client, or itself while every connection is
  being answered.
- A followed answer ends once: delivered or lost. Delivered: written whole, and then the client
  asked again or closed in order. Lost: the connection ended earlier or was reset; the kernel resets
  the connection of a client that dies without reading. If the server ends first, the fate stays
  unknown; a followed answer with `Connection: close` therefore ends with a half close by the
  server.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import socket
import sys
import termios
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

from shmbus._version import VERSION
from shmbus.http.access import Refusal

#: Open files reserved for uses besides connections.
_OTHER_FILES: Final = 64
#: Seconds for a client to close a connection after the last answer.
_CLOSE_S: Final = 2.0
#: This program's name in answers.
SERVER: Final = f"shmbus/{VERSION}"
#: aiohttp's messages about invalid HTTP.
http_logger = logging.getLogger("shmbus.http")


class AddressError(RuntimeError):
    """The address is not available; no client was served."""


class _Answer:
    """An answer without a known delivery."""

    def __init__(self, on_end: Callable[[bool], None]) -> None:
        self._on_end = on_end
        self.delivered: bool | None = None

    def end(self, delivered: bool) -> None:
        if self.delivered is None:
            self.delivered = delivered
            self._on_end(delivered)


class Connection(web.RequestHandler):
    """A client's connection, with the delivery of its answers."""

    def __init__(self, server: HttpServer, inner: web.Server, **options: Any) -> None:
        super().__init__(inner, loop=asyncio.get_running_loop(), **options)
        self._server = server
        #: The library forgets the transport on close, while a client may not read the rest.
        self._wire: asyncio.WriteTransport | None = None
        #: True if every written byte left this process.
        self._flushed = True
        self._answers: list[_Answer] = []
        self._ends_after_answer = self._half_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; make writers wait until every byte left this process."""
        self._wire = cast("asyncio.WriteTransport", transport)
        self._wire.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        self._server.admit(self)

    def data_received(self, data: bytes) -> None:
        """Forward the data; a client that sends again received its answers."""
        if data and self._flushed:
            self._settle(True)
        super().data_received(data)

    def pause_writing(self) -> None:
        """Note unwritten data."""
        self._flushed = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that every byte was written."""
        self._flushed = True
        super().resume_writing()

    def eof_received(self) -> None:
        """Note a client's close before its answer; a reset after it stays the socket's error."""
        wire = None if self._wire is None else self._wire.get_extra_info("socket")
        if wire is not None and (
            wire.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            # The server's own end counts as a byte.
            or _unacknowledged(wire.fileno()) > self._half_closed
        ):
            self._flushed = False
        super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End: answers not written whole, or reset, are lost."""
        self._wire = None
        self._settle(exc is None and self._flushed)
        self._server.forget(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Refuse bytes that are no HTTP, with a line at level info: clients decide their number."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        why = str(exc.message).partition("\n")[0].removesuffix(":")
        http_logger.info("no HTTP: %r", why[:200])
        response = self._server.refuse(f"expected a request of HTTP/1.1, got other bytes: {why}")
        response.headers["Server"] = SERVER
        response.force_close()
        return response

    def _settle(self, delivered: bool) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer.end(delivered)

    @property
    def alive(self) -> bool:
        """True while the client can still be answered."""
        return self._wire is not None and not self._wire.is_closing()

    def abort(self) -> None:
        """End the connection now."""
        self._flushed = False
        if self._wire is not None:
            self._wire.abort()

    def end(self) -> None:
        """End the connection with the server: the last answer's delivery stays unknown."""
        if self._flushed:
            self._answers.clear()
        self.abort()

    async def deliver(
        self,
        request: web.BaseRequest,
        response: web.Response,
        on_end: Callable[[bool], None],
        seconds: float,
    ) -> web.Response:
        """Write an answer, and wait until every byte left this process; return the answer.

        `on_end` is called once with the delivery, before this returns or long after.
        ConnectionResetError if the client is gone, or reads nothing for `seconds`.
        """
        timer = asyncio.get_running_loop().call_later(seconds, self.abort)
        answer = _Answer(on_end)
        try:
            await self.prepare(request, response)
            self._answers.append(answer)
            await self.finish(response)
        except BaseException:
            if not answer.delivered:
                if answer in self._answers:
                    self._answers.remove(answer)
                answer.end(False)
                raise
        finally:
            timer.cancel()
        if answer.delivered is False:
            raise ConnectionResetError("the client went while it was answered")
        return response

    async def prepare(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Send the head of a followed answer; ConnectionResetError without a client."""
        if not self.alive:
            raise ConnectionResetError("the client has gone")
        if not request.keep_alive and request.version >= HttpVersion11:
            response.headers["Connection"] = "close"
            # An early close by the library would hide a reset.
            response._keep_alive = self._ends_after_answer = True
        response.headers["Server"] = SERVER
        await response.prepare(request)

    def follow(self, on_end: Callable[[bool], None]) -> None:
        """Call `on_end` once: True after the delivery of every byte written so far."""
        if not self.alive:
            on_end(False)
            raise ConnectionResetError("the client has gone")
        self._answers.append(_Answer(on_end))

    async def finish(self, response: web.StreamResponse, last: bytes = b"") -> None:
        """Send the last bytes and the end of a followed answer, and wait for the flush."""
        await response.write_eof(last)
        if self._ends_after_answer and self._wire is not None and self.alive:
            self._half_closed = True
            self._wire.write_eof()
            asyncio.get_running_loop().call_later(_CLOSE_S, self._wire.close)


def _unacknowledged(fd: int) -> int:
    """Return the number of sent bytes without acknowledgement of the client's kernel."""
    found = fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(found, sys.byteorder)


class HttpServer:
    """Answers at an address; a client may keep it waiting for `idle_s` seconds.

    About `read_ahead` bytes of a body are read before the first read by a route. With
    `ends_with_client` an answer is cancelled after its client leaves.
    """

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        max_connections: int,
        idle_s: float,
        header_bytes: int = 16 << 10,
        read_ahead: int = 16 << 10,
        ends_with_client: bool = False,
        refuse: Callable[[str], web.Response] = lambda why: web.Response(status=400, text=why),
    ) -> None:
        self._answer = answer
        #: Makes the answer to bytes that are no HTTP, of a sentence.
        self.refuse = refuse
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = max(1, min(max_connections, files - _OTHER_FILES))
        self._idle_s = idle_s
        self._inner = web.Server(self._handle, handler_cancellation=ends_with_client)
        self._options = {
            "logger": http_logger,
            "access_log": None,
            "auto_decompress": False,
            "max_line_size": header_bytes,
            "max_field_size": header_bytes,
            "read_bufsize": read_ahead,
            "lingering_time": 0.0,
        }
        self._open: set[Connection] = set()
        #: Connections waiting for their client, with the start of the wait; the oldest first.
        self._waiting: dict[Connection, float] = {}
        self._listener: asyncio.AbstractServer | None = None
        self._sweeping: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    # -- life -----------------------------------------------------------------------------------

    async def bind(self, host: str, port: int) -> tuple[str, int]:
        """Bind the address without answering yet; return the address."""
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: Connection(self, self._inner, **self._options),
                host, port, backlog=min(self._max_connections, 1024), start_serving=False,
            )  # fmt: skip
        except (OSError, OverflowError, UnicodeError) as error:  # the last: an impossible name
            raise AddressError(
                f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}; "
                "expected an address of this machine and a free port; choose another, or port 0 "
                "for any"
            ) from error
        address = self._listener.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def start(self) -> None:
        """Answer, from now on."""
        assert self._listener is not None
        await self._listener.start_serving()
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def close(self) -> None:
        """Stop listening, and end every connection."""
        if self._listener is not None:
            self._listener.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._open):
            connection.end()
        # A turn of the loop for them to end.
        await asyncio.sleep(0)
        await self._inner.shutdown(timeout=1.0)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(2.0, self._idle_s / 4))
            before_s = time.monotonic() - self._idle_s
            for connection, since_s in list(self._waiting.items()):
                if since_s > before_s:
                    break
                connection.abort()

    # -- connections ----------------------------------------------------------------------------

    def admit(self, connection: Connection) -> None:
        """Make room for a connection, or end it while every connection is being answered."""
        if len(self._open) >= self._max_connections:
            oldest = next(iter(self._waiting), connection)
            self.forget(oldest)
            oldest.abort()
            if oldest is connection:
                return
        self._open.add(connection)
        self._waiting[connection] = time.monotonic()

    def forget(self, connection: Connection) -> None:
        """Note the end of a connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = connection_of(request)
        self._waiting.pop(connection, None)
        try:
            response = await self._answer(request)
            if not response.prepared:
                response.headers["Server"] = SERVER
            return response
        finally:
            if connection in self._open:
                self._waiting[connection] = time.monotonic()


def url_of(host: str, port: int) -> str:
    """Return the URL of a server at this address."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def connection_of(request: web.BaseRequest) -> Connection:
    """Return the connection of a request."""
    connection = request.protocol
    assert isinstance(connection, Connection)
    return connection


def answer_expectation(request: web.BaseRequest) -> None:
    """Send 100 Continue to a client waiting with its body."""
    expected = request.headers.get("Expect", "")
    if not expected:
        return
    if expected.lower() != "100-continue":
        raise Refusal(
            HTTPStatus.EXPECTATION_FAILED,
            f"Expect: expected 100-continue or nothing, got {expected[:80]}",
            close=True,
        )
    if request.transport is not None and request.version >= HttpVersion11:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
