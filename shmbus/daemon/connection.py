"""The server's end of one client's socket: frames in, replies out, and limits on both.

Invariants:

- A client that is malformed, silent, slow or too eager costs its own connection, and nobody else
  anything: what it sends is bounded by a frame, what it does not read by MAX_UNSENT_BYTES.
- Nothing is read from a client that does not read what it was sent, nor for a moment from one that
  has just said something and still has plenty in hand.
- What a client said before it was gone is done before its session ends, unless it broke a rule.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Protocol, cast

from shmbus import errors, limits
from shmbus.control import messages, socket_path
from shmbus.daemon.leases import Session
from shmbus.daemon.service import Service

__all__ = ["Connection"]

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What a connection needs of its server."""

    service: Service
    connections: set[Connection]

    def guard(self, work: Callable[[], None]) -> None: ...
    def changed(self) -> None: ...
    def snapshot(self, session: Session, request: messages.TakeSnapshot) -> None: ...


class Connection(asyncio.Protocol):
    """One client, from its Hello to its end."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._frames = messages.FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._left_orderly = False
        self._refused = False
        self._choked = False
        self._resting = False
        self._fd = -1
        self._inode = 0
        self._hello_timer: asyncio.TimerHandle | None = None
        self._peer_pid = 0

    # -- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Check who it is; it has HELLO_WAIT_S for its Hello."""
        self._transport = cast(asyncio.Transport, transport)
        connection = cast(socket.socket, transport.get_extra_info("socket"))
        self._fd = connection.fileno()
        self._inode = os.fstat(self._fd).st_ino
        name = self._server.service.collector.segment.name
        self._server.connections.add(self)
        try:
            self._peer_pid = socket_path.check_peer(name, connection)
        except PermissionError as error:
            logger.warning("refused a connection: %s", error)
            self._transport.abort()
            return
        if len(self._server.connections) > 2 * limits.MAX_CLIENTS:
            self.refuse("busy", f"bus {name!r}: too many connections; close some")
            return
        self._transport.set_write_buffer_limits(high=limits.MAX_UNSENT_BYTES // 2)
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(limits.HELLO_WAIT_S, self._say_hello_or_go)

    def data_received(self, data: bytes) -> None:
        """Do what it asks; what is no request ends the connection with a reason."""
        try:
            for body in self._frames.feed(data):
                if self._transport is None or self._transport.is_closing():
                    return
                self._receive(messages.decode_request(body))
        except errors.ProtocolError as error:
            self.refuse("protocol", str(error))
        self._server.changed()
        self._rest()

    def _rest(self) -> None:
        """Let what a busy client says gather, so that not each acknowledgement is a wake-up."""
        if self._session is not None and len(self._session.leases) >= limits.PLENTY_GROUPS:
            self._resting = True
            self._read_or_not()
            asyncio.get_running_loop().call_later(limits.LISTEN_REST_S, self._end_rest)

    def _end_rest(self) -> None:
        self._resting = False
        self._read_or_not()

    def pause_writing(self) -> None:
        """Stop reading from one that does not read."""
        self._choked = True
        self._read_or_not()

    def resume_writing(self) -> None:
        """Go on with one that reads again."""
        self._choked = False
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._choked or self._resting:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """Let the service know: what it held is for others."""
        if self._session is not None and not self._left_orderly and not self._refused:
            self._hear_out()
        self._transport = None
        self._server.connections.discard(self)
        self._cancel_timer()
        session, self._session = self._session, None
        if session is not None:
            logger.log(
                _level(session),
                "client left",
                extra={"client": session.client, "pid": session.pid, "orderly": self._left_orderly},
            )
            self._server.guard(
                lambda: self._server.service.leave(session, orderly=self._left_orderly)
            )
        self._server.changed()

    def _hear_out(self) -> None:
        """Read what is left: an answer that could not be written ends the transport before that.

        The transport closes its descriptor after `connection_lost`; the inode makes sure of it. No
        more than a socket holds, since one that only stopped reading may go on for ever.
        """
        with contextlib.suppress(OSError, errors.ProtocolError):
            left = limits.MAX_MESSAGE_BYTES
            while left > 0 and os.fstat(self._fd).st_ino == self._inode:
                data = os.read(self._fd, left)
                if not data:
                    return
                left -= len(data)
                for body in self._frames.feed(data):
                    self._receive(messages.decode_request(body))

    # -- messages -------------------------------------------------------------------------------

    def _receive(self, request: messages.Request) -> None:
        session = self._session
        if isinstance(request, messages.Bye):
            self._left_orderly = True
            if self._transport is not None:
                self._transport.close()
        elif session is None:
            if not isinstance(request, messages.Hello):
                raise errors.ProtocolError(
                    f"expected Hello as the first message, got {type(request).__name__}"
                )
            self._greet(request)
        elif isinstance(request, messages.TakeSnapshot):
            self._server.snapshot(session, request)
        else:
            self._server.guard(lambda: self._server.service.handle(session, request))

    def _greet(self, hello: messages.Hello) -> None:
        self._cancel_timer()
        service = self._server.service
        found = service.hello(hello, self.send)
        if isinstance(found, messages.Refused):
            self.refuse(found.kind, found.message)
            return
        self._session = found
        self.send(
            messages.Welcome(
                version=messages.VERSION,
                client=found.client,
                pid=self._peer_pid,
                policy=dict(service.policy),
            )
        )
        logger.log(
            _level(found),
            "client came",
            extra={"client": found.client, "pid": found.pid, "label": found.label,
                   "rank": found.rank},
        )  # fmt: skip

    def send(self, reply: messages.Reply) -> None:
        """Queue a reply; a client that lets them pile up is closed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(messages.frame(reply))
        if transport.get_write_buffer_size() > limits.MAX_UNSENT_BYTES:
            logger.warning("closed a client that does not read", extra={"pid": self._peer_pid})
            self._refused = True
            transport.abort()

    def refuse(self, kind: str, message: str) -> None:
        """Say why, and close."""
        self._refused = True
        logger.warning("refused a client: %s", message, extra={"pid": self._peer_pid})
        self.send(messages.Refused(kind=kind, message=message))  # type: ignore[arg-type]
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        """End it, after what is queued."""
        if self._transport is not None:
            self._transport.close()

    def _say_hello_or_go(self) -> None:
        if self._session is None:
            self.refuse("protocol", f"no Hello within {limits.HELLO_WAIT_S:g} s")

    def _cancel_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None


def _level(session: Session) -> int:
    """`status` and `top` come once a second, which is no news."""
    return logging.DEBUG if session.observer else logging.INFO
