"""Numbered buffers of one owning process, mapped by readers: shared memory that can grow.

Invariants:

- Descriptors go over a Unix socket to processes of this user only: both sides ask the kernel for
  the peer's uid. An unsendable descriptor fails only its requester; every wait has a deadline; an
  unreferenced server stops like a closed one.
- A buffer never changes its size or its address under a reader: a larger replacement gets a new
  generation, and readers name memory by (number, generation).
- The owner keeps a replaced buffer until its readers are gone, and meanwhile replaces no second
  buffer: at most one buffer exists beyond the numbers.
- Owners never share a generation with a predecessor: no reader mistakes a dead owner's memory for
  the successor's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

import msgspec
import torch

from shmbus import ShmbusError
from shmbus.batch.uninterrupted import finalizer
from shmbus.data.encoding import decodable
from shmbus.errors import PeerGoneError
from shmbus.tensors.device.memory import DeviceHandle, DeviceMemory, HostMemory, device_of

#: Seconds granted to one client, a holder of one of MAX_ASKERS threads.
ASK_S: Final = 5.0
#: Clients served at once; more wait in the socket's queue.
MAX_ASKERS: Final = 16
#: Bytes of a question or of the message that comes with a descriptor.
MAX_MESSAGE_BYTES: Final = 4096
#: Seconds between two attempts to reach a server during its start.
RETRY_S: Final = 0.02


class DescriptorServer:
    """Server of descriptors and messages for processes of this user."""

    def __init__(self, path: str, give: Callable[[bytes], tuple[bytes, int | None]]) -> None:
        self.path = path
        self._give = give
        self._pid = os.getpid()
        self._slots = threading.BoundedSemaphore(MAX_ASKERS)
        _clear_place(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(path)
            os.chmod(path, 0o600)
            self._socket.listen(MAX_ASKERS)
        except BaseException:
            self._socket.close()
            raise
        # At the process's end.
        self._end = weakref.finalize(self, _stop_listening, self._socket, path, self._pid)
        # The thread holds a weak reference: a dropped server stops even without `close`.
        arguments = (weakref.ref(self), self._socket)
        self._thread = threading.Thread(
            target=_serve, args=arguments, name="shmbus-descriptors", daemon=True
        )
        self._thread.start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):  # lost client
                connection.settimeout(ASK_S)
                if _peer_uid(connection) != os.geteuid():
                    return
                try:
                    message, descriptor = self._give(connection.recv(MAX_MESSAGE_BYTES))
                except ValueError as error:
                    connection.send(b"-" + str(error).encode()[: MAX_MESSAGE_BYTES - 1])
                    return
                try:
                    rights = [] if descriptor is None else [descriptor]
                    socket.send_fds(connection, [b"+" + message], rights)
                finally:
                    if descriptor is not None:
                        os.close(descriptor)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Stop listening and remove the socket; idempotent."""
        if os.getpid() == self._pid:
            self._end()
            self._thread.join()

    @finalizer
    def __del__(self) -> None:
        if "_end" in vars(self):
            _stop_listening(self._socket, self.path, self._pid)
            self._end.detach()
        # In here: a finalizer of the thread would swallow the pending exception.
        vars(self).pop("_thread", None)


