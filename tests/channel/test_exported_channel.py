"""Steps in memory of the sender's own, exported by descriptor: by a memfd, on any machine.

`tests/device/test_cuda_channel.py` has the same of a GPU.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Spawner

from shmbus import CapacityError, PeerGoneError, WaitTimeoutError
from shmbus.channel.endpoint import channel_path
from shmbus.segment.names import memory_socket
from shmbus.tensors import (
    ChannelClosedError,
    ChannelError,
    StepFailedError,
    TensorChannel,
    TensorReceiver,
    TensorSender,
)
from shmbus.tensors.sender import ExportedWriter

SPECS = {"x": ("int64", (None,)), "y": ("bfloat16", (None, 8))}
STEPS = 150
NEVER_S = 3600.0

RECEIVER = """
import os, sys, torch
from shmbus.tensors import ChannelClosedError, TensorChannel
specs = {"x": ("int64", (None,)), "y": ("bfloat16", (None, 8))}
mapped = lambda: sum("memfd:shmbus" in line for line in open("/proc/self/maps"))
views = sys.argv[2] == "views"
with TensorChannel.open(sys.argv[1], specs=specs, wait=30, views=views) as rx:
    print("ready", flush=True)
    step, wrong, most = 0, 0, 0
    try:
        while True:
            with rx.recv(60) as item:
                rows = 1 + step * 7919 % 61
                wrong += item.step != step or item["x"].tolist() != list(range(step, step + rows))
                wrong += item["y"].shape != (rows, 8) or bool((item["y"] != step % 128).any())
                most = max(most, mapped())
                step += 1
    except ChannelClosedError:
        print("steps", step, "wrong", wrong, "mapped", most, flush=True)
"""

SENDER = """
import sys, time
from shmbus.tensors import TensorChannel
import torch
tx = TensorChannel.create(sys.argv[1], carrier="memfd", slots=int(sys.argv[3]))
for _ in range(int(sys.argv[2])):
    step = tx.next_step
    tx.send({"x": torch.arange(step, step + 5), "y": torch.zeros(5, 8, dtype=torch.bfloat16)})
print("sent", flush=True)
time.sleep(600)
"""


def made(step: int, rows: int | None = None) -> dict[str, torch.Tensor]:
    rows = 1 + step * 7919 % 61 if rows is None else rows
    x = torch.arange(step, step + rows)
    return {"x": x, "y": torch.full((rows, 8), float(step % 128), dtype=torch.bfloat16)}


@pytest.fixture
def both(bus_name: str) -> Iterator[tuple[TensorSender, TensorReceiver]]:
    with (
        TensorChannel.create(bus_name, carrier="memfd", max_bytes="1MiB", timeout=20) as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):
        yield sender, receiver


def buffers_of(sender: TensorSender) -> int:
    writer = sender._writer
    assert isinstance(writer, ExportedWriter)
    return len(writer._arena._buffers) + len(writer._arena._replaced)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", ["copies", "views"])
def test_steps_arrive_bit_for_bit_in_order_in_at_most_one_buffer_more_than_slots(
    bus_name: str, spawn: Spawner, how: str
) -> None:
    most = 0
    with TensorChannel.create(bus_name, carrier="memfd") as sender:
        child = spawn.script(RECEIVER, bus_name, how)
        child.expect("ready", timeout=60)
        for step in range(STEPS):
            sender.send(made(step), step=step, timeout=60)
            most = max(most, buffers_of(sender))
        sender.close()
        assert f"steps {STEPS} wrong 0 mapped 2" in child.finish(timeout=60)
    assert most == 3
    assert not os.path.exists(channel_path(bus_name))
    assert not os.path.exists(memory_socket("channel", bus_name))


class Gate:
    """Work of a device that is done when the test says so."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def synchronize(self) -> None:
        assert self._open.wait(20)

    def query(self) -> bool:
        return self._open.is_set()

    def happen(self) -> None:
        self._open.set()


def gated(sender: TensorSender, monkeypatch: pytest.MonkeyPatch) -> list[Gate]:
    writer = sender._writer
    assert isinstance(writer, ExportedWriter)
    gates: list[Gate] = []

    def record(device: torch.device) -> Any:
        gates.append(Gate())
        return gates[-1]

    monkeypatch.setattr(writer._completion, "_record", record)
    return gates


