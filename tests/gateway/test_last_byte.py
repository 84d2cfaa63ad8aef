"""The last byte of an answer and its note, with a death at each point in between, over real TCP."""

from __future__ import annotations

import ctypes
import mmap
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "shmbus_ext"
COMPILER = shlex.split(os.environ.get("CC", "cc"))
NUMBER = 7
#: Sends over the connection whose descriptor it inherits, and notes that in the file.
SEND = """
import ctypes, mmap, sys
library, descriptor, path, number = sys.argv[1:]
send = ctypes.CDLL(library).last_byte_send
byte, value = ctypes.c_char(b"}"), ctypes.c_uint64(int(number))
with open(path, "r+b") as file:
    note = mmap.mmap(file.fileno(), 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(note))
sys.exit(send(int(descriptor), byte, ctypes.c_void_p(address), value))
"""

pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, with its points compiled in."""
    built = tmp_path_factory.mktemp("last_byte") / "last_byte.so"
    sources = [CORE / "gateway" / "last_byte.c", CORE / "ring" / "failpoints.c"]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-DSHMBUS_FAILPOINTS=1", f"-I{CORE}", "-shared", "-fPIC"]
    subprocess.run([*COMPILER, *flags, *map(str, sources), "-o", str(built)], check=True)
    return built


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=20)
        return client, listener.accept()[0]


def received(client: socket.socket) -> bytes:
    """What a client has when its connection has ended."""
    found = b""
    try:
        while data := client.recv(100):
            found += data
    except ConnectionResetError:
        found += b" reset"
    return found


def send_in_a_child(
    library: Path, directory: Path, point: str, *, ended: bool = False
) -> tuple[int, int, bytes]:
    """Its exit status, the number that is noted, and what the client has."""
    path = directory / "notes"
    path.write_bytes(bytes(4096))
    client, server = connected()
    with client, server:
        if ended:
            client.close()
        child = subprocess.run(
            [sys.executable, "-c", SEND, library, str(server.fileno()), path, str(NUMBER)],
            env={**os.environ, "SHMBUS_FAILPOINT": f"{point}:1:kill" if point else ""},
            pass_fds=[server.fileno()], check=False, timeout=20,
        )  # fmt: skip
        server.close()
        noted = int.from_bytes(path.read_bytes()[:8], "little")
        return child.returncode, noted, b"" if ended else received(client)


def test_without_a_death_the_byte_is_sent_and_noted(library: Path, tmp_path: Path) -> None:
    assert send_in_a_child(library, tmp_path, "") == (0, NUMBER, b"}")


def test_a_death_before_the_note_resets_the_connection(library: Path, tmp_path: Path) -> None:
    status, noted, arrived = send_in_a_child(library, tmp_path, "answer-held")
    assert (status, noted) == (-signal.SIGKILL, 0)
    assert b"}" not in arrived


def test_a_death_after_the_note_sends_the_byte(library: Path, tmp_path: Path) -> None:
    status, noted, arrived = send_in_a_child(library, tmp_path, "answer-noted")
    assert (status, noted, arrived) == (-signal.SIGKILL, NUMBER, b"}")


def test_a_death_in_the_instant_between_has_the_batch_come_again(
    library: Path, tmp_path: Path
) -> None:
    # The one place where both can have it: the other order would lose it.
    status, noted, arrived = send_in_a_child(library, tmp_path, "answer-let-go")
    assert (status, noted, arrived) == (-signal.SIGKILL, 0, b"}")


def test_a_full_socket_takes_no_byte_and_nothing_is_noted(library: Path) -> None:
    send = ctypes.CDLL(str(library)).last_byte_send
    client, server = connected()
    note = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(note))

    def send_last() -> int:
        byte, at, number = ctypes.c_char(b"}"), ctypes.c_void_p(address), ctypes.c_uint64(NUMBER)
        return int(send(server.fileno(), byte, at, number))

    with client, server:
        server.setblocking(False)
        sent = 0
        with pytest.raises(BlockingIOError):
            while True:
                sent += server.send(b" " * 65_536)
        assert send_last() == 11  # EAGAIN
        assert note[0] == 0
        while sent:
            sent -= len(client.recv(min(sent, 1 << 20)))
        # The connection is as it was before: it ends in order, with the byte.
        assert send_last() == 0
        assert note[0] == NUMBER
        server.close()
        assert received(client) == b"}"


def test_a_client_that_has_gone_is_an_error(library: Path, tmp_path: Path) -> None:
    client, server = connected()
    with server:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        send = ctypes.CDLL(str(library)).last_byte_send
        note = mmap.mmap(-1, 4096)
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(note)))
        assert send(server.fileno(), ctypes.c_char(b"}"), address, ctypes.c_uint64(NUMBER)) > 0
        assert note[0] == 0
