"""The server's end of a client's socket: frames in, replies out, and limits on both.

Invariants:

- A malformed, silent, slow or overeager client loses only its own connection: its input is bounded
  by a frame, its unread replies by MAX_UNSENT_BYTES and one reply.
- The loop's thread calls everything here except `send`, also called by the ring's thread. Both hold
  the server's lock.
- Bytes leave in the order of the sends: no write passes bytes still in the transport.
- The server stops reading from a client with unread replies, and for LISTEN_REST_S from a client
  that just sent and holds many groups.
- Requests sent by a client before its death are handled before its session ends, unless it broke
  the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from shmbus import errors
from shmbus.base import limits
from shmbus.base.throttle import LimitedLog
from shmbus.control import messages, socket_path
from shmbus.daemon.leases import Session
from shmbus.daemon.service import Service

__all__ = ["Connection", "Replies"]

logger = logging.getLogger(__name__)

#: Seconds without reads from a client that just sent and holds many groups: its acknowledgements
#: accumulate, and it needs no groups sooner.
_LISTEN_REST_S = 0.001
#: Groups that count as many.
_PLENTY_GROUPS = 16
#: Seconds until a refused client is judged again: its rival may have left, with the last message
#: unread for _LISTEN_REST_S.
_BUSY_GRACE_S = 0.02


#: Bytes queued for a client with unread replies; above, its connection is closed.
MAX_UNSENT_BYTES = 8 << 20


class Host(Protocol):
    """A connection's interface to its server."""

    service: Service
    connections: set[Connection]
    limited_log: LimitedLog
    lock: AbstractContextManager[Any]

    def guard(self, work: Callable[[], None]) -> None: ...
    def changed(self) -> None: ...
    def snapshot(self, session: Session, request: messages.TakeSnapshot) -> None: ...


class Connection(asyncio.Protocol):
    """A client's connection, from Hello to end."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._frames = messages.FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._replies: Replies | None = None
        self._session: Session | None = None
        self._left_orderly = False
        self._refused = False
        #: True on the second judgement of its Hello, after BUSY_GRACE_S.
        self._judged_again = False
        #: True while the client leaves replies unread.
        self._choked = False
        #: True during the handling of messages.
        self._handling = False
        #: True while acknowledgements gather.
        self._paused = False
        self._fd = -1
        self._inode = 0
        self._hello_timer: asyncio.TimerHandle | None = None
        self._peer_pid = 0

    # -- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Check the peer's user, and wait HELLO_WAIT_S for its Hello."""
        self._transport = cast(asyncio.Transport, transport)
        connection = cast(socket.socket, transport.get_extra_info("socket"))
        self._fd = connection.fileno()
        self._inode = os.fstat(self._fd).st_ino
        name = self._server.service.collector.segment.name
        self._server.connections.add(self)
        self._replies = Replies(self._transport, self._fd, self._server.lock, self._end_unread)
        try:
            self._peer_pid = socket_path.check_peer(name, connection)
        except PermissionError as error:
            self._warn("refused connections of other users", f"refused a connection: {error}")
            self._transport.abort()
            return
        if len(self._server.connections) > 2 * limits.MAX_CLIENTS:
            self.refuse("busy", f"bus {name!r}: too many connections; close some", "too many")
            return
        self._transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES // 2)
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(limits.HELLO_WAIT_S, self._require_hello)

    def data_received(self, data: bytes) -> None:
        """Handle requests; anything else is refused with a reason, and ends the connection."""
        with self._server.lock:
            if self._handle(data):
                self._server.changed()
                self._pause_reading()

    def _handle(self, data: bytes) -> bool:
        """Handle received data; return False for a client without a listener."""
        self._handling = True
        try:
            for body in self._frames.feed(data):
                if self._refused or self._left_orderly:
                    return False
                # Also after a failed write: a killed client's acknowledgements count.
                self._receive(messages.decode_request(body))
        except errors.ProtocolError as error:
            self.refuse("protocol", str(error))
        finally:
            self._handling = False
        return True

    def read_now(self) -> None:
        """Handle the bytes already sent by a client, ahead of its turn."""
        if self._session is None or self._handling:
            return
        for data in self._unread():
            if not self._handle(data):
                return

    def _unread(self) -> Iterator[bytes]:
        """Yield the socket's unread bytes, up to a frame: a client may write without end."""
        left = limits.MAX_MESSAGE_BYTES
        with contextlib.suppress(OSError):  # nothing more to read
            # The transport closes its descriptor after `connection_lost`; the inode proves the
            # same socket.
            while left > 0 and os.fstat(self._fd).st_ino == self._inode:
                data = os.read(self._fd, left)
                if not data:
                    return
                left -= len(data)
                yield data

    def _pause_reading(self) -> None:
        """Let the requests of a busy client gather: one wake-up for many acknowledgements."""
        if self._session is not None and len(self._session.leases) >= _PLENTY_GROUPS:
            self._paused = True
            self._update_reading()
            asyncio.get_running_loop().call_later(_LISTEN_REST_S, self._end_pause)

    def _end_pause(self) -> None:
        self._paused = False
        self._update_reading()

    def pause_writing(self) -> None:
        """Stop reading from a client with unread replies."""
        self._choked = True
        self._update_reading()

    def resume_writing(self) -> None:
        """Read again after the client read its replies."""
        self._choked = False
        self._update_reading()

    def _update_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._choked or self._paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """End the session; other clients get the groups, or they stay in doubt."""
        with self._server.lock:
            self._lose()

    def _lose(self) -> None:
        if self._session is not None and not self._left_orderly and not self._refused:
            self._handle_unread()
        self._transport = self._replies = None
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

    def _handle_unread(self) -> None:
        """Handle what the socket still holds: after a failed write the transport reads no more."""
        with contextlib.suppress(OSError, errors.ProtocolError):
            for data in self._unread():
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
            if not isinstance(request, messages.Hello) or self._judged_again:
                when = "before the answer to its Hello" if self._judged_again else "first"
                raise errors.ProtocolError(
                    f"expected Hello as the first message, got {type(request).__name__} {when}"
                )
            self._greet(request)
        elif isinstance(request, messages.TakeSnapshot):
            self._server.snapshot(session, request)
        else:
            if isinstance(request, messages.GetTrained):
                # The answer includes every message of other ranks about the step before.
                for other in [*self._server.connections]:
                    other.read_now()
            self._server.guard(lambda: self._server.service.handle(session, request))

    def _greet_again(self, hello: messages.Hello) -> None:
        with self._server.lock:
            self._greet(hello, again=True)

    def _greet(self, hello: messages.Hello, *, again: bool = False) -> None:
        self._cancel_timer()
        if self._transport is None or self._transport.is_closing():
            return
        service = self._server.service
        self._end_hung_up()
        found = service.hello(hello, self.send)
        if isinstance(found, messages.Refused):
            in_the_way = found.kind in ("busy", "value") and not hello.observer
            if in_the_way and not again and hello.client < 0:
                # The rival may have left unnoticed.
                self._judged_again = True
                asyncio.get_running_loop().call_later(_BUSY_GRACE_S, self._greet_again, hello)
                return
            self.refuse(found.kind, found.message)
            return
        self._session = found
        self.send(
            messages.Welcome(
                version=messages.VERSION,
                client=found.client,
                pid=os.getpid(),
                policy=dict(service.policy),
            )
        )
        logger.log(
            _level(found),
            "client came",
            extra={"client": found.client, "pid": found.pid, "label": found.label,
                   "rank": found.rank},
        )  # fmt: skip

    def _end_hung_up(self) -> None:
        """End sessions after a hang-up: such a client may already be back."""
        attached = {
            other._fd: other
            for other in self._server.connections
            if other._session is not None and other is not self
        }
        poll = select.poll()
        for fd in attached:
            poll.register(fd, 0)
        for fd, _ in poll.poll(0):
            attached[fd]._end_session()

    def _end_session(self) -> None:
        """End the session as if the connection was lost, before the transport tells."""
        transport = self._transport
        self.connection_lost(None)
        if transport is not None:
            transport.abort()

    def send(self, *replies: messages.Reply) -> None:
        """Send replies together; close the connection of a client with too many unread replies."""
        if self._replies is not None:
            self._replies.send(b"".join([messages.frame(reply) for reply in replies]))

    def _end_unread(self) -> None:
        """Close the connection of a client with too many unread replies."""
        if self._transport is not None:
            self._warn("clients that do not read", "closed a client that does not read")
            self._refused = True
            self._transport.abort()

    def _warn(self, cause: str, message: str) -> None:
        """Log a client's fault; clients decide the frequency, so lines of a cause are limited."""
        self._server.limited_log.warning(cause, time.monotonic(), message, pid=self._peer_pid)

    def refuse(self, kind: str, message: str, cause: str = "") -> None:
        """Send the reason, and close; the log limits lines by `cause`, or by kind."""
        self._refused = True
        self._warn(f"refused clients ({cause or kind})", f"refused a client: {message}")
        self.send(messages.Refused(kind=kind, message=message))  # type: ignore[arg-type]
        self.close()

    def close(self) -> None:
        """Close after every queued reply was written."""
        if self._replies is not None:
            self._replies.flush()
        if self._transport is not None:
            self._transport.close()

    def _require_hello(self) -> None:
        if self._session is None:
            with self._server.lock:
                what = f"no Hello within {limits.HELLO_WAIT_S:g} s"
                self.refuse("protocol", what, "no Hello")

    def _cancel_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None


