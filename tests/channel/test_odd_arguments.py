"""Channels as they are used by hand: what cannot be sent is refused, and blocks no later step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmbus.tensors import TensorChannel, TensorReceiver, TensorSender

WAIT_S = 20.0
SPECS = {"a": ("float32", (None,))}
STEP = {"a": torch.ones(4)}


@pytest.fixture
def sides(bus_name: str) -> Iterator[tuple[TensorSender, TensorReceiver]]:
    sender = TensorChannel.create(bus_name, timeout=WAIT_S)
    receiver = TensorChannel.open(bus_name, specs=SPECS, timeout=WAIT_S)
    yield sender, receiver
    sender.close("the test is over")
    receiver.close()


@pytest.mark.parametrize("alike", [0, 4])
@pytest.mark.parametrize(
    ("meta", "error"),
    [
        ({1: 2}, TypeError),
        ({"a": object()}, TypeError),
        ({"a": torch.ones(1)}, TypeError),
        ({"a": 1 << 70}, ValueError),
        ({"a": "\ud800"}, ValueError),
        ([("a", 1)], TypeError),
        (5, TypeError),
    ],
)
def test_a_meta_that_nobody_could_read_is_not_sent(
    meta: Any, error: type[Exception], alike: int, sides: tuple[TensorSender, TensorReceiver]
) -> None:
    sender, receiver = sides
    for _ in range(alike):
        sender.send(STEP)
        with receiver.recv():
            pass
    with pytest.raises(error, match=r"^meta: expected .* nothing was sent"):
        sender.send(STEP, meta=meta)
    sender.send(STEP, meta={"a": 1})
    with receiver.recv() as item:
        assert (item.step, item.meta) == (alike, {"a": 1})


@pytest.mark.parametrize(
    ("step", "error"),
    [("0", TypeError), (0.0, TypeError), (False, TypeError), (1 << 70, ValueError)],
)
def test_a_step_is_a_number(
    step: Any, error: type[Exception], sides: tuple[TensorSender, TensorReceiver]
) -> None:
    sender, receiver = sides
    with pytest.raises(error, match="step: expected an int"):
        sender.send(STEP, step=step)
    with pytest.raises(error, match="step: expected an int"):
        receiver.recv(step=step)
    assert sender.next_step == 0


@pytest.mark.parametrize("tensors", [None, [torch.ones(1)], torch.ones(1), {5: torch.ones(1)}])
def test_tensors_have_names(tensors: Any, sides: tuple[TensorSender, TensorReceiver]) -> None:
    sender, _ = sides
    with pytest.raises(TypeError, match="nothing was sent"):
        sender.send(tensors)
    assert sender.send(STEP) == 0


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (None, TypeError),
        ({}, ValueError),
        ({"acked_step": "3"}, TypeError),
        ({"acked_step": -5}, ValueError),
        ({"acked_step": 1 << 70}, ValueError),
    ],
)
def test_a_state_is_what_state_dict_returned(
    state: Any, error: type[Exception], sides: tuple[TensorSender, TensorReceiver]
) -> None:
    for side in sides:
        with pytest.raises(error, match=r"acked_step|state"):
            side.load_state_dict(state)


def test_every_wait_has_an_end(sides: tuple[TensorSender, TensorReceiver]) -> None:
    for timeout in (float("nan"), -1.0):
        with pytest.raises(ValueError, match="timeout"):
            sides[1].recv(timeout=timeout)
    with pytest.raises(TypeError, match="timeout"):
        sides[1].recv(timeout="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"slots": "2"}, TypeError, "slots: expected an int"),
        (
            {"max_bytes": (1 << 64) + 4096},
            ValueError,
            "max_bytes: expected .* got 18446744073709555712",
        ),
        ({"timeout": None}, TypeError, "each wait needs an end"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"specs": 5}, TypeError, "specs: expected"),
        ({"specs": {"a": ("float32", 5)}}, TypeError, "expected a shape, got 5"),
        ({"carrier": "cuda"}, ValueError, "device: expected one such as"),
        ({"device": "abacus"}, ValueError, "device: expected one that torch knows"),
        ({"label": 5}, TypeError, "expected a str, got int"),
    ],
)
def test_options_of_another_type_are_refused_and_leave_nothing(
    options: dict[str, Any], error: type[Exception], match: str, bus_name: str
) -> None:
    with pytest.raises(error, match=match):
        TensorChannel.create(bus_name, **options)
