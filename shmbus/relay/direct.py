"""Messages directly from process to process over TCP.

Blocking sockets and a thread for each direction: a system call then moves a whole block without the
interpreter's lock. The sending thread writes a message without a block itself, if the socket takes
it.

Invariants:

- Both ends of a connection prove knowledge of the listener's key, carried only by an introduction,
  before they send or read anything else. Nothing is encrypted.
- A message without a connection is lost: parties ask again.
- Lengths from a peer are bounded before an allocation.
- A buffer with a living view is not given out again.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import msgspec

from shmbus.base.backoff import backoff_s
from shmbus.data.encoding import decodable

#: Buffers kept: the blocks under way and a spare.
_MOST_KEPT = 4
#: A buffer exceeds the request by an eighth, to serve blocks of similar sizes.
_SPARE_SHARE = 8


class BufferPool:
    """Buffers of a single thread; views of them may be dropped in any thread."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, nbytes: int) -> memoryview:
        """Return a buffer of `nbytes` bytes, with its old content."""
        for buffer in self._kept:
            if len(buffer) >= nbytes and self._is_free(buffer):
                return memoryview(buffer)[:nbytes]
        buffer = bytearray(nbytes + nbytes // _SPARE_SHARE)
        if len(self._kept) >= _MOST_KEPT:
            # A buffer in use goes with its last view.
            del self._kept[0]
        self._kept.append(buffer)
        return memoryview(buffer)[:nbytes]

    @staticmethod
    def _is_free(buffer: bytearray) -> bool:
        try:
            # A bytearray with a living view refuses to resize.
            buffer.append(0)
        except BufferError:
            return False
        buffer.pop()
        return True


_log = logging.getLogger("shmbus.relay")

#: Carries this process's endpoint to an unconnected address, or loses it. Called for each message
#: lost for want of a connection; never waits.
Introduce: TypeAlias = Callable[[str], None]
#: Takes received messages, with the payload of the last message.
Deliver: TypeAlias = Callable[[list[bytes], bytes | memoryview], None]

#: Bytes of messages sent together: the heads of a full source, a million and more.
_MOST_PACKED: Final = 256 << 20
#: Bytes of a block.
_MOST_PAYLOAD: Final = 1 << 30
#: Bytes waiting for a peer: several blocks. Messages beyond are lost.
_MOST_WAITING: Final = 256 << 20
#: Seconds for a connection and its proofs.
_MEET_S: Final = 5.0
#: A wait that ends at once; 0 would turn the timeout off.
_LEAST_S: Final = 1e-6
#: Connections not authenticated yet, a thread each; more wait in the system's queue.
_MOST_MEETING: Final = 32
#: Seconds between attempts to connect: at first, and at most.
_RETRY_S: Final = (0.2, 15.0)
#: Seconds between the listener's retries, and at most until the listener notices its end.
_ACCEPT_S: Final = 0.2
#: Milliseconds until a peer without acknowledgements counts as cut off.
_SILENT_MS: Final = 10_000
_LENGTHS: Final = struct.Struct("<QQ")
_NONCE_BYTES: Final = 16
_PROOF_BYTES: Final = 32
_KEY_BYTES: Final = 32
_MOST_ENDPOINT_BYTES: Final = 4096
_BACKLOG: Final = 64


@decodable
class Endpoint(NamedTuple):
    """A process's listening address."""

    #: Its name among the relay's processes.
    address: str
    host: str
    port: int
    #: The secret required of connecting processes; new in each process.
    key: bytes


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, who + nonces, "sha256")


