"""Numbered buffers that one process owns and others map: how memory grows while it is shared.

Invariants:

- Descriptors go over a Unix socket to processes of this user only: both sides ask the kernel who is
  at the other end. What cannot be sent costs its asker only; a wait has a deadline; a server that
  nobody has any more ends as a closed one does.
- A buffer never changes its size or its address under a reader: one that is too small is replaced,
  under a new generation, and the name of what is read is (number, generation).
- What was replaced is kept until the owner is told that nobody reads it any more, and while it is
  kept nothing else is replaced: there is at most one buffer more than numbers.
- No generation of an owner is one of its predecessor's, so nobody reads the memory of a dead owner
  where that of its successor is meant.
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
from typing import Any, Final, Literal, Protocol

import msgspec
import torch

from shmbus import ShmbusError
from shmbus.errors import PeerGoneError
from shmbus.tensors.device.memory import DeviceHandle, DeviceMemory, HostMemory, device_of

#: Seconds that one asker may take; each has a thread, and there are a few.
ASK_S: Final = 5.0
#: Askers that are served at once; more wait in the socket's queue.
MAX_ASKERS: Final = 16
#: Bytes of a question or of the message that comes with a descriptor.
MAX_MESSAGE_BYTES: Final = 4096
#: Between two tries to reach a server that is not there yet, seconds.
RETRY_S: Final = 0.02


class DescriptorServer:
    """Gives a descriptor and a message to each process of this user that asks."""

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
        # Who drops a server without a close has it ended too: its thread knows it weakly.
        self._end = weakref.finalize(self, _stop_listening, self._socket, path, self._pid)
        arguments = (weakref.ref(self), self._socket)
        self._thread = threading.Thread(
            target=_serve, args=arguments, name="shmbus-descriptors", daemon=True
        )
        self._thread.start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):  # the asker has gone
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
        """Stop listening and remove the socket; may be called twice."""
        if os.getpid() == self._pid:
            self._end()
            self._thread.join()


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
    """Remove a socket and wake who waits for it, in the process that listens."""
    if os.getpid() != pid:
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
                        f"nobody gives device memory at {path}: {error.strerror}; is the process "
                        "that has it running?"
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
    """Remove the socket of a server that died; nothing else."""
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

#: Seconds that an owner may take to answer: it duplicates a descriptor.
FETCH_S: Final = 10.0


class BufferLostError(ShmbusError):
    """The process that owns a buffer has replaced it, or died and left a successor."""


class Memory(Protocol):
    """What a buffer is made of: `DeviceMemory` or `HostMemory`."""

    handle: DeviceHandle
    nbytes: int
    device: torch.device

    def descriptor(self) -> int:
        """Return a new file descriptor of it, which is the caller's to close."""

    def tensor(self) -> torch.Tensor:
        """Return all its bytes, uint8."""

    def lend(self) -> tuple[torch.Tensor, weakref.ref[Any]]:
        """Return the same, and what tells whether a tensor of it is still there."""

    def close(self) -> None:
        """Let go of it."""


class BufferName(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which buffer: its number, and the generation of its memory."""

    number: int
    generation: int


def allocator(kind: MemoryKind, device: int = 0) -> Callable[[int], Memory]:
    """Return what allocates memory of a kind."""
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
    """Map what another process has allocated, of whichever kind."""
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
        # Still given to who asks: the message that names one may not have been read yet.
        self._replaced: dict[BufferName, Memory] = {}
        # Far enough apart from the predecessor's, which nobody can ask any more.
        self.owner = int.from_bytes(os.urandom(5), "little") << 16
        self._next = self.owner
        # Weakly: an arena that nobody has any more goes at once, and its server and memory with it.
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
        """Return the bytes of all buffers, those that were replaced and are still read included."""
        kept = sum(memory.nbytes for memory in self._replaced.values())
        return kept + sum(memory.nbytes for _, memory, _ in self._buffers.values())

    @property
    def replaced(self) -> bool:
        """Whether a buffer that was replaced may still be read."""
        return bool(self._replaced)

    def has(self, number: int) -> bool:
        """Whether there is a buffer of that number, of whatever size."""
        return number in self._buffers

    def fits(self, number: int, nbytes: int) -> bool:
        """Whether a buffer has so many bytes."""
        found = self._buffers.get(number)
        return found is not None and found[1].nbytes >= nbytes

    def buffer(self, number: int, nbytes: int) -> tuple[BufferName, torch.Tensor]:
        """Return a buffer of at least so many bytes; replaces one that is too small."""
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
        """Free what was replaced: whoever read it reads its successor now, or has gone."""
        with self._lock:
            replaced, self._replaced = self._replaced, {}
        for memory in replaced.values():
            memory.close()

    def close(self) -> None:
        """Stop listening, and let go of all buffers; readers keep what they have mapped."""
        self._server.close()
        self.let_go()
        with self._lock:
            buffers, self._buffers = self._buffers, {}
        for _, memory, _ in buffers.values():
            memory.close()


class ArenaView:
    """Another process's side."""

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
        """Return a buffer, mapped to be read; it stays so until another generation is asked for."""
        found = self._mapped.get(name.number)
        if found is not None and found[0] == name:
            return found[1]
        question = msgspec.msgpack.encode(name)
        try:
            # Who names a buffer listens already.
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
        """Let go of all buffers; tensors that look into them stay valid."""
        mapped: Any = self._mapped
        self._mapped = {}
        for _, memory in mapped.values():
            memory.close()
