"""A client's connection: what it was answered, and whether that reached it.

It stands between the transport and aiohttp's parser. Polls it answers itself, and large bodies it
receives itself where nothing of the request before them is left; where their head is known too, the
parser sees nothing of them. Everything else it passes on.

Invariants:

- Requests are answered in their order: what comes behind one whose head is known waits for its
  answer, a piece of it at the most.
- An answer that somebody tracks ends once: delivered, or lost. It is delivered when all of it was
  written, and the client then asked again or closed in order; it is lost when the connection ended
  before that, or was reset, as the kernel does for a client that dies without reading.
- A connection without a request ends after IDLE_S, one that does not read an answer after ANSWER_S.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from aiohttp import web

from shmbus.gateway import settings
from shmbus.gateway.heads import (
    Heads,
    KnownHead,
    KnownRequest,
    Request,
    is_plain,
    split_head,
    wire_head,
)
from shmbus.gateway.incoming import Incoming

__all__ = ["Connection", "Connections", "connection_of"]


#: Sends the last byte of an answer over a socket; False where that has no room now.
Finish = Callable[[int, bytes], bool]

#: Seconds between two tries of it: a slow client makes room a packet at a time.
_ROOM_S: Final = 0.005


class Polls(Protocol):
    """Requests that are answered by their bytes alone."""

    def answer(self, received: bytes) -> tuple[bytes, bool] | None:
        """Return the answer, and whether the connection stays; None to any other request."""

    def note_kept(self, received: bytes) -> None:
        """Note that a client asked more over a connection that began with this."""

    def note_ended(self, received: bytes) -> None:
        """Note that a client ended a connection after the answer to this."""


def _body_of(response: web.Response) -> bytes:
    body = response.body
    assert isinstance(body, bytes) and body
    return body


class _Answer:
    """An answer of which it is not known yet whether it was delivered."""

    def __init__(self, on_end: Callable[[bool], None] | None) -> None:
        self._on_end = on_end
        #: Whether all of it is the transport's, or has left.
        self.whole = False
        self.delivered: bool | None = None

    def end(self, delivered: bool) -> None:
        if self.delivered is None:
            self.delivered = delivered
            if self._on_end is not None:
                self._on_end(delivered)


class Connection(asyncio.BufferedProtocol):
    """One client.

    Parameters
    ----------
    connections : Connections
        All of them.
    first : bytes
        What was read of it already.
    """

    def __init__(self, connections: Connections, first: bytes) -> None:
        self._connections = connections
        self._first = first
        #: aiohttp's protocol, once something came that is no poll.
        self._inner: Any = None
        #: All that came over this connection, while that is one piece.
        self.received = b""
        #: How many pieces came, and the poll that is all of them.
        self._pieces = 0
        self._only_poll: bytes | None = None
        self._transport: asyncio.Transport | None = None
        #: Set while the transport has room, so that what was written has left this process.
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._answers: list[_Answer] = []
        #: Whether what comes is in the budget, so that it may come in large pieces.
        self.admitted = False
        #: The body of the request that is answered, where it is received here.
        self.incoming: Incoming | None = None
        #: Its head, while it has the library's answer only: known once that is 200.
        self.plain_head: bytes | None = None
        #: Whether a request with a known head is answered, and what came behind it meanwhile.
        self._answering = False
        self._behind = bytearray()
        #: Whether all that came was requests whose ends are known, each answered by now.
        self._between = True
        self.busy = 0
        self.idle_since_s = time.monotonic()

    # -- what the transport calls ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, and have the transport tell when its buffer is empty."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._connections.admit(self)
        first, self._first = self._first, b""
        if first and not transport.is_closing():
            self.data_received(first)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go: their place, or of any connection, copied out at once."""
        if self.incoming is not None and (rest := self.incoming.rest) is not None:
            return rest
        return self._connections.large if self.admitted else self._connections.small

    def buffer_updated(self, nbytes: int) -> None:
        """Take what came."""
        if self.incoming is not None and self.incoming.rest is not None:
            self.incoming.advance(nbytes)
        else:
            self.data_received(bytes(self.get_buffer(0)[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Pass it on; a client that sends again has had its answers."""
        if self._answers and self._flushed.is_set():
            self._settle(True)
        self._pieces += 1
        if self._only_poll is not None:
            self._connections.polls.note_kept(self._only_poll)
            self._only_poll = None
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        if self.incoming is not None and not self.incoming.is_whole:
            data = self.incoming.keep(data)
            if not data:
                return
        if self._answering:
            self._keep_behind(data)
            return
        begins = self._between and self.incoming is None
        split = split_head(data) if begins and self._transport is not None else None
        if self._inner is None:
            if self._flushed.is_set() and (found := self._connections.polls.answer(data)):
                self.note_poll(data)
                self._answer_poll(*found)
                return
            if split is not None and (known := self._connections.heads.find(split.head)):
                self._begin_known(known, split.behind, split.length)
                return
            self._inner = self._connections.make_inner()
            self._inner.connection_made(self._transport)
            self.received = data
        else:
            self.received = b""
        if split is not None and self._transport is not None and is_plain(split.head):
            data = self.plain_head = split.head
            self.incoming = Incoming(self._transport, split.behind, split.length)
        else:
            # From here on only the library knows where a request ends.
            self._between = False
        self._inner.data_received(data)

    def _begin_known(self, head: KnownHead, first: bytes, length: int) -> None:
        assert self._transport is not None
        self._answering = True
        self.incoming = Incoming(self._transport, first, length)
        self._connections.answer_known(self, KnownRequest(head, self._transport))

    def _keep_behind(self, data: bytes) -> None:
        self._behind += data
        if self._transport is not None and len(self._behind) >= settings.SMALL_PIECE_BYTES:
            self._transport.pause_reading()

    def _answer_poll(self, answer: bytes, stays: bool) -> None:
        transport = self._transport
        if transport is not None:
            transport.write(answer)
            if stays:
                self._connections.touch(self)
            else:
                transport.close()

    def eof_received(self) -> bool | None:
        """Pass it on."""
        if self.incoming is not None and not self.incoming.is_whole:
            self.incoming.fail(ConnectionResetError("the client ended its body early"))
        return None if self._inner is None else cast("bool | None", self._inner.eof_received())

    def connection_lost(self, exc: BaseException | None) -> None:
        """End: what was not written whole, or was reset, is lost."""
        transport = self._transport
        self._transport = None
        if self._only_poll is not None:
            self._connections.polls.note_ended(self._only_poll)
        self._settle(exc is None and transport is not None and self._flushed.is_set())
        self._flushed.set()
        self._connections.forget(self)
        if self.incoming is not None:
            self.incoming.fail(ConnectionResetError("the client went"))
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that something is not written yet."""
        self._flushed.clear()
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Note that everything is."""
        self._flushed.set()
        if self._inner is not None:
            self._inner.resume_writing()

    # -- what the routes call -------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the client can still be answered."""
        return self._transport is not None and not self._transport.is_closing()

    def note_poll(self, received: bytes) -> None:
        """Note that this was answered, so that what the client does next says how it polls."""
        if self._pieces == 1:
            self._only_poll = received

    def end_request(self) -> bool:
        """Note that a request was answered; returns whether another one can follow it."""
        incoming, self.incoming = self.incoming, None
        self.plain_head = None
        return incoming is None or incoming.is_whole

    def end_known(self, stays: bool) -> None:
        """Note that a request with a known head was answered; take what came behind it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not stays:
            # What is written still leaves.
            transport.close()
            return
        self._answering = False
        behind, self._behind = bytes(self._behind), bytearray()
        if len(behind) >= settings.SMALL_PIECE_BYTES:
            transport.resume_reading()
        if behind:
            self._pass_on(behind)

    def abort(self) -> None:
        """End the connection now."""
        if self._transport is not None:
            self._transport.abort()

    async def send(
        self,
        request: Request,
        response: web.Response,
        on_end: Callable[[bool], None] | None = None,
        finish: Finish | None = None,
    ) -> web.StreamResponse:
        """Write an answer, and wait until all of it has left this process; returns it.

        `on_end` is called once, with whether it was delivered: maybe before this returns, maybe
        long after. `finish` sends the last byte, once all others have left, and notes that in the
        same instant.

        Raises
        ------
        ConnectionResetError
            The client has gone, or does not read. `on_end` was called with False.
        """
        answer = _Answer(on_end)
        sent: web.StreamResponse = response
        try:
            if not self.alive:
                raise ConnectionResetError("the client has gone")
            if isinstance(request, KnownRequest):
                answer.whole = True
                self._answers.append(answer)
                await self._write_known(request, response)
                return self._unless_lost(answer, response)
            if finish is not None:
                sent = web.StreamResponse(status=response.status, headers=response.headers)
                sent.content_length = len(_body_of(response))
            await sent.prepare(request)
            # From here on, all of the body is the transport's before anything else happens.
            answer.whole = finish is None
            self._answers.append(answer)
            if finish is None:
                await sent.write_eof()
                if not self._flushed.is_set():
                    await asyncio.wait_for(self._flushed.wait(), settings.ANSWER_S)
            else:
                writing = self._write(answer, _body_of(response), sent, finish)
                await asyncio.wait_for(writing, settings.ANSWER_S)
        except BaseException as error:
            if answer.delivered:
                return sent
            if answer in self._answers:
                self._answers.remove(answer)
            answer.end(False)
            if isinstance(error, asyncio.TimeoutError):
                self.abort()
                raise ConnectionResetError(
                    f"the client read nothing for {settings.ANSWER_S:g} s"
                ) from error
            raise
        return self._unless_lost(answer, sent)

    def _unless_lost(self, answer: _Answer, sent: web.StreamResponse) -> web.StreamResponse:
        if answer.delivered is False:
            raise ConnectionResetError("the client went while it was answered")
        return sent

    async def _write_known(self, request: KnownRequest, response: web.Response) -> None:
        assert self._transport is not None
        request.answered = True
        stays = request.head.keep_alive and response.keep_alive is not False
        self._transport.write(wire_head(response, stays) + _body_of(response))
        if not self._flushed.is_set():
            await asyncio.wait_for(self._flushed.wait(), settings.ANSWER_S)

    async def _write(
        self,
        answer: _Answer,
        body: bytes,
        sent: web.StreamResponse,
        finish: Finish,
    ) -> None:
        await sent.write(body[:-1])
        await self._flushed.wait()
        # Past the transport, whose buffer is empty.
        while not finish(self._socket(), body[-1:]):
            await asyncio.sleep(_ROOM_S)
        answer.whole = True
        await sent.write_eof()

    def _socket(self) -> int:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client went while it was answered")
        return cast(int, transport.get_extra_info("socket").fileno())

    def _settle(self, delivered: bool) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer.end(delivered and answer.whole)


class Connections:
    """All connections, and their limit.

    Parameters
    ----------
    make_inner : callable
        Makes the protocol of aiohttp for one connection.
    polls : Polls
        Known requests, which are answered without it.
    answer_known : callable
        Begins the answer to a request whose head is known.
    """

    def __init__(
        self,
        make_inner: Callable[[], Any],
        polls: Polls,
        answer_known: Callable[[Connection, KnownRequest], None],
    ) -> None:
        self.make_inner = make_inner
        self.polls = polls
        self.answer_known = answer_known
        self.heads = Heads()
        self.large = memoryview(bytearray(settings.LARGE_PIECE_BYTES))
        self.small = self.large[: settings.SMALL_PIECE_BYTES]
        self._all: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def make(self, first: bytes) -> Connection:
        """Return the protocol of a new connection, of which this was read already."""
        return Connection(self, first)

    def admit(self, connection: Connection) -> None:
        """Make room for a connection: the one that is idle longest ends, or the new one."""
        if len(self._all) >= settings.MAX_CONNECTIONS:
            next((each for each in self._all if not each.busy), connection).abort()
        self._all[connection] = None

    def forget(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._all.pop(connection, None)

    def touch(self, connection: Connection) -> None:
        """Note that a request has ended; the order is that of the last requests."""
        connection.idle_since_s = time.monotonic()
        if self._all.pop(connection, connection) is None:
            self._all[connection] = None

    def end_idle(self) -> None:
        """End connections that have had no request for IDLE_S."""
        before = time.monotonic() - settings.IDLE_S
        for connection in list(self._all):
            if not connection.busy and connection.idle_since_s < before:
                connection.abort()

    async def close(self) -> None:
        """End all of them."""
        for connection in list(self._all):
            connection.abort()
        # One turn of the loop, in which they end.
        await asyncio.sleep(0)


def connection_of(request: Request) -> Connection:
    """Return the connection of a request.

    Raises
    ------
    ConnectionResetError
        It has ended.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has gone")
    return cast(Connection, transport.get_protocol())