def _receive(connection: socket.socket, room: memoryview, deadline_s: float | None = None) -> None:
    """Fill a room; ConnectionError at the end of the connection, TimeoutError at the deadline."""
    done = 0
    while done < len(room):
        if deadline_s is not None:
            # A peer sending byte by byte gets no extra time.
            connection.settimeout(max(deadline_s - time.monotonic(), _LEAST_S))
        count = connection.recv_into(room[done:], len(room) - done, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("it was closed")
        done += count


def _receive_bytes(connection: socket.socket, count: int, deadline_s: float | None = None) -> bytes:
    room = bytearray(count)
    _receive(connection, memoryview(room), deadline_s)
    return bytes(room)


def _views(parts: list[bytes | bytearray | memoryview]) -> list[memoryview]:
    return [memoryview(part).cast("B") for part in parts if len(part)]


def _skip(left: list[memoryview], count: int) -> None:
    """Remove the sent bytes from the front."""
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if left:
        left[0] = left[0][count:]


def _send(connection: socket.socket, left: list[memoryview]) -> None:
    while left:
        _skip(left, connection.sendmsg(left))


def _frame(packed: list[bytes], payload: bytes | bytearray | memoryview) -> list[memoryview]:
    """Return the bytes of messages sent together."""
    together = msgspec.msgpack.encode(packed)
    return _views([_LENGTHS.pack(len(together), len(payload)), together, payload])


def _require_open(connection: socket.socket) -> None:
    """Notice a closed peer before a message is lost: a peer never sends anything here."""
    try:
        said = connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return
    raise ConnectionError("it said something" if said else "it was closed")


class _Item(NamedTuple):
    """Waiting messages: their bytes, and the part still unsent."""

    nbytes: int
    left: list[memoryview]


class _Link:
    """A connection to an endpoint, remade after its end, with its waiting messages."""

    def __init__(self, to: Endpoint, own: Endpoint) -> None:
        self.to = to
        self._own = own
        self._waiting: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        #: Bytes and messages in the thread's hands and in the queue; under the lock.
        self._nbytes = self._count = 0
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shmbus relay send", daemon=True)
        self._thread.start()

    def _is_up(self) -> bool:
        return self._connection is not None and not self._over.is_set()

    def send(self, packed: list[bytes], payload: bytes | bytearray | memoryview) -> bool:
        """Take messages; False without a connection."""
        if not self._is_up():
            return False
        left = _frame(packed, payload)
        with self._lock:
            if not self._is_up():
                return False
            if self._nbytes > _MOST_WAITING:
                return True  # lost: the peer reads nothing
            if not len(payload) and not self._count and self._send_now(left):
                return True
            item = _Item(sum(map(len, left)), left)
            self._nbytes += item.nbytes
            self._count += 1
            self._waiting.put(item)
            return True

    def _send_now(self, left: list[memoryview]) -> bool:
        """Send the bytes the socket takes at once; return False if the thread must send a rest."""
        assert self._connection is not None
        # The thread notices an ended connection.
        with contextlib.suppress(OSError):
            _require_open(self._connection)
            _skip(left, self._connection.sendmsg(left, (), socket.MSG_DONTWAIT))
        return not left

    def _work(self) -> None:
        attempts = 0
        while not self._over.is_set():
            try:
                connection = self._meet()
            except (OSError, ValueError) as error:
                attempts += 1
                _log.log(
                    logging.WARNING if attempts == 1 else logging.DEBUG,
                    "relay: no connection to %s at %s:%d: %s; it is tried again. Processes of a "
                    "relay connect to each other at ports that the system chooses: let nodes do so",
                    self.to.address, self.to.host, self.to.port, error,
                )  # fmt: skip
                self._over.wait(backoff_s(_RETRY_S, attempts, (self.to.address, attempts)))
                continue
            attempts = 0
            with self._lock:
                self._connection = connection
            try:
                self._send_all(connection)
            except OSError as error:
                _log.warning(
                    "relay: the connection to %s ended (%s); it is made again, and messages that "
                    "are lost meanwhile are asked for again", self.to.address, error,
                )  # fmt: skip
            finally:
                with self._lock:
                    # No thread sends on the descriptor after its number may belong to another
                    # socket.
                    self._connection = None
                    connection.close()
                    self._waiting = queue.SimpleQueue()
                    self._nbytes = self._count = 0

    def _meet(self) -> socket.socket:
        connection = socket.create_connection((self.to.host, self.to.port), _MEET_S)
        try:
            _tune(connection)
            own = msgspec.msgpack.encode(self._own)
            until_s = time.monotonic() + _MEET_S
            nonces = _receive_bytes(connection, _NONCE_BYTES, until_s)
            nonces += secrets.token_bytes(_NONCE_BYTES)
            proof = _proof(self.to.key, b"from", nonces)
            length = len(own).to_bytes(4, "little")
            _send(connection, _views([nonces[_NONCE_BYTES:], proof, length, own]))
            answer = _receive_bytes(connection, _PROOF_BYTES, until_s)
            if not hmac.compare_digest(answer, _proof(self.to.key, b"to", nonces)):
                raise ConnectionError("a foreign process listens on this address")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _send_all(self, connection: socket.socket) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                _require_open(connection)
                _send(connection, item.left)
            finally:
                with self._lock:
                    self._nbytes -= item.nbytes
                    self._count -= 1
                # Free the room as soon as the block is sent, not with the next block.
                del item

    def cut(self) -> None:
        """End the connection, as a network may."""
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._over.set()
        with self._lock:
            self._waiting.put(None)
        self.cut()


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MS)