def _level(session: Session) -> int:
    """Return the level to log a client at; `top` attaches once a second."""
    return logging.DEBUG if session.observer else logging.INFO


class Replies:
    """The output queue to a client."""

    def __init__(
        self,
        transport: asyncio.Transport,
        fd: int,
        lock: AbstractContextManager[Any],
        too_many: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._fd = fd
        self._lock = lock
        self._too_many = too_many
        self._loop = asyncio.get_running_loop()
        #: Bytes that the loop's thread will give to the transport.
        self._unsent = bytearray()
        #: True if the transport may hold unwritten bytes.
        self._held = False
        self._over = False

    def send(self, frame: bytes) -> None:
        """Write a frame, or as much as the socket takes; the loop writes the rest."""
        if self._over or self._transport.is_closing():
            return
        if not self._unsent:
            if not self._held:
                frame = frame[self._write(frame) :]
                if not frame:
                    return
            self._loop.call_soon_threadsafe(self.flush)
        self._unsent += frame
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._give_up()

    def _write(self, frame: bytes) -> int:
        try:
            return os.write(self._fd, frame)
        except BlockingIOError:
            return 0
        except OSError:
            # The client is gone. The transport reads the last bytes, and then the end.
            return len(frame)

    def flush(self) -> None:
        """Give unsent bytes to the transport; in the loop's thread."""
        with self._lock:
            if self._over or self._transport.is_closing():
                return
            if self._unsent:
                unsent, self._unsent = self._unsent, bytearray()
                self._transport.write(bytes(unsent))
            held = self._transport.get_write_buffer_size()
            self._held = held > 0
            if held > MAX_UNSENT_BYTES:
                self._give_up()

    def _give_up(self) -> None:
        self._over = True
        self._unsent = bytearray()
        self._loop.call_soon_threadsafe(self._too_many)
