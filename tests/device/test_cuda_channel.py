"""The channel over device memory: bit for bit, in flat memory, whoever dies; needs a GPU."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from conftest import Spawner

from shmbus import CapacityError, DeviceMismatchError, PeerGoneError
from shmbus.channel.endpoint import channel_path
from shmbus.segment.names import memory_socket
from shmbus.tensors import (
    ChannelError,
    CudaCarrier,
    SpecMismatchError,
    StepFailedError,
    StepOrderError,
    StepSkippedError,
    TensorChannel,
    TensorSender,
)
from shmbus.tensors.sender import ExportedWriter

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
pytestmark = [pytest.mark.gpu, needs_gpu]

SPECS = {"hidden": ("bfloat16", (None, 64)), "ids": ("int64", (None,))}
STEPS = int(os.environ.get("SHMBUS_CUDA_STEPS", "500"))
#: The longest step of a run comes within as many.
PERIOD = 61
NEVER_S = 3600.0

# The same steps can be made by either side from their number alone.
MADE = """
import torch
def made(step, device="cuda:0", rows=None):
    rows = (1 + (step * 7919) % 61) * 16 if rows is None else rows
    bits = torch.arange(rows * 64, dtype=torch.int64, device=device) * 40503 + step * 2654435761
    hidden = (bits & 0xFFFF).sub(32768).to(torch.int16).view(torch.bfloat16).view(rows, 64)
    return {"hidden": hidden, "ids": bits[:rows].clone()}
def wrong(step, item, device="cuda:0"):
    want = made(step, device, item["ids"].numel())
    return sum(not torch.equal(item[n].view(torch.uint8), want[n].view(torch.uint8)) for n in want)
"""

RECEIVER = (
    MADE
    + """
import gc, sys
from shmbus.tensors import ChannelClosedError, TensorChannel
from shmbus.tensors.device.memory import _Mapping
def own(device):  # what this process has there; others may use the device meanwhile
    mapped = sum(each.nbytes for each in gc.get_objects() if type(each) is _Mapping)
    return mapped + torch.cuda.memory_allocated(device)
name, how, device, period = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
specs = {"hidden": ("bfloat16", (None, 64)), "ids": ("int64", (None,))}
options = {} if device == "-" else {"device": device}
with TensorChannel.open(name, specs=specs, wait=30, views=how == "views", **options) as rx:
    print("ready", flush=True)
    step, bad, early = 0, 0, None
    try:
        while True:
            with rx.recv(60) as item:
                bad += item.step != step or item.meta != {"n": step}
                bad += wrong(step, item, str(item["ids"].device))
                step += 1
                on = item["ids"].device
            if step == 2 * period:
                torch.cuda.synchronize()
                early = own(on)
    except ChannelClosedError:
        torch.cuda.synchronize()
        grown = 0 if early is None else max(0, own(on) - early)
        print("steps", step, "wrong", bad, "on", on, "grown", grown, flush=True)
"""
)

SENDER = (
    MADE
    + """
import sys, time
from shmbus.tensors import TensorChannel
tx = TensorChannel.create(sys.argv[1], device="cuda:0", slots=int(sys.argv[3]))
for _ in range(int(sys.argv[2])):
    step = tx.next_step
    tx.send(made(step, rows=16), meta={"n": step})