class Direct:
    """A way to others by TCP; called with an address, messages and the last one's payload."""

    def __init__(self, address: str, host: str, introduce: Introduce, deliver: Deliver) -> None:
        self._introduce = introduce
        self._deliver = deliver
        self._listener = socket.create_server((host, 0), backlog=_BACKLOG)
        port = self._listener.getsockname()[1]
        self.endpoint = Endpoint(address, host, port, secrets.token_bytes(_KEY_BYTES))
        self.refused = 0
        self._links: dict[str, _Link] = {}
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._meeting = threading.Semaphore(_MOST_MEETING)
        self._over = threading.Event()
        threading.Thread(target=self._accept, name="shmbus relay listen", daemon=True).start()

    def learn(self, endpoint: Endpoint) -> None:
        """Take the endpoint of an authenticated peer."""
        with self._lock:
            link = self._links.get(endpoint.address)
            if link is not None and link.to == endpoint:
                return
            if link is not None:
                link.close()
            self._links[endpoint.address] = _Link(endpoint, self.endpoint)

    def __call__(
        self, to: str, packed: list[bytes], payload: bytes | bytearray | memoryview
    ) -> None:
        """Send messages to an address. The payload is read later: it must not be changed."""
        link = self._links.get(to)
        if link is None or not link.send(packed, payload):
            self._introduce(to)

    def _accept(self) -> None:
        while not self._over.is_set():
            if not self._meeting.acquire(timeout=_ACCEPT_S):
                continue
            connection = None
            try:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._read, args=(connection,), name="shmbus relay receive", daemon=True
                ).start()
            except (OSError, RuntimeError) as error:
                self._meeting.release()
                if connection is not None:
                    connection.close()
                if not self._over.wait(_ACCEPT_S):
                    # No file descriptor or thread is free yet.
                    _log.warning("relay: %s takes no connection: %s", self.endpoint.address, error)

    def _read(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        try:
            try:
                endpoint = self._greet(connection)
            finally:
                self._meeting.release()
            self.learn(endpoint)
            self._read_all(connection)
        except (OSError, ValueError) as error:
            _log.debug("relay: a connection to %s ended: %s", self.endpoint.address, error)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> Endpoint:
        """Prove both ends of an incoming connection, and return its endpoint."""
        until_s = time.monotonic() + _MEET_S
        connection.settimeout(_MEET_S)
        _tune(connection)
        nonce, key = secrets.token_bytes(_NONCE_BYTES), self.endpoint.key
        _send(connection, _views([nonce]))
        nonces = nonce + _receive_bytes(connection, _NONCE_BYTES, until_s)
        proof = _receive_bytes(connection, _PROOF_BYTES, until_s)
        if not hmac.compare_digest(proof, _proof(key, b"from", nonces)):
            self.refused += 1
            raise ConnectionError("the connecting process does not know the key")
        length = int.from_bytes(_receive_bytes(connection, 4, until_s), "little")
        if length > _MOST_ENDPOINT_BYTES:
            raise ConnectionError(f"an endpoint of {length} bytes")
        said = _receive_bytes(connection, length, until_s)
        endpoint = msgspec.msgpack.decode(said, type=Endpoint)
        _send(connection, _views([_proof(key, b"to", nonces)]))
        connection.settimeout(None)
        return endpoint

    def _read_all(self, connection: socket.socket) -> None:
        pool, lengths = BufferPool(), memoryview(bytearray(_LENGTHS.size))
        while True:
            _receive(connection, lengths)
            packed, nbytes = _LENGTHS.unpack(lengths)
            if packed > _MOST_PACKED or nbytes > _MOST_PAYLOAD:
                raise ConnectionError(f"messages of {packed} bytes with {nbytes} of payload")
            together = _receive_bytes(connection, packed)
            payload: memoryview | bytes = b""
            if nbytes:
                payload = pool.take(nbytes)
                _receive(connection, payload)
                payload = payload.toreadonly()
            self._deliver(msgspec.msgpack.decode(together, type=list[bytes]), payload)
            del payload

    def cut(self) -> None:
        """End every connection, as a network may; links reconnect."""
        for link in list(self._links.values()):
            link.cut()
        self._cut_incoming()

    def _cut_incoming(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End every connection and the listener."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for link in self._links.values():
                link.close()
        self._cut_incoming()
