"""A small HTTP server for a few trusted readers, which nobody else can keep from being answered.

It knows GET and HEAD of what `answer` knows, one request a connection. It runs an event loop in a
thread of its own; `answer` may block, and is called in one of MAX_THREADS others.

Invariants:

- A connection has REQUEST_S from its beginning to send a whole request, and as long to read
  the answer, however it spreads its bytes.
- At most MAX_CONNECTIONS are open. A new one ends the oldest that has not sent its request, or
  has not read its answer; one that is being answered is left alone.
- Bound to loopback, it answers loopback names only, so that no web page reads it by way of a name
  of its own that resolves to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from shmbus._version import VERSION

__all__ = ["Answer", "HttpServer"]

#: Seconds that a client has for its whole request, and again to read the answer: a scrape over
#: loopback takes milliseconds.
REQUEST_S = 5.0
#: Bytes of a request: browsers send some hundred, Prometheus fewer.
MAX_REQUEST_BYTES = 16 << 10
#: Requests that are answered at the same time; others wait.
MAX_THREADS = 8
#: Connections at a time; a new one ends the oldest that is slow. Few beside the 1,024 open files
#: that a process has by default.
MAX_CONNECTIONS = 128


class Answer(NamedTuple):
    """What a request is answered."""

    status: HTTPStatus
    content_type: str
    body: bytes


def _text(status: HTTPStatus, message: str) -> Answer:
    return Answer(status, "text/plain; charset=utf-8", f"{message}\n".encode())


class _Request(NamedTuple):
    method: str
    path: str
    hosts: list[str]
    accept: str


def _parse(head: bytes) -> _Request | None:
    """Return the request of a head that has ended; None where it is none."""
    lines = head.decode("latin-1").replace("\r\n", "\n").split("\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/"):
        return None
    hosts, accept = [], ""
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            return None
        if name.lower() == "host":
            hosts.append(value.strip())
        elif name.lower() == "accept":
            accept = value.strip()
    try:
        target = urlsplit(words[1])
    except ValueError:
        return None
    if target.netloc:
        hosts.append(target.netloc)
    return _Request(words[0], target.path, hosts, accept)


def _is_loopback(host: str) -> bool:
    """Whether a Host names this machine's loopback interface, with or without a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Connection(asyncio.Protocol):
    """One client, one request, one answer."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._head = b""
        self._answering = False
        self._answered = False
        #: Whether it sends no more.
        self._client_done = False
        self.transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._begin_wait()
        self._server.admit(self)

    def _begin_wait(self) -> None:
        """Wait for the client, so long and no longer."""
        if self.transport is not None:
            self._timer = self._server.loop.call_later(REQUEST_S, self.transport.abort)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        if self._answering or self._answered:
            return
        self._head += data
        for end in (b"\r\n\r\n", b"\n\n"):
            head, found, _ = self._head.partition(end)
            if found:
                self._handle(_parse(head))
                return
        if len(self._head) > MAX_REQUEST_BYTES:
            self._send(_text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too long a request"))

    def eof_received(self) -> bool:
        # One that has sent its request may still wait for the answer.
        self._client_done = True
        return self._answering

    def connection_lost(self, error: Exception | None) -> None:
        self._end_wait()
        self.transport = None
        self._server.forget(self)

    def _handle(self, request: _Request | None) -> None:
        refusal = self._server.refusal(request)
        if request is None or refusal is not None:
            self._send(refusal or _text(HTTPStatus.BAD_REQUEST, "no HTTP request"))
            return
        self._answering = True
        self._end_wait()
        self._server.begin_answer(self)
        head_only = request.method == "HEAD"
        future = self._server.loop.run_in_executor(
            self._server.pool, self._server.answer, request.path, request.accept
        )
        future.add_done_callback(lambda done: self._finish(done, head_only=head_only))

    def _finish(self, done: asyncio.Future[Answer], *, head_only: bool) -> None:
        self._answering = False
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            answer = _text(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        else:
            answer = done.result()
        self._server.end_answer(self)
        self._begin_wait()
        self._send(answer, head_only=head_only)

    def _send(self, answer: Answer, *, head_only: bool = False) -> None:
        """Send the answer; the client closes, or the time is over."""
        self._answered = True
        if self.transport is None or self.transport.is_closing():
            return
        head = (
            f"HTTP/1.0 {answer.status.value} {answer.status.phrase}\r\n"
            f"Server: shmbus/{VERSION}\r\n"
            f"Date: {email.utils.formatdate(usegmt=True)}\r\n"
            f"Content-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + (b"" if head_only else answer.body))
        if self._client_done:
            self.transport.close()
            return
        # Not closed: input that is unread would have the kernel throw the answer away.
        with contextlib.suppress(OSError):
            self.transport.write_eof()


class HttpServer:
    """Serves from a thread of its own.

    Parameters
    ----------
    listener : socket
        Bound, and listening.
    answer : callable
        Called with the path and the Accept header; may block.
    on_failure : callable, optional
        Called with the exception that ended the server.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[str, str], Answer],
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.answer = answer
        self.loop = asyncio.new_event_loop()
        self.pool = ThreadPoolExecutor(MAX_THREADS, "shmbus-metrics-answer")
        self._listener = listener
        self._address = str(listener.getsockname()[0])
        self._on_failure = on_failure
        self._connections: set[_Connection] = set()
        #: Those that wait for their client, oldest first.
        self._waiting: dict[_Connection, None] = {}
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="shmbus-metrics", daemon=True)
        self._thread.start()

    # -- connections ----------------------------------------------------------------------------

    def admit(self, connection: _Connection) -> None:
        """Make room for a connection, or end it where all others are being answered."""
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._waiting), connection)
            self.forget(oldest)
            if oldest.transport is not None:
                oldest.transport.abort()
            if oldest is connection:
                return
        self._connections.add(connection)
        self._waiting[connection] = None

    def begin_answer(self, connection: _Connection) -> None:
        """Note that a connection waits for us."""
        self._waiting.pop(connection, None)

    def end_answer(self, connection: _Connection) -> None:
        """Note that it waits for its client again."""
        if connection in self._connections:
            self._waiting[connection] = None

    def forget(self, connection: _Connection) -> None:
        """Note that a connection has ended."""
        self._connections.discard(connection)
        self._waiting.pop(connection, None)

    def refusal(self, request: _Request | None) -> Answer | None:
        """Return the answer to a request that is not passed on; None for one that is."""
        if request is None or len(set(request.hosts)) > 1:
            return _text(HTTPStatus.BAD_REQUEST, "expected one HTTP request for one host")
        if request.method not in ("GET", "HEAD"):
            return _text(HTTPStatus.NOT_IMPLEMENTED, "expected GET or HEAD")
        if not ipaddress.ip_address(self._address).is_loopback:
            return None
        for host in request.hosts:
            if not _is_loopback(host):
                return _text(
                    HTTPStatus.FORBIDDEN,
                    f"bound to {self._address}, this server answers loopback names only; expected "
                    f"Host: {self._address} or localhost; ask for that, or bind another address "
                    "(--metrics-host)",
                )
        return None

    # -- life -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except Exception as error:
            if self._on_failure is None:
                raise
            self._on_failure(error)
        finally:
            self.loop.close()

    async def _serve(self) -> None:
        server = await self.loop.create_server(
            lambda: _Connection(self), sock=self._listener, backlog=MAX_CONNECTIONS
        )
        await self._stop.wait()
        server.close()
        for connection in list(self._connections):
            if connection.transport is not None:
                connection.transport.abort()
        # One turn of the loop, in which they end.
        await asyncio.sleep(0)

    def close(self) -> None:
        """Stop listening, and end all connections."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.pool.shutdown(cancel_futures=True)