def _serve(found: weakref.ref[DescriptorServer], listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # closed
            return
        server = found()
        if server is None:
            connection.close()
            return
        server._slots.acquire()
        threading.Thread(target=server._answer, args=(connection,), daemon=True).start()
        del server


def _stop_listening(listening: socket.socket, path: str, pid: int) -> None:
    """Remove the socket and wake the listening thread, once, in the listening process only."""
    if os.getpid() != pid or listening.fileno() < 0:
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
    listening.close()


def fetch_descriptor(
    path: str, question: bytes, timeout: float, *, await_server: bool = True
) -> tuple[bytes, int | None]:
    """Ask a `DescriptorServer`."""
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        while True:
            try:
                connection.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if not await_server or time.monotonic() >= deadline:
                    raise PeerGoneError(
                        f"no process shares device memory at {path}: {error.strerror}; is its "
                        "owner running?"
                    ) from error
                time.sleep(RETRY_S)
        if _peer_uid(connection) != os.geteuid():
            raise PermissionError(
                f"{path} belongs to uid {_peer_uid(connection)}, not to this user"
            )
        connection.settimeout(max(RETRY_S, deadline - time.monotonic()))
        try:
            connection.send(question)
            message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        except (OSError, TimeoutError) as error:
            raise PeerGoneError(f"{path}: no answer within {timeout:g} s: {error}") from error
    if message[:1] == b"+":
        return message[1:], descriptors[0] if descriptors else None
    for descriptor in descriptors:
        os.close(descriptor)
    if not message:
        raise PeerGoneError(f"{path}: the process there went away before it answered")
    raise ValueError(f"{path}: {message[1:].decode(errors='replace')}")


def _clear_place(path: str) -> None:
    """Remove a dead server's socket; nothing else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                return
    raise FileExistsError(
        f"{path}: expected nothing there, or the socket of a dead process of this user; remove it, "
        "or end the process that listens there"
    )


def _peer_uid(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(raw[4:8], "little")


MemoryKind = Literal["vmm", "ipc", "memfd"]

#: Seconds granted to an owner for duplicating a descriptor.
FETCH_S: Final = 10.0


class BufferLostError(ShmbusError, documented=False):
    """Buffer replaced by its owner, or lost with a dead owner whose successor runs."""


#: Memory of a buffer.
Memory: TypeAlias = DeviceMemory | HostMemory


@decodable
class BufferName(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Number of a buffer and generation of its memory."""

    number: int
    generation: int


def allocator(kind: MemoryKind, device: int = 0) -> Callable[[int], Memory]:
    """Return the allocator for a kind of memory."""
    if kind == "memfd":
        return HostMemory.allocate
    return lambda nbytes: DeviceMemory.allocate(nbytes, device, kind)


def open_memory(
    message: bytes,
    descriptor: int | None,
    *,
    device: int | None = None,
    or_owner: bool = False,
    writable: bool = False,
) -> Memory:
    """Map foreign memory of any kind."""
    try:
        handle = DeviceHandle.decode(message)
        if handle.kind == "memfd":
            return HostMemory.open(handle, descriptor, writable=writable)
        if or_owner and device is not None:
            owner = device_of(handle.uuid)
            if owner != device and not torch.cuda.can_device_access_peer(device, owner):
                device = None
        return DeviceMemory.open(handle, descriptor, device=device, writable=writable)
    finally:
        if descriptor is not None:
            os.close(descriptor)


class Arena:
    """The owner's side."""

    def __init__(self, path: str, allocate: Callable[[int], Memory]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._buffers: dict[int, tuple[BufferName, Memory, torch.Tensor]] = {}
        # Still served: a message with the old name may be unread.
        self._replaced: dict[BufferName, Memory] = {}
        # Random start, far from the predecessor's generations, now beyond any request.
        self.owner = int.from_bytes(os.urandom(5), "little") << 16
        self._next = self.owner
        # A weak method: an unreferenced arena ends at once, together with its server and memory.
        give = weakref.WeakMethod(self._give)

        def answer(question: bytes) -> tuple[bytes, int | None]:
            found = give()
            if found is None:
                raise ValueError("expected a buffer that is here; its owner has let go of it")
            return found(question)

        self._server = DescriptorServer(path, answer)

    def _give(self, question: bytes) -> tuple[bytes, int | None]:
        try:
            wanted = msgspec.msgpack.decode(question, type=BufferName)
        except msgspec.DecodeError as error:
            raise ValueError(f"expected a buffer's name: {error}") from error
        with self._lock:
            name, memory, _ = self._buffers.get(wanted.number, (None, None, None))
            if wanted.generation != self.owner and name != wanted:
                memory = self._replaced.get(wanted)
            if memory is None:
                raise ValueError(f"expected a buffer that is here, got {wanted}")
            message = memory.handle.encode()
            return message, None if memory.handle.handle else memory.descriptor()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers, including replaced buffers under readers."""
        kept = sum(memory.nbytes for memory in self._replaced.values())
        return kept + sum(memory.nbytes for _, memory, _ in self._buffers.values())

    @property
    def replaced(self) -> bool:
        """Return whether readers may still use a replaced buffer."""
        return bool(self._replaced)

    def has(self, number: int) -> bool:
        """Return whether a buffer with the number exists, at any size."""
        return number in self._buffers

    def fits(self, number: int, nbytes: int) -> bool:
        """Return whether a buffer holds at least the given bytes."""
        found = self._buffers.get(number)
        return found is not None and found[1].nbytes >= nbytes

    def buffer(self, number: int, nbytes: int) -> tuple[BufferName, torch.Tensor]:
        """Return a buffer of at least the given bytes; replace a smaller one."""
        if not self.fits(number, nbytes):
            if self._replaced and self.has(number):
                raise RuntimeError(
                    "Arena.buffer: expected let_go() between two buffers that are replaced"
                )
            memory = self._allocate(nbytes)
            with self._lock:
                old = self._buffers.get(number)
                self._next += 1
                name = BufferName(number, self._next)
                self._buffers[number] = name, memory, memory.tensor()
                if old is not None:
                    self._replaced[old[0]] = old[1]
        name, _, tensor = self._buffers[number]
        return name, tensor

    def let_go(self) -> None:
        """Free replaced buffers: their readers use the successors now, or are gone."""
        with self._lock:
            replaced, self._replaced = self._replaced, {}
        for memory in replaced.values():
            memory.close()

    def close(self) -> None:
        """Stop listening and release every buffer; readers keep their mappings."""
        self._server.close()
        self.let_go()
        with self._lock:
            buffers, self._buffers = self._buffers, {}
        for _, memory, _ in buffers.values():
            memory.close()


class ArenaView:
    """Reader's view of an owner's buffers."""

    def __init__(
        self,
        path: str,
        *,
        device: int | None = None,
        or_owner: bool = False,
        timeout: float = FETCH_S,
        writable: bool = False,
    ) -> None:
        self._path, self._device, self._timeout = path, device, timeout
        self._or_owner, self._writable = or_owner, writable
        self._mapped: dict[int, tuple[BufferName, Memory]] = {}

    def memory(self, name: BufferName) -> Memory:
        """Return a buffer mapped for reading, valid until a request for a newer generation."""
        found = self._mapped.get(name.number)
        if found is not None and found[0] == name:
            return found[1]
        question = msgspec.msgpack.encode(name)
        try:
            # The owner of a named buffer listens already.
            answer = fetch_descriptor(self._path, question, self._timeout, await_server=False)
        except ValueError as error:
            raise BufferLostError(f"the memory of {name} is not there any more: {error}") from error
        memory = open_memory(
            *answer, device=self._device, or_owner=self._or_owner, writable=self._writable
        )
        self._mapped[name.number] = name, memory
        if found is not None:
            found[1].close()
        return memory

    def close(self) -> None:
        """Release every buffer; tensors of their memory stay valid."""
        mapped: Any = self._mapped
        self._mapped = {}
        for _, memory in mapped.values():
            memory.close()
