"""Tensors through a channel: bit for bit, specs on both sides, and what a caller may hand in."""

import os
import re
import threading
from typing import Any

import pytest
import torch

from shmbus.channel import unlink_channel
from shmbus.channel.endpoint import channel_path
from shmbus.tensors import (
    ChannelClosedError,
    SpecMismatchError,
    TensorChannel,
    TensorReceiver,
    TensorSender,
)

SPECS = {"hidden": ("bfloat16", (None, 16)), "ids": ("int64", (None,))}


def both(name: str, **options: Any) -> tuple[TensorSender, TensorReceiver]:
    return TensorChannel.create(name, **options), TensorChannel.open(name, specs=SPECS)


def good(rows: int = 2) -> dict[str, torch.Tensor]:
    return {
        "hidden": torch.ones(rows, 16, dtype=torch.bfloat16),
        "ids": torch.arange(rows),
    }


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
