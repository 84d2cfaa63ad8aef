"""What a side has stated goes with it: a successor with other specs is no mismatch."""

from typing import Any

import pytest
import torch
from conftest import Spawner

from shmbus import WaitTimeoutError
from shmbus.tensors import ChannelClosedError, SpecMismatchError, TensorChannel

RIGHT = {"x": ("int64", (None,))}
WRONG = {"x": ("float32", (None,))}
STEP = {"x": torch.arange(3)}

SIDE = """
import sys, time
from shmbus.tensors import TensorChannel
if sys.argv[2] == "sender":
    side = TensorChannel.create(sys.argv[1], specs={"x": ("float32", (None,))})
else:
    side = TensorChannel.open(sys.argv[1], specs={"x": ("float32", (None,))}, wait=30)
print("stated", flush=True)
time.sleep(600)
"""


def dead(bus_name: str, spawn: Spawner, side: str) -> None:
    child = spawn.script(SIDE, bus_name, side, until="stated")
    child.kill()


@pytest.mark.parametrize("declared", [None, RIGHT])
def test_a_dead_senders_specs_are_ignored(bus_name: str, spawn: Spawner, declared: Any) -> None:
    dead(bus_name, spawn, "sender")
    with TensorChannel.open(bus_name, specs=RIGHT) as receiver:
        with pytest.raises(WaitTimeoutError, match="no successor has come"):
            receiver.recv(0.05)
        with TensorChannel.create(bus_name, specs=declared) as sender:
            with pytest.raises(WaitTimeoutError):
                receiver.recv(0.05)
            sender.send(STEP)
            with receiver.recv(20) as item:
                assert item["x"].tolist() == [0, 1, 2]


def test_a_receiver_ignores_a_dead_sender_before_a_successor(bus_name: str, spawn: Spawner) -> None:
    dead(bus_name, spawn, "sender")
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=RIGHT) as receiver,
    ):
        with pytest.raises(WaitTimeoutError):
            receiver.recv(0.05)
        sender.send(STEP)
        with receiver.recv(20) as item:
            assert item.step == 0


def test_a_dead_receivers_specs_are_ignored(bus_name: str, spawn: Spawner) -> None:
    first = TensorChannel.create(bus_name)
    dead(bus_name, spawn, "receiver")
    first.close()
    with TensorChannel.create(bus_name) as sender:
        sender.send(STEP)
        with TensorChannel.open(bus_name, specs=RIGHT) as receiver, receiver.recv(20) as item:
            assert item.step == 0


def test_a_gone_sides_difference_is_told_once_and_a_successor_awaited(bus_name: str) -> None:
    with TensorChannel.create(bus_name, specs=RIGHT) as sender:
        wrong = TensorChannel.open(bus_name, specs=WRONG)
        with pytest.raises(SpecMismatchError):
            wrong.recv(20)
        wrong.close()
        # The peer left before this side's look, and both need the message.
        with pytest.raises(SpecMismatchError, match="expected float32"):
            sender.send(STEP)
        sender.send(STEP)
        with TensorChannel.open(bus_name, specs=RIGHT) as receiver, receiver.recv(20) as item:
            assert item.step == 0


def test_a_difference_from_a_living_side_is_told_as_often_as_it_is_asked(bus_name: str) -> None:
    with (
        TensorChannel.create(bus_name, specs=RIGHT) as sender,
        TensorChannel.open(bus_name, specs=WRONG) as receiver,
    ):
        for _ in range(2):
            with pytest.raises(SpecMismatchError):
                sender.send(STEP)
            with pytest.raises(SpecMismatchError):
                receiver.recv(20)


def test_a_step_that_a_sender_left_behind_is_still_compared(bus_name: str) -> None:
    with TensorChannel.create(bus_name, specs=RIGHT) as sender:
        sender.send(STEP)
    with (
        TensorChannel.open(bus_name, specs=WRONG) as wrong,
        pytest.raises(SpecMismatchError, match="expected float32"),
    ):
        wrong.recv(20)
    with TensorChannel.open(bus_name, specs=RIGHT) as receiver:
        with receiver.recv(20) as item:
            assert item.step == 0
        with pytest.raises(ChannelClosedError):
            receiver.recv(20)
