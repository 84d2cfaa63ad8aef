"""The client's end of the socket: connects, sends and receives whole frames, with deadlines.

Invariants:

- A wait ends at its deadline, or with the connection. Signals are handled during a wait, because
  every system call here returns to Python.
- A raising signal handler may leave half a frame sent, or received frames unread. The caller then
  ends the connection; a surviving connection carries neither.
- The descriptor closes with the last reference: a thread sleeping on the descriptor never sleeps on
  a later file of the same number.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import time

from shmbus import errors
from shmbus.base import limits
from shmbus.control import messages, socket_path
from shmbus.segment import names

#: Bytes received by a call at most. The buffer is kept: a new buffer of this size needs its own
#: mapping, at the cost of two system calls and a page fault for a small reply.
_CHUNK_BYTES = 1 << 18


class DaemonUnreachable(Exception):
    """The daemon does not answer, or stopped answering; a retry may help."""


def socket_exists(name: str) -> bool:
    """Return True if a daemon runs or crashed: a clean exit removes the socket."""
    path = names.socket_path(name)
    return os.path.lexists(path) and socket_path.obstacle(name) is None


def refusal(reply: messages.Refused) -> Exception:
    """Return the exception carried by a Refused."""
    kinds: dict[str, type[Exception]] = {
        "value": ValueError,
        "busy": errors.BusBusyError,
        "not_found": errors.BusNotFoundError,
        "closed": DaemonUnreachable,
        "failed": RuntimeError,
    }
    return kinds.get(reply.kind, errors.ProtocolError)(reply.message)


class _Socket(socket.socket):
    """A socket that closes with its last reference, without Python code."""

    __slots__ = ()
    __del__ = socket.SocketType.close


class Wire:
    """A connection to a daemon."""

    def __init__(self, name: str) -> None:
        what = socket_path.obstacle(name)
        if what is not None:
            raise DaemonUnreachable(what)
        self._name = name
        self._frames = messages.FrameBuffer()
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        #: True after this end gave up the connection.
        self.ended = False
        self._socket = _Socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # A full backlog is EAGAIN for a socket with a timeout, and an endless wait without.
            self._socket.settimeout(limits.HELLO_WAIT_S)
            self._socket.connect(names.socket_path(name))
            self.pid = socket_path.check_peer(name, self._socket)
            self._socket.setblocking(False)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError) as error:
            self._socket.close()
            raise DaemonUnreachable(str(error)) from error
        except BaseException:
            self._socket.close()
            raise

    def send(self, *requests: messages.Request) -> None:
        """Send whole frames; DaemonUnreachable if the daemon is gone or does not read."""
        data = b"".join([messages.frame(request) for request in requests])
        # Almost every message fits into the socket's buffer at once.
        if data and (sent := self._send_now(data)) < len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_now(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise DaemonUnreachable(str(error)) from error

    def _send_rest(self, data: memoryview) -> None:
        deadline = time.monotonic() + limits.CLIENT_WAIT_S
        while data:
            if not self._wait(select.POLLOUT, deadline - time.monotonic()):
                raise DaemonUnreachable("the daemon does not read its requests")
            data = data[self._send_now(data) :]

    def receive(self, timeout_s: float) -> list[messages.Reply]:
        """Wait for replies; empty on timeout, DaemonUnreachable if the daemon is gone."""
        return self.receive_now() if self.wait(timeout_s) else []

    def receive_now(self) -> list[messages.Reply]:
        """Return the replies already here; DaemonUnreachable if the daemon is gone."""
        try:
            size = self._socket.recv_into(self._chunk)
        except BlockingIOError:
            return []
        except OSError as error:
            raise DaemonUnreachable(str(error)) from error
        if not size:
            raise DaemonUnreachable("it closed the connection")
        return [messages.decode_reply(body) for body in self._frames.feed(self._chunk[:size])]

    def wait(self, timeout_s: float) -> bool:
        """Wait for received data, without reading."""
        return self._wait(select.POLLIN, timeout_s)

    def _wait(self, events: int, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(math.ceil(max(timeout_s, 0.0) * 1000)))

    def fileno(self) -> int:
        """Return the descriptor, valid while a reference to this Wire exists."""
        return self._socket.fileno()

    def await_end(self) -> None:
        """Sleep until either end closes the connection."""
        poll = select.poll()
        poll.register(self._socket, 0)
        poll.poll()

    def end(self) -> None:
        """End the connection: sends and receives stop, and every waiting thread wakes."""
        self.ended = True
        with contextlib.suppress(OSError):  # already closed by the other end
            self._socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close this process's descriptor; the connection stays with the parent of a fork."""
        self._socket.close()