def test_a_step_is_sent_when_its_copies_are_there_and_the_next_ones_do_not_wait_for_that(
    both: tuple[TensorSender, TensorReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = both
    gates = gated(sender, monkeypatch)
    for step in range(2):
        assert sender.send(made(step, 3), step=step) == step
    with pytest.raises(WaitTimeoutError):
        receiver.recv(0.05)
    with pytest.raises(WaitTimeoutError, match="step 2, which step 0 still has"):
        sender.send(made(2, 3), step=2, timeout=0.05)
    for step in range(2):
        gates[step].happen()
        with receiver.recv(20) as item:
            assert (item.step, item["x"].tolist()) == (step, list(range(step, step + 3)))
    assert sender.next_step == 2
    sender.send(made(2, 3))
    gates[2].happen()
    with receiver.recv(20) as item:
        assert item["x"].tolist() == [2, 3, 4]


def test_a_small_step_that_is_copied_at_once_is_sent_by_the_call_itself(
    both: tuple[TensorSender, TensorReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = both
    monkeypatch.setattr(Gate, "query", lambda self: True)
    gated(sender, monkeypatch)
    for step in range(3):
        sender.send(made(step, 3))
        assert sender._channel.sent_step == step
        with receiver.recv(20) as item:
            assert item.step == step
    assert isinstance(sender._writer, ExportedWriter)
    assert sender._writer._completion._thread is None


def test_what_keeps_a_step_from_being_sent_keeps_those_behind_it_and_is_told(
    both: tuple[TensorSender, TensorReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = both
    sender.send(made(0, 3))
    with receiver.recv(20) as item:
        assert item.step == 0
    gates = gated(sender, monkeypatch)
    failing = [ZeroDivisionError()]
    post = sender._channel.post

    def fail_once(meta: bytes) -> None:
        if failing:
            raise failing.pop()
        post(meta)

    monkeypatch.setattr(sender._channel, "post", fail_once)
    sender.send(made(1, 3))
    sender.send(made(2, 3))
    for gate in gates:
        gate.happen()
    with pytest.raises(ZeroDivisionError):
        sender.next_step  # noqa: B018
    assert sender.next_step == 1
    sender.send(made(7, 3), step=1)
    gates[2].happen()
    with receiver.recv(20) as item:
        assert (item.step, item["x"].tolist()) == (1, [7, 8, 9])


def test_a_view_that_outlives_its_context_is_an_error_and_the_step_comes_again(
    bus_name: str,
) -> None:
    with (
        TensorChannel.create(bus_name, carrier="memfd", timeout=20) as sender,
        TensorChannel.open(bus_name, specs=SPECS, views=True) as receiver,
    ):
        sender.send(made(0))
        with (
            pytest.raises(ChannelError, match="a view of it outlives its context"),
            receiver.recv(5) as item,
        ):
            kept = item["x"][:1]
        del kept
        assert sender.acked_step == -1
        with receiver.recv(5) as item:
            assert (item.step, item["x"].tolist()) == (0, [0])
        assert sender.acked_step == 0


def test_a_buffer_grows_to_the_exact_size_and_what_it_replaced_is_freed(
    both: tuple[TensorSender, TensorReceiver],
) -> None:
    sender, receiver = both
    writer = sender._writer
    assert isinstance(writer, ExportedWriter)
    for step, rows in enumerate([1, 1, 100, 1000, 10, 10]):
        sender.send(made(step, rows))
        with receiver.recv(5) as item:
            assert item["x"].tolist() == list(range(step, step + rows))
    assert sender._writer.growths == 4
    # x and y, of which y begins at a multiple of 256: steps 2 and 3 are the largest.
    assert writer.nbytes == (1024 + 100 * 16) + (8192 + 1000 * 16)


def test_what_is_too_large_or_elsewhere_is_named_and_the_channel_stays_usable(
    both: tuple[TensorSender, TensorReceiver],
) -> None:
    sender, receiver = both
    with pytest.raises(CapacityError, match="a buffer may grow to max_bytes=1048576"):
        sender.send(made(0, 1 << 17))
    with pytest.raises(ValueError, match="'x': expected a tensor on the agreed device 'cpu', got"):
        sender.send({**made(0), "x": torch.ones(1, dtype=torch.int64, device="meta")})
    sender.skip(reason="nothing")
    sender.send(made(1))
    with pytest.raises(ChannelError, match="skipped: nothing"):
        receiver.recv(5)
    with receiver.recv(5) as item:
        assert item.step == 1


@pytest.mark.timeout(60)
def test_a_receiver_that_has_the_memory_gets_what_a_killed_sender_has_sent(
    bus_name: str, spawn: Spawner
) -> None:
    child = spawn.script(SENDER, bus_name, 1, 1)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        with pytest.raises(ZeroDivisionError), receiver.recv(5) as item:
            raise ZeroDivisionError
        child.kill()
        with receiver.recv(5) as item:
            assert item["x"].tolist() == list(range(5))
        with pytest.raises(PeerGoneError):
            receiver.recv(NEVER_S)
        successor = spawn.script(SENDER, bus_name, 1, 1)
        with receiver.recv(30) as item:
            assert (item.step, item["x"].tolist()) == (1, list(range(1, 6)))
        successor.kill()


@pytest.mark.timeout(60)
def test_a_step_whose_memory_died_with_its_sender_fails_and_the_next_one_comes(
    bus_name: str, spawn: Spawner
) -> None:
    child = spawn.script(SENDER, bus_name, 2, 2)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        child.kill()
        for step in range(2):
            with pytest.raises(StepFailedError, match="memory went with the sender") as lost:
                receiver.recv(5)
            assert lost.value.step == step
        successor = spawn.script(SENDER, bus_name, 1, 2)
        successor.expect("sent", timeout=60)
        while True:
            try:
                with receiver.recv(30) as item:
                    assert (item.step, item["x"].tolist()) == (2, list(range(2, 7)))
                break
            except PeerGoneError:
                continue
        successor.kill()


@pytest.mark.timeout(60)
def test_steps_that_died_with_their_sender_come_again_once_both_sides_resume(
    bus_name: str, spawn: Spawner
) -> None:
    child = spawn.script(SENDER, bus_name, 2, 2)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        state = receiver.state_dict()
        child.kill()
        for _ in range(2):
            with pytest.raises(StepFailedError, match="resume both sides from a checkpoint"):
                receiver.recv(5)
        with pytest.raises(PeerGoneError):
            receiver.recv(NEVER_S)
        with TensorChannel.create(bus_name, carrier="memfd", timeout=20) as successor:
            successor.load_state_dict(state)
            receiver.load_state_dict(state)
            for step in range(3):
                successor.send(made(step, 3), step=step)
                with receiver.recv(5) as item:
                    assert (item.step, item["x"].tolist()) == (step, list(range(step, step + 3)))


@pytest.mark.timeout(60)
def test_a_successor_sends_again_what_nobody_had_received(bus_name: str, spawn: Spawner) -> None:
    child = spawn.script(SENDER, bus_name, 2, 2)
    child.expect("sent", timeout=60)
    child.kill()
    with TensorChannel.create(bus_name, carrier="memfd", timeout=0.1) as sender:
        assert sender.next_step == 0
        for step in range(2):
            sender.send(made(step, 3))
        with TensorChannel.open(bus_name, specs=SPECS) as receiver:
            for step in range(2):
                with receiver.recv(5) as item:
                    assert item["x"].tolist() == list(range(step, step + 3))


def test_a_sender_that_closes_waits_for_a_receiver_that_is_slow(
    bus_name: str, spawn: Spawner
) -> None:
    child = spawn.script(RECEIVER, bus_name, "copies")
    with TensorChannel.create(bus_name, carrier="memfd") as sender:
        for step in range(2):
            sender.send(made(step))
    assert "steps 2 wrong 0" in child.finish()


def test_a_sender_that_closes_waits_no_longer_than_its_timeout(bus_name: str) -> None:
    sender = TensorChannel.create(bus_name, carrier="memfd", timeout=0.05)
    sender.send(made(0))
    sender.close()
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        with pytest.raises(StepFailedError, match="memory went with the sender"):
            receiver.recv(5)
        with pytest.raises(ChannelClosedError):
            receiver.recv(5)


def test_a_stopped_sender_is_slow_and_nothing_is_lost(bus_name: str, spawn: Spawner) -> None:
    child = spawn.script(SENDER, bus_name, 1, 1)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        receiver._reader._buffers._timeout = 0.2
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(WaitTimeoutError, match="the living sender"):
            receiver.recv(5)
        child.send_signal(signal.SIGCONT)
        with receiver.recv(20) as item:
            assert item.step == 0
    child.kill()
