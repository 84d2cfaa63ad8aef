"""Tensors through a channel: bit for bit, specs on both sides, and what a caller may hand in."""

import os
import re
import threading
from typing import Any

import pytest
import torch
from conftest import Spawner

from shmbus import CapacityError
from shmbus.channel import unlink_channel
from shmbus.channel.endpoint import channel_path
from shmbus.tensors import (
    ChannelClosedError,
    SpecMismatchError,
    StepOrderError,
    TensorChannel,
    TensorReceiver,
    TensorSender,
)

STEPS = 20_000 if "SHMBUS_TEST_LONG" in os.environ else 2000
SPECS = {"hidden": ("bfloat16", (None, 16)), "ids": ("int64", (None,))}

MADE = """
import torch
def made(step):
    rows = 1 + (step * 7919) % 61
    bits = torch.arange(rows * 16, dtype=torch.int64) * 40503 + step * 2654435761
    hidden = (bits & 0xFFFF).sub(32768).to(torch.int16).view(torch.bfloat16).view(rows, 16)
    return {"hidden": hidden, "ids": bits[:rows].clone()}
def same(step, item):
    want = made(step)
    return list(item) == list(want) and all(
        torch.equal(item[n].view(torch.uint8), want[n].view(torch.uint8)) for n in want)
"""

RECEIVER = (
    MADE
    + """
import os, sys
from shmbus.tensors import ChannelClosedError, TensorChannel
specs = {"hidden": ("bfloat16", (None, 16)), "ids": ("int64", (None,))}
size = lambda: os.stat(sys.argv[2]).st_blocks
with TensorChannel.open(sys.argv[1], specs=specs, wait=30) as rx:
    print("ready", flush=True)
    step, wrong, early = 0, 0, 0
    try:
        while True:
            with rx.recv(60) as item:
                wrong += item.step != step or not same(step, item) or item.meta != {"n": step}
                step += 1
            early = size() if step == 200 else early
    except ChannelClosedError:
        print("steps", step, "wrong", wrong, "grown", size() - early, flush=True)
"""
)


def both(name: str, **options: Any) -> tuple[TensorSender, TensorReceiver]:
    sender = TensorChannel.create(name, **options)
    return sender, TensorChannel.open(name, specs=SPECS)


def good(rows: int = 2) -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.ones(rows, 16, dtype=torch.bfloat16),
        "ids": torch.arange(rows),
    }


@pytest.mark.timeout(280)
def test_steps_of_varying_lengths_arrive_in_order(bus_name: str, spawn: Spawner) -> None:
    scope: dict[str, Any] = {}
    exec(MADE, scope)
    with TensorChannel.create(bus_name) as sender:
        child = spawn.script(RECEIVER, bus_name, channel_path(bus_name))
        child.expect("ready")
        for step in range(STEPS):
            sender.send(scope["made"](step), step=step, meta={"n": step}, timeout=60)
        assert sender._channel._counts()[3] > 0
        sender.close()
        assert f"steps {STEPS} wrong 0 grown 0" in child.finish(timeout=120)


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        (
            {**good(), "extra": torch.ones(1)},
            "tensor 'extra' is sent (float32[1]) and not expected",
        ),
        ({"hidden": good()["hidden"]}, "tensor 'ids' is expected (int64[*]) and not sent"),
        ({**good(), "ids": torch.ones(2)}, "tensor 'ids': expected int64[*], sent float32[2]"),
        (
            {**good(), "hidden": torch.ones(2, 8, dtype=torch.bfloat16)},
            "tensor 'hidden': expected bfloat16[*, 16], sent bfloat16[2, 8]",
        ),
    ],
)
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_a_difference_is_an_error_on_both_sides_whoever_comes_first(
    bus_name: str, tensors: dict[str, torch.Tensor], what: str, first: str
) -> None:
    found: list[BaseException] = []
    sender = TensorChannel.create(bus_name, slots=1, timeout=20)
    if first == "sender":
        sender.send(tensors)
        # It waits for the slot while the receiver comes: the difference ends that wait.
        waiting = threading.Thread(target=lambda: found.append(raised(sender, tensors)))
        waiting.start()
        receiver = TensorChannel.open(bus_name, specs=SPECS)
        waiting.join(timeout=20)
    else:
        receiver = TensorChannel.open(bus_name, specs=SPECS)
        found.append(raised(sender, tensors))
    with pytest.raises(SpecMismatchError, match=re.escape(what)):
        receiver.recv(20)
    assert [type(error) for error in found] == [SpecMismatchError]
    assert what in str(found[0])
    assert "The sender states {" in str(found[0])
    receiver.close()
    sender.close()
    if first == "sender":
        unlink_channel(bus_name)


