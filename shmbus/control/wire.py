"""The client's end of the socket: it connects, sends and receives whole frames, with deadlines.

Invariant: a wait ends at its deadline, or with the end of the connection. Signals are handled
during a wait, since every system call here returns to Python.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Iterator

from shmbus import errors, limits
from shmbus.control import messages, socket_path

__all__ = ["DaemonUnreachable", "Wire", "refusal", "socket_exists"]

_CHUNK_BYTES = 1 << 18


class DaemonUnreachable(Exception):
    """The daemon does not answer, or not any more; trying again may help."""


def socket_exists(name: str) -> bool:
    """Whether a daemon runs or has crashed: one that ends properly removes its socket."""
    path = socket_path.socket_path(name)
    return os.path.lexists(path) and socket_path.obstacle(name) is None


def refusal(reply: messages.Refused) -> Exception:
    """Return the exception that a Refused carries."""
    kinds: dict[str, type[Exception]] = {
        "value": ValueError,
        "busy": errors.BusBusyError,
        "not_found": errors.BusNotFoundError,
        "closed": DaemonUnreachable,
        "failed": RuntimeError,
    }
    return kinds.get(reply.kind, errors.ProtocolError)(reply.message)


class Wire:
    """One connection to a daemon.

    Parameters
    ----------
    name : str
        The bus.

    Raises
    ------
    DaemonUnreachable
        There is no socket, no daemon listens at it, or something else is in its place.
    PermissionError
        The process that listens belongs to another user.
    """

    def __init__(self, name: str) -> None:
        what = socket_path.obstacle(name)
        if what is not None:
            raise DaemonUnreachable(what)
        self._name = name
        self._frames = messages.FrameBuffer()
        self._users = 0
        self._ended = False
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # A full backlog is EAGAIN for a socket with a timeout, and an endless wait without.
            self._socket.settimeout(limits.HELLO_WAIT_S)
            self._socket.connect(socket_path.socket_path(name))
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
        data = memoryview(b"".join(messages.frame(request) for request in requests))
        deadline = time.monotonic() + limits.CLIENT_WAIT_S
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline - time.monotonic()):
                    raise DaemonUnreachable("it does not read what it is sent") from None
            except OSError as error:
                raise DaemonUnreachable(str(error)) from error

    def receive(self, timeout_s: float) -> list[messages.Reply]:
        """Wait for replies; empty on timeout, DaemonUnreachable if the daemon is gone."""
        if not self._wait(select.POLLIN, timeout_s):
            return []
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise DaemonUnreachable(str(error)) from error
        if not data:
            raise DaemonUnreachable("it closed the connection")
        return [messages.decode_reply(body) for body in self._frames.feed(data)]

    def _wait(self, events: int, timeout_s: float) -> bool:
        with self._used():
            poll = select.poll()
            poll.register(self._socket, events)
            return bool(poll.poll(math.ceil(max(timeout_s, 0.0) * 1000)))

    def is_over(self) -> bool:
        """Whether either end has closed the connection."""
        with contextlib.suppress(DaemonUnreachable), self._used():
            poll = select.poll()
            poll.register(self._socket, 0)
            return bool(poll.poll(0))
        return True

    def await_end(self) -> None:
        """Sleep until either end has closed the connection."""
        with contextlib.suppress(DaemonUnreachable), self._used():
            poll = select.poll()
            poll.register(self._socket, 0)
            poll.poll()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Keep the descriptor open while a thread sleeps on it, lest its number is reused."""
        with self._lock:
            if self._ended:
                raise DaemonUnreachable("the connection is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._ended and not self._users:
                    self._socket.close()

    def end(self) -> None:
        """Wake all threads that wait here; the last of them closes the descriptor."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            with contextlib.suppress(OSError):  # the other end has closed it
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._users:
                self._socket.close()

    def forget(self) -> None:
        """Close this process's descriptor; the connection stays with the parent of a fork."""
        self._socket.close()
