"""Tensors that were looked at before: what is more than a value of them is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shmbus.tensor_forms import have_forms, tensor_forms
from shmbus.weights import seen
from shmbus.weights.seen import SeenTensors, comparer_of

EXCHANGE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


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


@pytest.fixture(params=["in one call", "each"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "each":
        monkeypatch.setattr(seen, "_exchange", lambda: None)
    return str(request.param)


@pytest.mark.parametrize(
    "change",
    [
        replace_data, turn, read_as_integers, take_the_negative, replace_parameter, swap, shorten,
    ],
)  # fmt: skip
@pytest.mark.usefixtures("way")
def test_what_is_more_than_a_value_is_seen(change: Callable[[Any], None]) -> None:
    module = model()
    found = SeenTensors(state(module))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert found.still(state(module))
    change(module)
    assert not found.still(state(module))


@pytest.mark.usefixtures("way")
def test_a_conjugate_in_the_same_memory_is_seen() -> None:
    tensor = torch.ones(4, dtype=torch.complex64)
    found = SeenTensors({"a": tensor})
    assert found.still({"a": tensor})
    tensor.data = tensor.data.conj()
    assert not found.still({"a": tensor})


@pytest.mark.usefixtures("way")
def test_another_mode_of_autograd_is_no_change() -> None:
    module = model()
    found = SeenTensors(state(module))
    module.requires_grad_(False)
    with torch.inference_mode():
        assert found.still(state(module))


@pytest.mark.usefixtures("way")
def test_a_tied_tensor_is_seen_under_both_names() -> None:
    tensor = torch.zeros(3)
    found = SeenTensors({"a": tensor, "b": tensor})
    assert found.still({"a": tensor, "b": tensor})
    assert not found.still({"a": tensor, "b": torch.zeros(3)})


@pytest.mark.usefixtures("way")
def test_what_is_no_tensor_is_not_looked_at() -> None:
    tensor = torch.zeros(3)
    found = SeenTensors({"a": tensor, "state": object()})
    assert found.still({"a": tensor})
    assert found.still({"a": tensor, "state": object()})
    assert not found.still({"b": tensor})
    assert SeenTensors({}).still({})


@pytest.mark.usefixtures("way")
def test_a_tensor_that_loses_its_memory_has_changed() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    found = SeenTensors({"a": tensor})
    tensor.untyped_storage().resize_(0)
    assert not found.still({"a": tensor})


@pytest.mark.skipif(EXCHANGE is None, reason="this torch has no table of DLPack's functions")
def test_this_torch_tells_in_one_call() -> None:
    assert seen._exchange() is not None


@pytest.mark.skipif(EXCHANGE is None, reason="this torch has no table of DLPack's functions")
@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(4, 3), False),
        (torch.ones(4, 3).t(), False),
        (torch.ones(3, 4, dtype=torch.int32), False),
        (torch.ones(3, 4, 1), False),
        (torch.ones(3, 4, device="meta"), False),
        (torch.ones(3, 4).to_sparse(), False),
        (torch._neg_view(torch.ones(3, 4)), False),
        (torch.nn.Parameter(torch.ones(3, 4)), False),
        (torch.ones(3, 4).as_subclass(Marked), False),
        ("no tensor", False),
        (None, False),
    ],
)
def test_other_tensors_are_compared_by_all_but_their_values(other: Any, alike: bool) -> None:
    guard = comparer_of([torch.zeros(3, 4), torch.zeros(2)])
    assert guard is not None
    assert guard(other, torch.ones(2)) is alike
    assert not guard(torch.ones(3, 4))
    assert not guard(torch.ones(3, 4), torch.ones(2), torch.ones(2))


@pytest.mark.skipif(EXCHANGE is None, reason="this torch has no table of DLPack's functions")
def test_forms_tell_where_and_how() -> None:
    one = torch.arange(12, dtype=torch.int16).view(3, 4)
    addresses, forms = tensor_forms(EXCHANGE, (one, one[1:], one))
    assert [*memoryview(addresses).cast("Q")] == [
        one.data_ptr(), one[1:].data_ptr(), one.data_ptr(),
    ]  # fmt: skip
    words = [*memoryview(forms).cast("Q")]
    assert words[:6] == words[12:] and words[:6] != words[6:12]
    assert words[2:6] == [3, 4, 4, 1]  # each size with its stride
    assert tensor_forms(EXCHANGE, ()) == (b"", b"")
    deep = torch.zeros([1] * 64)
    assert len(tensor_forms(EXCHANGE, (deep,) * 9)[1]) == 9 * 8 * (2 + 2 * 64)


@pytest.mark.parametrize("exchange", [None, 5, "dlpack_exchange_api", object()])
def test_what_is_no_table_is_refused(exchange: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        tensor_forms(exchange, (torch.zeros(1),))


@pytest.mark.skipif(EXCHANGE is None, reason="this torch has no table of DLPack's functions")
@pytest.mark.parametrize("tensors", [None, [torch.zeros(1)], (object(),), (None,), ("a",)])
def test_what_is_no_tuple_of_tensors_is_refused(tensors: Any) -> None:
    with pytest.raises((TypeError, RuntimeError, BufferError)):
        tensor_forms(EXCHANGE, tensors)


@pytest.mark.skipif(EXCHANGE is None, reason="this torch has no table of DLPack's functions")
def test_forms_are_compared_to_their_end() -> None:
    two = torch.zeros(3, 4), torch.zeros(5)
    types = tuple(map(type, two))
    forms = tensor_forms(EXCHANGE, two)[1]
    assert have_forms(EXCHANGE, two, types, forms)
    for other in (b"", forms[:-8], forms[:-1], forms + b"x", bytes(len(forms))):
        assert not have_forms(EXCHANGE, two, types, other)
    assert not have_forms(EXCHANGE, two, types[:1], forms)
    assert not have_forms(EXCHANGE, two[:1], types[:1], forms)
    assert not have_forms(EXCHANGE, (), (), forms) and have_forms(EXCHANGE, (), (), b"")
    with pytest.raises(TypeError):
        have_forms(EXCHANGE, two, types, [forms])  # type: ignore[arg-type]
