"""Mailboxes of processes of one machine: unix sockets in a directory.

Invariants:

- Nothing here blocks: what a peer does not take is kept for it up to a bound, then lost with its
  connection.
- Lengths from a peer are bounded before anything is allocated by them.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections import deque
from pathlib import Path

from shmbus.relay.messages import Envelope, Message, pack
from shmbus.relay.party import Opener

__all__ = ["SocketMailbox"]

#: Bytes of a message: the heads of all that a source holds, a million of them and more.
_MOST_PACKED = 256 << 20
#: Bytes of a block.
_MOST_PAYLOAD = 1 << 30
#: Bytes that may wait for one peer: several blocks. One that takes none of them is not there.
_MOST_WAITING = 256 << 20
_LENGTHS = struct.Struct("<II")
_READ_BYTES = 1 << 20
_BACKLOG = 256


class _Incoming:
    """A connection from a peer, and the frame of it that is being read."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = bytearray(_LENGTHS.size)
        self._filled = 0
        self._lengths: tuple[int, int] | None = None

    def read(self) -> list[tuple[bytes, memoryview]] | None:
        """Return the frames that are whole now; None at the end of the connection."""
        frames: list[tuple[bytes, memoryview]] = []
        taken = 0
        while taken < _READ_BYTES:
            room = memoryview(self._buffer)[self._filled :]
            try:
                count = self.connection.recv_into(room) if len(room) else 0
            except BlockingIOError:
                break
            except OSError:
                return frames or None
            if not count and len(room):
                return frames or None
            self._filled += count
            taken += count + 1
            if self._filled < len(self._buffer):
                continue
            if self._lengths is None:
                self._lengths = self._check(*_LENGTHS.unpack(self._buffer))
                if self._lengths is None:
                    return None
                self._buffer = bytearray(sum(self._lengths))
            else:
                packed, _ = self._lengths
                whole = memoryview(self._buffer)
                frames.append((bytes(whole[:packed]), whole[packed:].toreadonly()))
                self._lengths = None
                self._buffer = bytearray(_LENGTHS.size)
            self._filled = 0
        return frames

    @staticmethod
    def _check(packed: int, payload: int) -> tuple[int, int] | None:
        good = 0 < packed <= _MOST_PACKED and payload <= _MOST_PAYLOAD
        return (packed, payload) if good else None


class _Outgoing:
    """A connection to a peer, and what waits for it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.waiting: deque[memoryview] = deque()
        self.nbytes = 0

    def send(self, parts: list[bytes | bytearray | memoryview]) -> bool:
        """Send now what can be sent, and keep a copy of the rest; False once the peer is gone."""
        for part in parts:
            left = memoryview(part)
            if not self.waiting:
                count = self._write(left)
                if count is None:
                    return False
                left = left[count:]
            if left:
                self.waiting.append(memoryview(bytes(left)))
                self.nbytes += len(left)
        return self.nbytes <= _MOST_WAITING

    def flush(self) -> bool:
        """Send what waits; False once the peer is gone."""
        while self.waiting:
            count = self._write(self.waiting[0])
            if count is None:
                return False
            self.nbytes -= count
            if count < len(self.waiting[0]):
                self.waiting[0] = self.waiting[0][count:]
                return True
            self.waiting.popleft()
        return True

    def _write(self, part: memoryview) -> int | None:
        done = 0
        while done < len(part):
            try:
                done += self.connection.send(part[done:])
            except BlockingIOError:
                return done
            except OSError:
                return None
        return done


class SocketMailbox:
    """A mailbox at a socket in a directory; others reach it by its file's name there."""

    def __init__(self, directory: str, address: str) -> None:
        self.address = address
        self._directory = Path(directory)
        self.opener = Opener(address)
        self._path = self._directory / address
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[str, _Outgoing] = {}

    def send(
        self, to: str, message: Message, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        """Send a message, or lose it where nobody has that address now."""
        packed = pack(self.address, message)
        parts = [_LENGTHS.pack(len(packed), len(payload)) + packed, payload]
        # A peer that began anew has another socket under its name: what it had is closed.
        for _ in range(2):
            peer = self._peers.get(to) or self._connect(to)
            if peer is None:
                return
            if peer.send(parts):
                self._watch(to, peer)
                return
            self._forget(to)

    def flush(self) -> None:
        """Nothing waits but what a peer does not take."""

    def _connect(self, to: str) -> _Outgoing | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(str(self._directory / to))
        except OSError:
            connection.close()
            return None
        self._peers[to] = _Outgoing(connection)
        return self._peers[to]

    def _watch(self, to: str, peer: _Outgoing) -> None:
        """Have `receive` go on with what waits for a peer."""
        watched = peer.connection in self._selector.get_map()
        if peer.waiting and not watched:
            self._selector.register(peer.connection, selectors.EVENT_WRITE, to)
        elif not peer.waiting and watched:
            self._selector.unregister(peer.connection)

    def _forget(self, to: str) -> None:
        peer = self._peers.pop(to)
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.connection)
        peer.connection.close()

    def receive(self, timeout_s: float) -> list[Envelope]:
        """Return what has come, after at most so long where nothing has."""
        found: list[Envelope] = []
        deadline = time.monotonic() + timeout_s
        while True:
            left = 0.0 if found else max(0.0, deadline - time.monotonic())
            events = self._selector.select(left)
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, str):
                    self._flush(key.data)
                else:
                    found += self._read(key.data)
            if found or not events or time.monotonic() >= deadline:
                return found

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _Incoming(connection))

    def _flush(self, to: str) -> None:
        peer = self._peers[to]
        if peer.flush():
            self._watch(to, peer)
        else:
            self._forget(to)

    def _read(self, incoming: _Incoming) -> list[Envelope]:
        frames = incoming.read()
        if frames is None:
            self._selector.unregister(incoming.connection)
            incoming.connection.close()
            return []
        return [each for frame in frames for each in self.opener.open(*frame)]

    def close(self) -> None:
        """Take the address away."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Incoming):
                key.data.connection.close()
        for peer in self._peers.values():
            peer.connection.close()
        self._selector.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)
