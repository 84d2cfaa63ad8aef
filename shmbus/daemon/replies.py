"""What is sent to one client: written to its socket at once, by whichever thread has the reply.

A transport belongs to the loop's thread, and writes when the loop comes to it. A client that waits
for groups is asleep meanwhile. So a reply is written here, and the transport gets only what the
socket does not take.

Invariants:

- Bytes leave in the order in which they were given: nothing is written past what the transport
  still holds.
- The host's lock is held in every call, but for `flush`, which takes it.
- What a client leaves unread is bounded by MAX_UNSENT_BYTES and one reply.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["MAX_UNSENT_BYTES", "Replies"]

#: Bytes queued for a client that does not read; above this its connection is closed.
MAX_UNSENT_BYTES = 8 << 20


class Replies:
    """The way to one client.

    Parameters
    ----------
    transport : asyncio.Transport
        Of the client's socket.
    fd : int
        The socket; the transport closes it, after `connection_lost`.
    lock : context manager
        The host's.
    too_many : callable
        Called in the loop's thread, once, when the client does not read its replies.
    """

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
        #: What the loop's thread will give to the transport.
        self._unsent = bytearray()
        #: Whether the transport may hold bytes that it has not written.
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
            # The client has gone. The transport reads what it still said, and then its end.
            return len(frame)

    def flush(self) -> None:
        """Give the transport what is unsent; in the loop's thread."""
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
