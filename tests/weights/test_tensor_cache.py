"""Tensors that were looked at before: what is more than a value of them is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmbus.tensors.tensor_cache import SeenTensors


class Marked(torch.Tensor):
    """A kind of tensor of a user's own."""


def model() -> torch.nn.Module:
    module = torch.nn.Module()
    for number in range(6):
        value = torch.arange(64, dtype=torch.float32).view(8, 8) + 100 * number
        module.register_parameter(f"p{number}", torch.nn.Parameter(value))
    module.register_parameter("narrow", torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)))
    return module


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return module.state_dict(keep_vars=True)


def replace_data(module: Any) -> None:
    module.p1.data = torch.full((8, 8), 7.0)


def turn(module: Any) -> None:
    module.p2.data = module.p2.data.t()  # the same memory, seen otherwise


def read_as_integers(module: Any) -> None:
    module.narrow.data = module.narrow.data.view(torch.float16)


def take_the_negative(module: Any) -> None:
    module.p2.data = torch._neg_view(module.p2.data)  # the same memory, and its signs turned


def replace_parameter(module: Any) -> None:
    module.p3 = torch.nn.Parameter(torch.full((8, 8), 9.0))


def swap(module: Any) -> None:
    module.p4, module.p5 = module.p5, module.p4


def shorten(module: Any) -> None:
    module.p0.data = module.p0.data[:4]


@pytest.mark.parametrize(
    "change",
    [
        replace_data, turn, read_as_integers, take_the_negative, replace_parameter, swap, shorten,
    ],
)  # fmt: skip
def test_what_is_more_than_a_value_is_seen(change: Callable[[Any], None]) -> None:
    module = model()
    found = SeenTensors(state(module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert found.still(state(module))
    change(module)
    assert not found.still(state(module))


def test_a_conjugate_in_the_same_memory_is_seen() -> None:
    tensor = torch.ones(4, dtype=torch.complex64)
    found = SeenTensors({"a": tensor})
    assert found.still({"a": tensor})
    tensor.data = tensor.data.conj()
    assert not found.still({"a": tensor})


def test_another_mode_of_autograd_is_no_change() -> None:
    module = model()
    found = SeenTensors(state(module))
    module.requires_grad_(False)
    with torch.inference_mode():
        assert found.still(state(module))


def test_a_tied_tensor_is_seen_under_both_names() -> None:
    tensor = torch.zeros(3)
    found = SeenTensors({"a": tensor, "b": tensor})
    assert found.still({"a": tensor, "b": tensor})
    assert not found.still({"a": tensor, "b": torch.zeros(3)})


def test_what_is_no_tensor_is_not_looked_at() -> None:
    tensor = torch.zeros(3)
    found = SeenTensors({"a": tensor, "state": object()})
    assert found.still({"a": tensor})
    assert found.still({"a": tensor, "state": object()})
    assert not found.still({"b": tensor})
    assert SeenTensors({}).still({})


def test_a_tensor_that_loses_its_memory_has_changed() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    found = SeenTensors({"a": tensor})
    tensor.untyped_storage().resize_(0)
    assert not found.still({"a": tensor})
