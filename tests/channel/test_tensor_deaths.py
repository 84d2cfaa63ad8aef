"""Sides of a tensor channel, killed in a phase of a step: told at once, and succeeded."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from fork_server import TEMPLATE

from shmbus import PeerGoneError
from shmbus.tensors import TensorChannel
from shmbus.tensors import tensor_receiver as receiving
from shmbus.tensors import tensor_sender as sending

SPECS = {"hidden": ("float32", (4, 8)), "ids": ("int64", (4,))}
# Far beyond what a test waits: only the other side's message or death can end a wait in time.
NEVER_S = 3600.0
# Of sides that call again: shorter than their stop.


def good(value: int = 0) -> dict[str, torch.Tensor]:
    return {"hidden": torch.full((4, 8), float(value)), "ids": torch.full((4,), value)}


@contextlib.contextmanager
def child_at(target: Callable[..., None], where: Any, phase: str) -> Iterator[Any]:
    """Run a side that stays in a phase, in a separate process; return once there."""
    ours, theirs = TEMPLATE.Pipe()
    child = TEMPLATE.Process(target=target, args=(where, phase, theirs), daemon=True)
    child.start()
    try:
        assert ours.poll(30), f"no child in phase {phase}"
        assert ours.recv() == phase
        yield child
    finally:
        child.kill()
        child.join(20)


def die_soon(child: Any) -> None:
    threading.Timer(0.05, child.kill).start()


def stay(phase: str, pipe: Connection) -> None:
    pipe.send(phase)
    time.sleep(600)


def tensor_sender(name: str, phase: str, pipe: Connection) -> None:
    specs = SPECS if phase == "declared" else None
    sender = TensorChannel.create(name, slots=1, specs=specs, timeout=NEVER_S)
    if phase in ("created", "declared"):
        stay(phase, pipe)
    if phase == "copying":
        sending.copy_bytes = lambda *_: stay(phase, pipe)  # type: ignore[attr-defined]
    sender.send(good())
    if phase == "sent":
        stay(phase, pipe)
    pipe.send(phase)
    sender.send(good(1))  # fills the only slot


def tensor_receiver(name: str, phase: str, pipe: Connection) -> None:
    receiver = TensorChannel.open(name, specs=SPECS, wait=30)
    if phase == "opened":
        stay(phase, pipe)
    if phase == "waiting":
        pipe.send(phase)
    if phase == "opening a step":
        receiving.StepReader.open = lambda *_: stay(phase, pipe)  # type: ignore[method-assign,assignment]
    with receiver.recv(NEVER_S):
        if phase == "holding a step":
            stay(phase, pipe)
    stay(phase, pipe)


@pytest.mark.parametrize("phase", ["created", "declared", "copying", "sent", "waiting"])
def test_a_sender_killed_in_a_phase_is_succeeded(bus_name: str, phase: str) -> None:
    sent = phase in ("sent", "waiting")
    with child_at(tensor_sender, bus_name, phase) as child:
        receiver = TensorChannel.open(bus_name, specs=SPECS)
        if phase == "waiting":
            child.kill()  # to receive a step would end its wait
            child.join()
        else:
            die_soon(child)
        if sent:
            with receiver.recv(NEVER_S) as item:
                assert torch.equal(item["hidden"], good()["hidden"])
        with pytest.raises(PeerGoneError) as gone:
            receiver.recv(NEVER_S)
        assert (gone.value.side, gone.value.pid) == ("sender", child.pid)
    with TensorChannel.create(bus_name, slots=1) as sender, receiver:
        assert sender.next_step == int(sent)
        sender.send(good(7))
        with receiver.recv(20) as item:
            assert (item.step, item["ids"].tolist()) == (int(sent), [7] * 4)


@pytest.mark.parametrize(
    "phase", ["opened", "waiting", "opening a step", "holding a step", "acknowledged"]
)
def test_a_receiver_killed_in_a_phase_is_succeeded(bus_name: str, phase: str) -> None:
    acked = int(phase == "acknowledged")
    with TensorChannel.create(bus_name, slots=1) as sender:
        if phase not in ("opened", "waiting"):
            sender.send(good(0))
        with child_at(tensor_receiver, bus_name, phase) as child:
            if phase in ("opened", "waiting"):
                child.kill()  # a wait would take the step
                child.join()
            else:
                die_soon(child)
            with pytest.raises(PeerGoneError) as gone:
                while True:
                    sender.send(good(sender.next_step), timeout=NEVER_S)
            assert (gone.value.side, gone.value.pid) == ("receiver", child.pid)
        with TensorChannel.open(bus_name, specs=SPECS) as successor:
            for step in (acked, acked + 1):
                with successor.recv(20) as item:
                    assert (item.step, item["ids"].tolist()) == (step, [step] * 4)
                sender.send(good(sender.next_step), step=step + 1)
            with successor.recv(20):
                pass
