"""A large body, from the socket straight into the memory that it is used in.

The HTTP library copies a body three times, in pieces of what one read of the socket gives. Where
the head says plainly how long the body is (`heads.is_plain`), the library is given the head with a
length of zero, or nothing at all, and the body is received here.

Invariants:

- Until a body has its part of the budget, no more than READ_AHEAD_BYTES of it are kept, and one
  piece; from then on exactly its length.
- Whoever waits for a body is woken once: by its last byte, by the end of its connection, or by the
  end of its time.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import socket
import termios

import numpy as np

from shmbus.gateway import settings

__all__ = ["Incoming"]


class Incoming:
    """One body.

    Parameters
    ----------
    transport : Transport
        Where it comes from.
    first : bytes
        What of it came with its head.
    length : int
        Bytes that it has.
    """

    def __init__(self, transport: asyncio.Transport, first: bytes, length: int) -> None:
        self.length = length
        self._transport = transport
        #: What came before there was memory for all of it.
        self._early = [first]
        self._count = len(first)
        self._paused = False
        self._memory: memoryview | None = None
        self._view: memoryview | None = None
        self._low_water = 1
        self._arrived: asyncio.Future[memoryview] | None = None
        self._failed: BaseException | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return self._count == self.length

    def came(self) -> int:
        """Return how many bytes have come, those too that the kernel still has."""
        waits = array.array("i", [0])
        found = self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError, ValueError):  # it is closed: nothing more comes
            fcntl.ioctl(found.fileno(), termios.FIONREAD, waits)
        return self._count + waits[0]

    @property
    def rest(self) -> memoryview | None:
        """Where the next bytes go; None while it has no memory, and once it is whole."""
        return self._view

    def keep(self, data: bytes) -> bytes:
        """Keep what came before there was memory; returns what is not of this body."""
        part, behind = data[: self.length - self._count], data[self.length - self._count :]
        self._early.append(part)
        self._count += len(part)
        if self._count >= settings.SMALL_PIECE_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        return behind

    def advance(self, count: int) -> None:
        """Note that so many bytes were received into `rest`."""
        assert self._view is not None
        self._count += count
        self._view = self._view[count:]
        if self.is_whole:
            self._end()
        else:
            self._wake_at()

    def fail(self, error: BaseException) -> None:
        """Note that no more of it comes."""
        self._failed = self._failed or error
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(error)

    async def receive(self, seconds: float) -> memoryview:
        """Return all of it.

        Raises
        ------
        ConnectionResetError
            The client ended it early.
        TimeoutError
            It took longer than `seconds`.
        """
        if self._failed is not None:
            raise self._failed
        # Not zeroed first: every byte of it is written before it is read.
        body = self._memory = np.empty(self.length, np.uint8).data
        at = 0
        for part in self._early:
            body[at : at + len(part)] = part
            at += len(part)
        self._early.clear()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        if self.is_whole:
            return body
        loop = asyncio.get_running_loop()
        self._arrived = loop.create_future()
        self._view = body[at:]
        self._wake_at()
        timer = loop.call_later(seconds, self.fail, asyncio.TimeoutError())
        try:
            return await self._arrived
        finally:
            timer.cancel()
            # What is done with the body from here on is in nobody's way.
            self._view = self._memory = self._arrived = None

    def _end(self) -> None:
        self._view = None
        self._set_low_water(1)
        if self._arrived is not None and not self._arrived.done():
            assert self._memory is not None
            self._arrived.set_result(self._memory)

    def _wake_at(self) -> None:
        """Have the kernel collect before it wakes this process, in a buffer with room for that."""
        left = self.length - self._count
        self._set_low_water(min(left, settings.LARGE_PIECE_BYTES))

    def _set_low_water(self, count: int) -> None:
        if count == self._low_water or self._transport.is_closing():
            return
        self._low_water = count
        with contextlib.suppress(OSError):  # without it, the body comes in smaller pieces
            found: socket.socket = self._transport.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
