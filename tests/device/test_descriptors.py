"""File descriptors between processes: to this user's only, once for each that asks."""

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from conftest import Spawner, beside, open_descriptors, together

from shmbus import PeerGoneError
from shmbus.tensors.device.arena import DescriptorServer, fetch_descriptor
from shmbus.tensors.device.memory import MAX_BYTES, MAX_MESSAGE_BYTES, DeviceHandle

ASKER = """
import os, sys
from shmbus.tensors.device.arena import fetch_descriptor
message, descriptor = fetch_descriptor(sys.argv[1], b"chunk 0", 20.0)
print(message.decode(), os.pread(descriptor, 100, 0).decode())
"""


def give(question: bytes) -> tuple[bytes, int | None]:
    if question == b"none":
        return b"nothing to map", None
    if not question.startswith(b"chunk"):
        raise ValueError(f"expected 'chunk N', got {question!r}")
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"content of " + question)
    return b"the answer to " + question, descriptor


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "socket")


@pytest.fixture
def server(place: str) -> Iterator[DescriptorServer]:
    server = DescriptorServer(place, give)
    yield server
    server.close()
    assert not os.path.exists(place)


def settled_descriptors() -> Counter[str]:
    seen = [open_descriptors()]
    while len(seen) < 1000 and (len(seen) < 10 or len({x.total() for x in seen[-10:]}) > 1):
        threading.Event().wait(0.01)
        seen.append(open_descriptors())
    return seen[-1]


def test_a_descriptor_crosses(server: DescriptorServer, place: str, spawn: Spawner) -> None:
    said = spawn.script(ASKER, place).finish()
    assert said.split("\n")[0] == "the answer to chunk 0 content of chunk 0"


def test_an_answer_needs_no_descriptor(server: DescriptorServer, place: str) -> None:
    assert fetch_descriptor(place, b"none", 5.0) == (b"nothing to map", None)


def test_a_refusal_reaches_its_asker_with_the_reason(server: DescriptorServer, place: str) -> None:
    with pytest.raises(ValueError, match="expected 'chunk N', got b'nonsense'"):
        fetch_descriptor(place, b"nonsense", 5.0)


def test_many_askers_at_once_leave_no_descriptor_open(server: DescriptorServer, place: str) -> None:
    fetch_descriptor(place, b"none", 5.0)
    # The server may not have closed the connection yet that this ended.
    before = settled_descriptors()

    def ask(number: int) -> None:
        descriptor = fetch_descriptor(place, b"chunk %d" % number, 20.0)[1]
        assert descriptor is not None
        assert os.pread(descriptor, 100, 0) == b"content of chunk %d" % number
        os.close(descriptor)

    together(ask, range(50))
    # The last answering threads close their connections a moment after their askers have read.
    assert not settled_descriptors() - before


def test_nobody_there_is_a_peer_that_has_gone(place: str) -> None:
    with pytest.raises(PeerGoneError, match="no process shares device memory"):
        fetch_descriptor(place, b"none", 0.1)


def test_an_asker_may_come_before_the_server(place: str) -> None:
    with beside(fetch_descriptor, place, b"none", 20.0) as asked:
        server = DescriptorServer(place, give)
    server.close()
    assert asked.result() == (b"nothing to map", None)


def test_the_socket_of_a_dead_server_is_replaced_and_nothing_else(place: str) -> None:
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(place)
    dead.close()
    server = DescriptorServer(place, give)
    with pytest.raises(FileExistsError, match="expected nothing there"):
        DescriptorServer(place, give)
    assert fetch_descriptor(place, b"none", 5.0)[0] == b"nothing to map"
    server.close()
    Path(place).write_text("a file of somebody's")
    with pytest.raises(FileExistsError):
        DescriptorServer(place, give)
    assert Path(place).read_text() == "a file of somebody's"


def test_a_server_that_dies_before_it_answers_is_a_peer_that_has_gone(place: str) -> None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(place)
    listening.listen()

    def close_at_once() -> None:
        connection, _ = listening.accept()
        connection.close()

    with beside(close_at_once), pytest.raises(PeerGoneError):
        fetch_descriptor(place, b"none", 5.0)
    listening.close()


GOOD = DeviceHandle("vmm", bytes(16), 100, 2 << 20)


def test_a_handle_comes_back_as_it_was_sent() -> None:
    assert DeviceHandle.decode(GOOD.encode()) == GOOD
    ipc = DeviceHandle("ipc", b"u" * 16, 64, 64, b"h" * 64)
    assert DeviceHandle.decode(ipc.encode()) == ipc


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (b"", "not a message"),
        (b"\x80\x04cposix\nsystem\n", "not a message"),  # the beginning of a pickle
        (bytes(MAX_MESSAGE_BYTES + 1), "at most 512 bytes"),
        (msgspec.msgpack.encode({"type": "device-memory/2"}), "not a message"),
        (msgspec.structs.replace(GOOD, uuid=b"short").encode(), "a UUID of 16"),
        (msgspec.structs.replace(GOOD, handle=b"h" * 64).encode(), "a handle of 0"),
        (msgspec.structs.replace(GOOD, kind="ipc", handle=b"h").encode(), "a handle of 64"),
        (msgspec.structs.replace(GOOD, nbytes=0).encode(), "0 < bytes"),
        (msgspec.structs.replace(GOOD, nbytes=3 << 20).encode(), "bytes <= mapped"),
        (msgspec.structs.replace(GOOD, mapped_nbytes=MAX_BYTES + 1).encode(), "mapped bytes <="),
    ],
)
def test_a_damaged_handle_is_refused(message: bytes, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DeviceHandle.decode(message)