def raised(sender: TensorSender, tensors: dict[str, torch.Tensor]) -> BaseException:
    try:
        sender.send(tensors)
    except SpecMismatchError as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_step_unlike_the_agreed_specs_is_refused_before_sending(bus_name: str) -> None:
    sender, receiver = both(bus_name)
    with sender, receiver:
        sender.send(good())
        with pytest.raises(SpecMismatchError, match=r"step 1: tensor 'ids' is expected"):
            sender.send({"hidden": good()["hidden"]})
        sender.send(good(7), step=1)
        for rows in (2, 7):
            with receiver.recv(5) as item:
                assert item["hidden"].shape == (rows, 16)


def test_a_step_sent_before_the_receiver_is_refused_on_both_sides(bus_name: str) -> None:
    with TensorChannel.create(bus_name) as sender:
        sender.send({"hidden": torch.ones(2, 16), "ids": torch.arange(2)})
        sender.send({"hidden": torch.ones(2, 8), "ids": torch.arange(2)})
        specs = {**SPECS, "hidden": ("float32", (None, 16))}
        with TensorChannel.open(bus_name, specs=specs) as receiver:
            with receiver.recv(5) as item:
                assert item.step == 0
            with pytest.raises(SpecMismatchError, match="sent float32"):
                receiver.recv(5)
            with pytest.raises(SpecMismatchError, match="receiver has refused a step: step 1"):
                sender.send({"hidden": torch.ones(2, 16), "ids": torch.arange(2)})
    unlink_channel(bus_name)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.ones(16, 4, dtype=torch.bfloat16).t(), "contiguous tensor, got strides"),
        (torch.ones(0, 16, dtype=torch.bfloat16), r"expected elements, got shape \[0, 16\]"),
        (torch.ones(4, 16, dtype=torch.bfloat16, device="meta"), "device 'cpu', got 'meta'"),
    ],
)
def test_an_unsendable_tensor_is_named(bus_name: str, tensor: torch.Tensor, problem: str) -> None:
    sender, receiver = both(bus_name, max_bytes=1 << 20)
    with sender, receiver:
        with pytest.raises(ValueError, match=f"step 0, tensor 'hidden': .*{problem}"):
            sender.send({**good(4), "hidden": tensor})
        with pytest.raises(TypeError, match="'hidden': expected a tensor, got list"):
            sender.send({**good(), "hidden": [1]})  # type: ignore[dict-item]
        with pytest.raises(CapacityError, match="max_bytes=1048576"):
            sender.send(good(1 << 16))
        sender.send(good())
        with receiver.recv(5) as item:
            assert set(item) == {"hidden", "ids"}
        with pytest.raises(StepOrderError, match="acknowledged already"):
            receiver.recv(5, step=0)


def test_an_exception_in_the_context_keeps_the_step(bus_name: str) -> None:
    sender, receiver = both(bus_name)
    with sender, receiver:
        sender.send(good(), meta={"epoch": 1})
        with pytest.raises(ZeroDivisionError), receiver.recv(5):
            raise ZeroDivisionError
        assert sender.acked_step == -1
        with receiver.recv(5) as item:
            assert (item.step, item.meta) == (0, {"epoch": 1})
            kept = item["ids"]
        assert sender.acked_step == 0
        sender.send({**good(), "ids": torch.tensor([9, 9])})
        with receiver.recv(5):
            assert kept.tolist() == [0, 1]
        with pytest.raises(KeyError, match="step 0 is over"):
            item["ids"]


def test_a_job_that_resumes_in_mid_epoch_has_each_step_once(bus_name: str) -> None:
    sender, receiver = both(bus_name)
    seen = []
    for step in range(5):
        sender.send(good(step + 1), step=step)
        if step == 3:
            state, sent = receiver.state_dict(), sender.state_dict()
        with receiver.recv(5) as item:
            seen.append(item.step)
    assert state == sent == {"acked_step": 2}
    receiver.close()
    sender.close()
    assert not os.path.exists(channel_path(bus_name))
    sender, receiver = both(bus_name)
    with sender, receiver:
        receiver.load_state_dict(state)
        sender.load_state_dict(sent)
        again = []
        for step in range(sender.next_step, 6):
            sender.send(good(step + 1), step=step)
            with receiver.recv(5) as item:
                assert item["ids"].numel() == item.step + 1
                again.append(item.step)
        assert (seen[:3], again) == ([0, 1, 2], [3, 4, 5])
        sender.close()
        with pytest.raises(ChannelClosedError):
            receiver.recv(5)
