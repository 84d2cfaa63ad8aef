"""Steps in the sender's own memory, exported: a memfd on any machine, device memory on a GPU."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Child, Spawner

from shmbus import CapacityError, PeerGoneError, WaitTimeoutError
from shmbus.channel.endpoint import channel_path
from shmbus.segment.names import memory_socket
from shmbus.tensors import (
    ChannelClosedError,
    ChannelError,
    CudaCarrier,
    SpecMismatchError,
    StepFailedError,
    StepOrderError,
    StepSkippedError,
    TensorChannel,
    TensorReceiver,
    TensorSender,
)
from shmbus.tensors.tensor_sender import ExportedWriter

GPU = pytest.mark.gpu
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


class Memory(NamedTuple):
    device: str
    options: dict[str, Any]


HOST = pytest.param(Memory("cpu", {}), id="host")
MEMFD = pytest.param(Memory("cpu", {"carrier": "memfd"}), id="memfd")
CUDA = pytest.param(Memory("cuda:0", {"device": "cuda:0"}), id="cuda", marks=GPU)
in_memfd = pytest.mark.parametrize("memory", [MEMFD])
in_each_memory = pytest.mark.parametrize("memory", [MEMFD, CUDA])
in_all = pytest.mark.parametrize("memory", [HOST, MEMFD, CUDA])
on_a_gpu = pytest.mark.parametrize("memory", [CUDA])
each_way = pytest.mark.parametrize("how", ["copies", "views"])

SPECS = {"hidden": ("bfloat16", (None, 64)), "ids": ("int64", (None,))}
#: The longest step of a run comes within PERIOD steps.
PERIOD = 61
CUDA_STEPS = int(os.environ.get("SHMBUS_CUDA_STEPS", "500"))
NEVER_S = 3600.0

# Sender and receiver make equal steps from the number alone.
MADE = """
import torch
def made(step, device, rows=None):
    rows = (1 + (step * 7919) % 61) * 8 if rows is None else rows
    bits = torch.arange(rows * 64, dtype=torch.int64, device=device) * 40503 + step * 2654435761
    hidden = (bits & 0xFFFF).sub(32768).to(torch.int16).view(torch.bfloat16).view(rows, 64)
    return {"hidden": hidden, "ids": bits[:rows].clone()}
def wrong(step, item):
    want = made(step, item["ids"].device, item["ids"].numel())
    return sum(not torch.equal(item[n].view(torch.uint8), want[n].view(torch.uint8)) for n in want)
"""

RECEIVER = (
    MADE
    + """
import gc, sys
from shmbus.tensors import ChannelClosedError, TensorChannel
from shmbus.tensors.device.memory import _Mapping
def mapped():
    return sum("memfd:shmbus" in line for line in open("/proc/self/maps"))
def own(device):  # only what this process has: other processes use the device meanwhile
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize()
    known = sum(each.nbytes for each in gc.get_objects() if type(each) is _Mapping)
    return known + torch.cuda.memory_allocated(device)
name, how, device, period = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
specs = {"hidden": ("bfloat16", (None, 64)), "ids": ("int64", (None,))}
options = {} if device == "-" else {"device": device}
with TensorChannel.open(name, specs=specs, wait=30, views=how == "views", **options) as rx:
    print("ready", flush=True)
    step, bad, most, early = 0, 0, 0, None
    try:
        while True:
            with rx.recv(60) as item:
                bad += item.step != step or item.meta != {"n": step}
                bad += wrong(step, item)
                most = max(most, mapped())
                step += 1
                on = item["ids"].device
            if step == 2 * period:
                early = own(on)
    except ChannelClosedError:
        grown = 0 if early is None else max(0, own(on) - early)
        print("steps", step, "wrong", bad, "on", on, "mapped", most, "grown", grown, flush=True)
"""
)

SENDER = (
    MADE
    + """
import json, sys, time
from shmbus.tensors import TensorChannel
options = json.loads(sys.argv[4])
tx = TensorChannel.create(sys.argv[1], slots=int(sys.argv[3]), **options)
for _ in range(int(sys.argv[2])):
    step = tx.next_step
    tx.send(made(step, options.get("device", "cpu"), 16), meta={"n": step})
