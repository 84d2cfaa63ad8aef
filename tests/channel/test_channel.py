"""A channel of bytes: slots, memory, bad input, and the bytes of its layout."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from shmbus import (
    BusBusyError,
    BusClosedError,
    BusNotFoundError,
    CapacityError,
    DamagedError,
    LayoutMismatchError,
    WaitTimeoutError,
)
from shmbus.base.arguments import process_label
from shmbus.channel import (
    ChannelReceiver,
    ChannelSender,
    StepOrderError,
    unlink_channel,
)
from shmbus.channel.endpoint import channel_path, living_statement
from shmbus_ext import _core


def bytes_of(receiver: ChannelReceiver) -> bytes:
    message = receiver.receive(timeout=5)
    data = bytes(memoryview(message.memory))
    receiver.ack()
    return data


def test_a_side_without_a_label_is_named_by_its_script(bus_name: str) -> None:
    with ChannelSender(bus_name) as sender, ChannelReceiver(bus_name) as receiver:
        with pytest.raises(WaitTimeoutError) as told:
            receiver.receive(timeout=0.01)
        assert f"the sender {process_label()!r} (pid {os.getpid()})" in str(told.value)
        sender.send(b"x")
        receiver.receive(timeout=5)
        receiver.ack()
        assert repr(sender) == f"<ChannelSender {bus_name!r} acknowledged up to 0>"
    assert repr(sender) == f"<ChannelSender {bus_name!r} closed>"


def test_what_a_living_sender_states_is_read_without_being_a_side(bus_name: str) -> None:
    assert living_statement(bus_name) is None, "no channel"
    sender = ChannelSender(bus_name)
    assert living_statement(bus_name) == b""
    sender.state(b"eight ranks")
    with ChannelReceiver(bus_name):
        assert living_statement(bus_name) == b"eight ranks", "beside the receiver"
        with Path(channel_path(bus_name)).open("r+b") as file:
            file.seek(file.read(1 << 20).index(b"eight ranks"))
            file.write(b"E")
        with pytest.raises(DamagedError, match="does not match its checksum"):
            living_statement(bus_name)
        sender.close()
        assert living_statement(bus_name) is None, "it has left"


def test_a_step_waits_only_for_the_one_that_has_its_slot(bus_name: str) -> None:
    with ChannelSender(bus_name, slots=2) as sender, ChannelReceiver(bus_name) as receiver:
        sender.send(b"0")
        sender.send(b"1")
        with pytest.raises(WaitTimeoutError, match=r"slot 0 for step 2, which step 0 still has"):
            sender.send(b"2", timeout=0.05)
        assert bytes_of(receiver) == b"0"
        sender.send(b"2", timeout=5)
        assert [bytes_of(receiver), bytes_of(receiver)] == [b"1", b"2"]


def test_memory_is_exact_to_the_page_and_flat_after_the_largest_step(bus_name: str) -> None:
    with ChannelSender(bus_name, slots=2) as sender, ChannelReceiver(bus_name) as receiver:

        def turn(size: int) -> int:
            sender.send(bytes(size))
            assert len(bytes_of(receiver)) == size
            return os.stat(channel_path(bus_name)).st_blocks * 512

        tables = turn(1) - 4096
        for size in (1, 100_000, 100_000):
            used = turn(size)
        assert used == tables + 2 * -(-100_000 // 4096) * 4096
        assert {turn(size) for size in (1, 50_000, 100_000, 99_999)} == {used}
        assert sender._counts()[3] == 4


def test_a_view_that_outlives_its_acknowledgement_keeps_its_values(bus_name: str) -> None:
    with ChannelSender(bus_name, slots=1) as sender, ChannelReceiver(bus_name) as receiver:
        kept = []
        for turn in range(5):
            sender.send(bytes([turn]) * 10_000)
            message = receiver.receive(timeout=5)
            kept.append(np.frombuffer(memoryview(message.memory), np.uint8))
            receiver.ack()
            with pytest.raises(BufferError, match="acknowledged"):
                memoryview(message.memory)
    assert [set(view.tolist()) for view in kept] == [{turn} for turn in range(5)]


class ChannelReceiverAfter:
    def __init__(self, name: str) -> None:
        self.sender = ChannelSender(name)
        self.receiver = ChannelReceiver(name)

    def __enter__(self) -> tuple[ChannelSender, ChannelReceiver]:
        return self.sender, self.receiver

    def __exit__(self, *ignored: object) -> None:
        self.sender.close()
        self.receiver.close()


def test_each_side_is_one_process_and_a_closed_handle_says_so(bus_name: str) -> None:
    with ChannelReceiverAfter(bus_name) as (sender, receiver):
        with pytest.raises(BusBusyError, match="living sender"):
            ChannelSender(bus_name)
        with pytest.raises(BusBusyError, match="living receiver"):
            ChannelReceiver(bus_name)
        with pytest.raises(ValueError, match="slots=2"):
            ChannelSender(bus_name, slots=3)
        receiver.close()
        with pytest.raises(BusClosedError, match="closed"):
            receiver.receive()
        sender.send(b"for a successor")
    with pytest.raises(BusNotFoundError, match="no channel"):
        ChannelReceiver(bus_name + "x")
    unlink_channel(bus_name)


def test_a_refused_step_leaves_the_channel_usable(bus_name: str) -> None:
    with (
        ChannelSender(bus_name, max_bytes="64KiB") as sender,
        ChannelReceiver(bus_name) as receiver,
    ):
        with pytest.raises(StepOrderError, match="expected step 0, got step 2: steps 0 to 1"):
            sender.send(b"x", step=2)
        with pytest.raises(CapacityError, match="step 0 has 70000 bytes"):
            sender.send(bytes(70_000))
        sender.send(b"x", step=0)
        with pytest.raises(StepOrderError, match="sent already"):
            sender.skip("no", step=0)
        assert bytes_of(receiver) == b"x"


def test_a_sender_that_resumes_withdraws_what_was_not_acknowledged(bus_name: str) -> None:
    with ChannelSender(bus_name) as sender:
        with ChannelReceiver(bus_name) as receiver:
            sender.send(b"0")
            sender.send(b"1")
            assert bytes_of(receiver) == b"0"
            sender.resume_after(0)
            assert sender.next_step == 2, "the channel and the checkpoint agree"
            with pytest.raises(StepOrderError):
                sender.send(b"1", step=1)
            assert bytes_of(receiver) == b"1"
            sender.send(b"2")
            with pytest.raises(Exception, match="living receiver still has steps up to 2"):
                sender.resume_after(7)
        sender.resume_after(7)
        assert (sender.next_step, sender.acked_step) == (8, 7)
        sender.send(b"8", step=8)
        with ChannelReceiver(bus_name) as receiver:
            receiver.resume_after(5)
            with pytest.raises(StepOrderError, match="expected step 6, got step 8"):
                receiver.receive(timeout=5)
            receiver.resume_after(8)
            sender.send(b"9", step=9)
            assert receiver.receive(timeout=5).step == 9
            receiver.ack()


def test_header_rows_and_sides_lie_where_the_page_says(bus_name: str) -> None:
    with ChannelReceiverAfter(bus_name) as (sender, receiver):
        sender.send(b"payload", meta=b"meta")
        receiver.state(b"hello")
        sender.send(b"x" * 5000)
        assert bytes_of(receiver) == b"payload"
        with open(channel_path(bus_name), "rb") as file:
            data = file.read(4096 + 2 * 65536 + 4096)
        sender.close()
        assert bytes_of(receiver) == b"x" * 5000
    assert data[:8] == b"SHBPCHN1"
    stride = 16 << 30
    assert struct.unpack_from("<II4Q", data, 8) == (
        1, 2, 135168 + 2 * stride, 135168, stride, stride,
    )  # fmt: skip
    assert struct.unpack_from("<I", data, 56)[0] == _core.crc32c(data[8:56])
    assert struct.unpack_from("<QqQ", data, 128) == (2, 0, 2)  # sent, step_base, growths
    assert struct.unpack_from("<Q", data, 256) == (1,)  # acked
    assert struct.unpack_from("<IIQ", data, 512) == (1, os.getpid(), 1)
    assert struct.unpack_from("<IIQ", data, 768) == (1, os.getpid(), 1)
    row = data[1024:1280]
    assert struct.unpack_from("<QI", row, 0) == (4096, _core.crc32c(row[12:]))
    assert struct.unpack_from("<IQqQQ", row, 12) == (1, 0, 0, 7, 4)
    assert struct.unpack_from("<I", row, 56) == (_core.crc32c(b"meta"),)
    statement = data[4096 + 65536 :]
    assert struct.unpack_from("<QII", statement) == (2, 5, _core.crc32c(b"hello"))
    assert statement[16:21] == b"hello"
    assert data[135168 : 135168 + 7] == b"payload"
    assert data[135168 + 64 : 135168 + 68] == b"meta"


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"\xff", "is no channel"),
        (8, struct.pack("<I", 9), "layout version 9, this process needs 1"),
        (12, struct.pack("<I", 7), "header .* is damaged"),
    ],
)
def test_a_foreign_form_is_refused(bus_name: str, offset: int, value: bytes, message: str) -> None:
    with ChannelSender(bus_name) as sender:
        sender.send(b"0")
    with open(channel_path(bus_name), "r+b") as file:
        file.seek(offset)
        file.write(value)
    with pytest.raises(LayoutMismatchError, match=message):
        ChannelReceiver(bus_name)
    os.truncate(channel_path(bus_name), 10_000)
    with pytest.raises(LayoutMismatchError):
        ChannelReceiver(bus_name)


def test_a_row_that_was_scribbled_on_bounds_no_access(bus_name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with ChannelReceiverAfter(bus_name) as (sender, receiver):
        sender.send(b"0" * 100, meta=b"meta")
        with open(channel_path(bus_name), "r+b", buffering=0) as file:
            row = os.pread(file.fileno(), 256, 1024)
            for _ in range(500):
                at = int(rng.integers(12, 256))
                byte = bytes([row[at] ^ int(rng.integers(1, 256))])
                os.pwrite(file.fileno(), byte, 1024 + at)
                with pytest.raises(DamagedError, match="not usable any more"):
                    receiver.receive(timeout=1)
                os.pwrite(file.fileno(), row, 1024)
            os.pwrite(file.fileno(), struct.pack("<Q", 99), 128)  # sent
            with pytest.raises(DamagedError):
                receiver.receive(timeout=1)
            os.pwrite(file.fileno(), struct.pack("<Q", 1), 128)
        assert bytes_of(receiver) == b"0" * 100