tx.next_step  # all of it is sent
print("sent", flush=True)
time.sleep(600)
"""
)

scope: dict[str, Any] = {}
exec(MADE, scope)
made, wrong = scope["made"], scope["wrong"]


def writer_of(sender: TensorSender) -> ExportedWriter:
    writer = sender._writer
    assert isinstance(writer, ExportedWriter)
    return writer


@pytest.mark.timeout(280)
@pytest.mark.parametrize("how", ["copies", "views"])
@pytest.mark.parametrize("kind", ["vmm", "ipc"])
def test_steps_of_varying_lengths_arrive_bit_for_bit_in_order_in_flat_memory(
    bus_name: str, spawn: Spawner, kind: Any, how: str
) -> None:
    carrier = CudaCarrier(device="cuda:0", kind=kind)
    most = 0
    with TensorChannel.create(bus_name, carrier=carrier) as sender:
        child = spawn.script(RECEIVER, bus_name, how, "-", PERIOD)
        child.expect("ready", timeout=60)
        for step in range(STEPS):
            tensors = made(step)
            sender.send(tensors, step=step, meta={"n": step}, timeout=60)
            for tensor in tensors.values():
                tensor.zero_()  # on the stream that was current: after the copy
            arena = writer_of(sender)._arena
            most = max(most, len(arena._buffers) + len(arena._replaced))
        growths = sender._writer.growths
        sender.close()
        assert f"steps {STEPS} wrong 0 on cuda:0 grown 0" in child.finish(timeout=120)
    assert most == 3
    assert growths < PERIOD
    assert not os.path.exists(channel_path(bus_name))
    assert not os.path.exists(memory_socket("channel", bus_name))


@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", ["copies", "views"])
@pytest.mark.parametrize("rows", [16, 1 << 15])
def test_steps_that_are_alike_arrive_bit_for_bit_from_any_stream(
    bus_name: str, spawn: Spawner, rows: int, how: str
) -> None:
    with TensorChannel.create(bus_name, device="cuda:0") as sender:
        child = spawn.script(RECEIVER, bus_name, how, "-", PERIOD)
        child.expect("ready", timeout=60)
        steps = 200
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for step in range(steps):
            with torch.cuda.stream(side if step % 3 == 0 else torch.cuda.default_stream()):
                tensors = made(step, rows=rows)
                tensors["hidden"].requires_grad_(step == 100)
                sender.send(tensors, step=step, meta={"n": step}, timeout=60)
                with torch.no_grad():
                    for tensor in tensors.values():
                        tensor.zero_()
        sender.close()
        assert f"steps {steps} wrong 0 on cuda:0" in child.finish(timeout=60)


def test_steps_that_are_not_like_the_last_one_arrive_too(bus_name: str) -> None:
    with (
        TensorChannel.create(bus_name, device="cuda:0", timeout=20) as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):

        def passes(step: int, rows: int) -> None:
            sender.send(made(step, rows=rows), meta={"n": step}, step=step)
            with receiver.recv(20) as item:
                assert (item.step, item.meta, wrong(step, item)) == (step, {"n": step}, 0)

        for step in range(4):
            passes(step, 16)
        with pytest.raises(StepOrderError, match="expected step 4, got step 9"):
            sender.send(made(9, rows=16), step=9)
        with pytest.raises(ValueError, match="on the agreed device 'cuda:0', got 'cpu'"):
            sender.send({name: each.cpu() for name, each in made(4, rows=16).items()})
        with pytest.raises(SpecMismatchError):
            sender.send({"hidden": made(4, rows=16)["hidden"]})
        passes(4, 16)
        assert sender.skip(reason="empty") == 5
        with pytest.raises(StepSkippedError):
            receiver.recv(20)
        for step in range(6, 9):
            passes(step, 16)
        for step in range(9, 12):
            passes(step, 40)  # another length, in larger buffers
        for step in range(12, 15):
            passes(step, 16)


@pytest.mark.timeout(100)
@needs_two
@pytest.mark.parametrize("how", ["copies", "views"])
def test_a_receiver_on_another_device_reads_over_peer_access(
    bus_name: str, spawn: Spawner, how: str
) -> None:
    with TensorChannel.create(bus_name, device="cuda:0") as sender:
        child = spawn.script(RECEIVER, bus_name, how, "cuda:1", PERIOD)
        child.expect("ready", timeout=60)
        for step in range(100):
            sender.send(made(step), meta={"n": step}, timeout=60)
        sender.close()
        assert "steps 100 wrong 0 on cuda:1" in child.finish(timeout=60)


@pytest.mark.timeout(100)
@needs_two
def test_a_process_that_does_not_see_the_device_is_told_so(bus_name: str, spawn: Spawner) -> None:
    with TensorChannel.create(bus_name, device="cuda:0", timeout=5) as sender:
        sender.send(made(0), meta={"n": 0})
        child = spawn.script(
            RECEIVER, bus_name, "copies", "-", PERIOD, env={"CUDA_VISIBLE_DEVICES": "1"}
        )
        assert child.wait(60) != 0
        assert "DeviceMismatchError" in child.output()
        assert "which this process does not see" in child.output()
        with TensorChannel.open(bus_name, specs=SPECS) as receiver, receiver.recv(20) as item:
            assert wrong(0, item) == 0


@pytest.mark.timeout(100)
def test_a_receiver_that_has_the_memory_gets_what_a_killed_sender_has_sent(
    bus_name: str, spawn: Spawner
) -> None:
    child = spawn.script(SENDER, bus_name, 1, 1)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        with pytest.raises(ZeroDivisionError), receiver.recv(5):
            raise ZeroDivisionError
        child.kill()
        with receiver.recv(5) as item:
            assert wrong(0, item) == 0
        with pytest.raises(PeerGoneError):
            receiver.recv(NEVER_S)
        successor = spawn.script(SENDER, bus_name, 1, 1)
        with receiver.recv(60) as item:
            assert (item.step, wrong(1, item)) == (1, 0)
        successor.kill()


@pytest.mark.timeout(100)
def test_a_step_whose_memory_died_with_its_sender_fails_and_the_next_one_comes(
    bus_name: str, spawn: Spawner
) -> None:
    child = spawn.script(SENDER, bus_name, 1, 2)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        child.kill()
        with pytest.raises(StepFailedError, match="memory went with the sender"):
            receiver.recv(5)


@pytest.mark.timeout(100)
def test_a_killed_receiver_leaves_its_step_to_the_successor(bus_name: str, spawn: Spawner) -> None:
    holding = RECEIVER.replace(
        "step += 1", "print('holds', flush=True); __import__('time').sleep(600)"
    )
    with TensorChannel.create(bus_name, device="cuda:0") as sender:
        child = spawn.script(holding, bus_name, "copies", "-", PERIOD)
        sender.send(made(0), meta={"n": 0})
        child.expect("holds", timeout=60)
        sender.send(made(1), meta={"n": 1})
        child.kill()
        with pytest.raises(PeerGoneError):
            sender.send(made(2), meta={"n": 2}, timeout=NEVER_S)
        with TensorChannel.open(bus_name, specs=SPECS) as receiver:
            for step in range(2):
                with receiver.recv(20) as item:
                    assert (item.step, wrong(step, item)) == (step, 0)
            sender.send(made(2), meta={"n": 2})
            with receiver.recv(20) as item:
                assert (item.step, wrong(2, item)) == (2, 0)


def test_what_cannot_be_sent_is_named_and_the_channel_stays_usable(bus_name: str) -> None:
    with (
        TensorChannel.create(bus_name, device="cuda:0", max_bytes="1MiB") as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):
        good = made(0, rows=16)
        bad: list[tuple[torch.Tensor, str]] = [
            (good["ids"].cpu(), "on the agreed device 'cuda:0', got 'cpu'"),
            (torch.arange(32, device="cuda:0")[::2], "expected a contiguous tensor"),
            (good["ids"][:0], "expected elements, got shape [0]"),
        ]
        for tensor, problem in bad:
            with pytest.raises(ValueError, match=f"step 0, tensor 'ids': .*{re.escape(problem)}"):
                sender.send({**good, "ids": tensor})
        with pytest.raises(CapacityError, match="a buffer may grow to max_bytes=1048576"):
            sender.send(made(0, rows=1 << 14))
        sender.send(good, meta={"n": 0})
        with receiver.recv(20) as item:
            assert wrong(0, item) == 0


def test_more_than_the_device_has_is_refused_and_the_channel_stays_usable(bus_name: str) -> None:
    with (
        TensorChannel.create(bus_name, device="cuda:0") as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):
        free = torch.cuda.mem_get_info()[0]
        taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda:0")
        big = torch.empty((600 << 20) // 128, 64, dtype=torch.bfloat16, device="cuda:0")
        with pytest.raises(CapacityError, match="no memory on cuda:0 for step 0"):
            sender.send({"hidden": big, "ids": torch.arange(8, device="cuda:0")})
        del taken, big
        torch.cuda.empty_cache()
        sender.send(made(0), meta={})
        with receiver.recv(20) as item:
            assert wrong(0, item) == 0


def test_a_view_that_outlives_its_context_is_an_error(bus_name: str) -> None:
    with (
        TensorChannel.create(bus_name, device="cuda:0", timeout=20) as sender,
        TensorChannel.open(bus_name, specs=SPECS, views=True) as receiver,
    ):
        sender.send(made(0), meta={})
        with (
            pytest.raises(ChannelError, match="a view of it outlives its context"),
            receiver.recv(5) as item,
        ):
            kept = item["ids"][:1]
        del kept
        with receiver.recv(5) as item:
            assert wrong(0, item) == 0


def test_gradients_through_a_step_are_those_of_tensors_that_never_left(bus_name: str) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 8, device="cuda:0", dtype=torch.bfloat16)
    hidden = torch.randn(256, 64, device="cuda:0", dtype=torch.bfloat16)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        head.zero_grad()
        head(x).float().square().mean().backward()
        assert head.weight.grad is not None
        return head.weight.grad.clone()

    with (
        TensorChannel.create(bus_name, device="cuda:0") as sender,
        TensorChannel.open(bus_name, specs={"hidden": ("bfloat16", (None, 64))}) as receiver,
    ):
        sender.send({"hidden": hidden})
        with receiver.recv(20) as item:
            assert torch.equal(gradient(item["hidden"]), gradient(hidden))


def test_a_device_that_this_process_does_not_see_is_an_error_at_construction() -> None:
    with pytest.raises(DeviceMismatchError, match="CUDA devices that this process sees"):
        CudaCarrier(device="cuda:99")