tx.next_step  # all of it is sent
print("sent", flush=True)
time.sleep(600)
"""
)

scope: dict[str, Any] = {}
exec(MADE, scope)
made, wrong = scope["made"], scope["wrong"]


def create(bus: str, memory: Memory, **options: Any) -> TensorSender:
    return TensorChannel.create(bus, **{"timeout": 20, **memory.options, **options})


def start_sender(spawn: Spawner, bus: str, memory: Memory, steps: int, slots: int) -> Child:
    return spawn.script(SENDER, bus, steps, slots, json.dumps(memory.options))


def start_receiver(spawn: Spawner, bus: str, how: str, device: str = "-") -> Child:
    child = spawn.script(RECEIVER, bus, how, device, PERIOD)
    child.expect("ready", timeout=60)
    return child


def send(sender: TensorSender, memory: Memory, step: int, rows: int | None = 16) -> None:
    sender.send(made(step, memory.device, rows), step=step, meta={"n": step}, timeout=60)


def receives(receiver: TensorReceiver, *steps: int) -> None:
    for step in steps:
        with receiver.recv(30) as item:
            assert (item.step, item.meta, wrong(step, item)) == (step, {"n": step}, 0)


@pytest.fixture
def both(bus_name: str, memory: Memory) -> Iterator[tuple[TensorSender, TensorReceiver]]:
    with (
        create(bus_name, memory, max_bytes="1MiB") as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):
        yield sender, receiver


def writer_of(sender: TensorSender) -> ExportedWriter:
    writer = sender._writer
    assert isinstance(writer, ExportedWriter)
    return writer


@pytest.mark.timeout(280)
@each_way
@pytest.mark.parametrize(
    "kind", ["host", "memfd", *(pytest.param(k, marks=GPU) for k in ("vmm", "ipc"))]
)
def test_varying_steps_arrive_in_flat(bus_name: str, spawn: Spawner, kind: Any, how: str) -> None:
    """A sender that exports its memory has at most one buffer more than slots."""
    on_cpu = kind in ("host", "memfd")
    device = "cpu" if on_cpu else "cuda:0"
    carrier = kind if on_cpu else CudaCarrier(device=device, kind=kind)
    steps = 150 if on_cpu else CUDA_STEPS
    most = 0
    with TensorChannel.create(bus_name, carrier=carrier) as sender:
        child = start_receiver(spawn, bus_name, how)
        for step in range(steps):
            tensors = made(step, device)
            sender.send(tensors, step=step, meta={"n": step}, timeout=60)
            for tensor in tensors.values():
                tensor.zero_()  # on the stream that was current: after the copy
            if kind != "host":
                arena = writer_of(sender)._arena
                most = max(most, len(arena._buffers) + len(arena._replaced))
        growths = writer_of(sender).growths if kind != "host" else 0
        sender.close()
        said = child.finish(timeout=120)
        mapped = 2 if kind == "memfd" else 0
        assert f"steps {steps} wrong 0 on {device} mapped {mapped} grown 0" in said
    assert most == (0 if kind == "host" else 3)
    assert growths < PERIOD
    assert not os.path.exists(channel_path(bus_name))
    assert not os.path.exists(memory_socket("channel", bus_name))


@each_way
@on_a_gpu
@pytest.mark.parametrize("rows", [16, 1 << 15])
def test_alike_steps(bus_name: str, spawn: Spawner, memory: Memory, rows: int, how: str) -> None:
    with create(bus_name, memory) as sender:
        child = start_receiver(spawn, bus_name, how)
        steps = 200
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for step in range(steps):
            with torch.cuda.stream(side if step % 3 == 0 else torch.cuda.default_stream()):
                tensors = made(step, memory.device, rows)
                tensors["hidden"].requires_grad_(step == 100)
                sender.send(tensors, step=step, meta={"n": step}, timeout=60)
                with torch.no_grad():
                    for tensor in tensors.values():
                        tensor.zero_()
        sender.close()
        assert f"steps {steps} wrong 0 on cuda:0" in child.finish(timeout=60)


@in_all
def test_unlike_steps_arrive_too(both: tuple[TensorSender, TensorReceiver], memory: Memory) -> None:
    sender, receiver = both
    for step in range(4):
        send(sender, memory, step)
        receives(receiver, step)
    with pytest.raises(StepOrderError, match="expected step 4, got step 9"):
        send(sender, memory, 9)
    with pytest.raises(SpecMismatchError):
        sender.send({"hidden": made(4, memory.device, 16)["hidden"]})
    send(sender, memory, 4)
    receives(receiver, 4)
    assert sender.skip(reason="empty") == 5
    with pytest.raises(StepSkippedError, match="skipped: empty"):
        receiver.recv(20)
    for step, rows in enumerate([16] * 3 + [40] * 3 + [16] * 3, 6):
        send(sender, memory, step, rows)
        receives(receiver, step)


@in_all
def test_the_unsendable_is_named(both: tuple[TensorSender, TensorReceiver], memory: Memory) -> None:
    sender, receiver = both
    good = made(0, memory.device, 16)
    bad: list[tuple[torch.Tensor, str]] = [
        (good["ids"].to("meta"), f"on the agreed device '{memory.device}', got 'meta'"),
    ]
    if memory.device != "cpu":
        bad.append((good["ids"].cpu(), "on the agreed device 'cuda:0', got 'cpu'"))
    if memory.options.get("carrier") != "memfd":
        bad += [
            (torch.arange(32, device=memory.device)[::2], "expected a contiguous tensor"),
            (good["ids"][:0], "expected elements, got shape [0]"),
        ]
    for tensor, problem in bad:
        with pytest.raises(ValueError, match=f"step 0, tensor 'ids': .*{re.escape(problem)}"):
            sender.send({**good, "ids": tensor})
    with pytest.raises(TypeError, match="'ids': expected a tensor, got list"):
        sender.send({**good, "ids": [1]})  # type: ignore[dict-item]
    with pytest.raises(CapacityError, match="max_bytes=1048576"):
        send(sender, memory, 0, 1 << 14)
    send(sender, memory, 0)
    receives(receiver, 0)
    with pytest.raises(StepOrderError, match="acknowledged already"):
        receiver.recv(5, step=0)


@on_a_gpu
def test_a_step_beyond_the_device_is_refused(bus_name: str, memory: Memory) -> None:
    with create(bus_name, memory) as sender, TensorChannel.open(bus_name, specs=SPECS) as receiver:
        free = torch.cuda.mem_get_info()[0]
        taken = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda:0")
        big = torch.empty((600 << 20) // 128, 64, dtype=torch.bfloat16, device="cuda:0")
        with pytest.raises(CapacityError, match="no memory on cuda:0 for step 0"):
            sender.send({"hidden": big, "ids": torch.arange(8, device="cuda:0")})
        del taken, big
        torch.cuda.empty_cache()
        send(sender, memory, 0)
        receives(receiver, 0)


@in_memfd
def test_a_buffer_is_replaced(both: tuple[TensorSender, TensorReceiver], memory: Memory) -> None:
    sender, receiver = both
    for step, rows in enumerate([1, 1, 101, 1001, 10, 10]):
        send(sender, memory, step, rows)
        receives(receiver, step)
    assert sender._writer.growths == 4
    # Ids begin at a multiple of 256: steps 2 and 3 have most bytes.
    assert writer_of(sender).nbytes == (13_056 + 101 * 8) + (128_256 + 1001 * 8)


@in_each_memory
def test_a_view_beyond_its_context_is_an_error(bus_name: str, memory: Memory) -> None:
    with (
        create(bus_name, memory) as sender,
        TensorChannel.open(bus_name, specs=SPECS, views=True) as receiver,
    ):
        send(sender, memory, 0)
        with (
            pytest.raises(ChannelError, match="a view of it outlives its context"),
            receiver.recv(5) as item,
        ):
            kept = item["ids"][:1]
        del kept
        assert sender.acked_step == -1
        receives(receiver, 0)
        assert sender.acked_step == 0


@on_a_gpu
def test_gradients_cross_as_if_tensors_never_left(bus_name: str, memory: Memory) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 8, device="cuda:0", dtype=torch.bfloat16)
    hidden = torch.randn(256, 64, device="cuda:0", dtype=torch.bfloat16)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        head.zero_grad()
        head(x).float().square().mean().backward()
        assert head.weight.grad is not None
        return head.weight.grad.clone()

    with (
        create(bus_name, memory) as sender,
        TensorChannel.open(bus_name, specs={"hidden": ("bfloat16", (None, 64))}) as receiver,
    ):
        sender.send({"hidden": hidden})
        with receiver.recv(20) as item:
            assert torch.equal(gradient(item["hidden"]), gradient(hidden))


@each_way
@pytest.mark.parametrize("memory", [pytest.param(CUDA.values[0], marks=TWO_GPUS)])
def test_peer_access_reads_across(bus_name: str, spawn: Spawner, memory: Memory, how: str) -> None:
    with create(bus_name, memory) as sender:
        child = start_receiver(spawn, bus_name, how, "cuda:1")
        for step in range(100):
            send(sender, memory, step, None)
        sender.close()
        assert "steps 100 wrong 0 on cuda:1" in child.finish(timeout=60)


@pytest.mark.parametrize("memory", [pytest.param(CUDA.values[0], marks=TWO_GPUS)])
def test_a_missing_device_is_told(bus_name: str, spawn: Spawner, memory: Memory) -> None:
    with create(bus_name, memory, timeout=5) as sender:
        send(sender, memory, 0)
        env = {"CUDA_VISIBLE_DEVICES": "1"}
        child = spawn.script(RECEIVER, bus_name, "copies", "-", PERIOD, env=env)
        assert child.wait(60) != 0
        assert "DeviceMismatchError" in child.output()
        assert "which this process does not see" in child.output()
        with TensorChannel.open(bus_name, specs=SPECS) as receiver:
            receives(receiver, 0)


def is_told_of_a_death(child: Child, side: str, wait: Callable[[], object]) -> None:
    """Kill a peer during a wait; the wait ends with an error, and the error names the dead peer."""
    threading.Timer(0.05, child.kill).start()
    with pytest.raises(PeerGoneError) as gone:
        wait()
    assert (gone.value.side, gone.value.pid) == (side, child.pid)


@in_all
def test_a_killed_senders_steps_arrive(bus_name: str, spawn: Spawner, memory: Memory) -> None:
    child = start_sender(spawn, bus_name, memory, 1, 1)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        with pytest.raises(ZeroDivisionError), receiver.recv(5):
            raise ZeroDivisionError
        child.kill()
        receives(receiver, 0)
        with pytest.raises(PeerGoneError):
            receiver.recv(NEVER_S)
        successor = start_sender(spawn, bus_name, memory, 1, 1)
        receives(receiver, 1)
        is_told_of_a_death(successor, "sender", lambda: receiver.recv(NEVER_S))


@in_each_memory
def test_a_step_dead_with_its_memory_fails(bus_name: str, spawn: Spawner, memory: Memory) -> None:
    child = start_sender(spawn, bus_name, memory, 2, 2)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        child.kill()
        for step in range(2):
            with pytest.raises(StepFailedError, match="memory went with the sender") as lost:
                receiver.recv(5)
            assert lost.value.step == step
        successor = start_sender(spawn, bus_name, memory, 1, 2)
        successor.expect("sent", timeout=60)
        while True:
            try:
                receives(receiver, 2)
                break
            except PeerGoneError:
                continue
        successor.kill()


@in_all
def test_a_killed_receivers_step_goes_on(bus_name: str, spawn: Spawner, memory: Memory) -> None:
    holding = RECEIVER.replace(
        "step += 1", "print('holds', flush=True); __import__('time').sleep(600)"
    )
    with create(bus_name, memory) as sender:
        child = spawn.script(holding, bus_name, "copies", "-", PERIOD)
        send(sender, memory, 0)
        child.expect("holds", timeout=60)
        send(sender, memory, 1)
        third = made(2, memory.device)
        is_told_of_a_death(
            child, "receiver", lambda: sender.send(third, meta={"n": 2}, timeout=NEVER_S)
        )
        with TensorChannel.open(bus_name, specs=SPECS) as receiver:
            receives(receiver, 0, 1)
            send(sender, memory, 2)
            receives(receiver, 2)


@in_memfd
def test_steps_that_died_come_again(bus_name: str, spawn: Spawner, memory: Memory) -> None:
    child = start_sender(spawn, bus_name, memory, 2, 2)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        state = receiver.state_dict()
        child.kill()
        for _ in range(2):
            with pytest.raises(StepFailedError, match="resume both sides from a checkpoint"):
                receiver.recv(5)
        with pytest.raises(PeerGoneError):
            receiver.recv(NEVER_S)
        with create(bus_name, memory) as successor:
            successor.load_state_dict(state)
            receiver.load_state_dict(state)
            for step in range(3):
                send(successor, memory, step)
                receives(receiver, step)


@in_memfd
def test_a_successor_repeats_missed_steps(bus_name: str, spawn: Spawner, memory: Memory) -> None:
    child = start_sender(spawn, bus_name, memory, 2, 2)
    child.expect("sent", timeout=60)
    child.kill()
    with create(bus_name, memory, timeout=0.1) as sender:
        assert sender.next_step == 0
        for step in range(2):
            send(sender, memory, step, 3)
        with TensorChannel.open(bus_name, specs=SPECS) as receiver:
            receives(receiver, 0, 1)


@in_memfd
def test_a_closing_sender_awaits_a_receiver(bus_name: str, spawn: Spawner, memory: Memory) -> None:
    child = spawn.script(RECEIVER, bus_name, "copies", "-", PERIOD)
    with TensorChannel.create(bus_name, **memory.options) as sender:
        for step in range(2):
            send(sender, memory, step)
    assert "steps 2 wrong 0" in child.finish()


@in_memfd
def test_a_closing_sender_waits_within_its_timeout(bus_name: str, memory: Memory) -> None:
    sender = create(bus_name, memory, timeout=0.05)
    send(sender, memory, 0)
    sender.close()
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        with pytest.raises(StepFailedError, match="memory went with the sender"):
            receiver.recv(5)
        with pytest.raises(ChannelClosedError):
            receiver.recv(5)


@in_memfd
def test_a_stopped_sender_loses_nothing(bus_name: str, spawn: Spawner, memory: Memory) -> None:
    child = start_sender(spawn, bus_name, memory, 1, 1)
    child.expect("sent", timeout=60)
    with TensorChannel.open(bus_name, specs=SPECS) as receiver:
        receiver._reader._buffers._timeout = 0.2
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(WaitTimeoutError, match="the living sender"):
            receiver.recv(5)
        child.send_signal(signal.SIGCONT)
        receives(receiver, 0)
    child.kill()


class Gate:
    """Work of a device, done at the test's word."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def synchronize(self) -> None:
        assert self._open.wait(20)

    def query(self) -> bool:
        return self._open.is_set()

    def happen(self) -> None:
        self._open.set()


