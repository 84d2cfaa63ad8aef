"""File descriptors from one process to others, over a Unix socket: who shares device memory.

Invariants: both sides ask the kernel who is at the other end, and nothing goes to, or is taken
from, another user; what cannot be sent costs its asker only; a wait has a deadline; a server that
nobody has any more ends as a closed one does.
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
from typing import Final

from shmbus.errors import PeerGoneError

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