def gated(sender: TensorSender, monkeypatch: pytest.MonkeyPatch) -> list[Gate]:
    gates: list[Gate] = []

    def record(device: torch.device) -> Any:
        gates.append(Gate())
        return gates[-1]

    monkeypatch.setattr(writer_of(sender)._completion, "_record", record)
    return gates


@in_memfd
def test_a_step_is_sent_when_its_copies_are_there_and_the_next_ones_do_not_wait_for_that(
    both: tuple[TensorSender, TensorReceiver], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = both
    gates = gated(sender, monkeypatch)
    for step in range(2):
        send(sender, memory, step)
    with pytest.raises(WaitTimeoutError):
        receiver.recv(0.05)
    with pytest.raises(WaitTimeoutError, match="step 2, which step 0 still has"):
        sender.send(made(2, memory.device, 16), step=2, timeout=0.05)
    for step in range(2):
        gates[step].happen()
        receives(receiver, step)
    assert sender.next_step == 2
    send(sender, memory, 2)
    gates[2].happen()
    receives(receiver, 2)


@in_memfd
def test_a_small_step_that_is_copied_at_once_is_sent_by_the_call_itself(
    both: tuple[TensorSender, TensorReceiver], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = both
    monkeypatch.setattr(Gate, "query", lambda self: True)
    gated(sender, monkeypatch)
    for step in range(3):
        send(sender, memory, step)
        assert sender._channel.sent_step == step
        receives(receiver, step)
    assert writer_of(sender)._completion._thread is None


@in_memfd
def test_what_keeps_a_step_from_being_sent_keeps_those_behind_it_and_is_told(
    both: tuple[TensorSender, TensorReceiver], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = both
    send(sender, memory, 0)
    receives(receiver, 0)
    gates = gated(sender, monkeypatch)
    failing = [ZeroDivisionError()]
    post = sender._channel.post

    def fail_once(meta: bytes) -> None:
        if failing:
            raise failing.pop()
        post(meta)

    monkeypatch.setattr(sender._channel, "post", fail_once)
    for step in (1, 2):
        send(sender, memory, step, 3)
    for gate in gates:
        gate.happen()
    with pytest.raises(ZeroDivisionError):
        sender.next_step  # noqa: B018
    assert sender.next_step == 1
    send(sender, memory, 1, 5)
    gates[2].happen()
    receives(receiver, 1)
