"""Tensors that stand for others: what they stand for may be replaced without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from shmbus.tensors.tensor_cache import SeenTensors
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

WAIT_S = 20.0


class Wrapper(torch.Tensor):
    """Has no memory; another tensor has its elements, as in libraries of quantised weights."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def inner(value: object) -> object:
            return value.inner if isinstance(value, Wrapper) else value

        found = function(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return cls(found) if function is torch.ops.aten.detach.default else found


def model(value: float, kind: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(kind(torch.full((64,), value)), requires_grad=False)
    module.plain = torch.nn.Parameter(torch.full((8,), value))
    return module


def plain(value: torch.Tensor) -> torch.Tensor:
    return value


def test_what_a_wrapper_stands_for_is_looked_at_for_each_version(bus_name: str) -> None:
    module = model(1.0, Wrapper)
    with (
        WeightPublisher(bus_name, ModuleSource(module), carrier="shm") as publisher,
        WeightSubscriber(bus_name) as subscriber,
    ):
        for version in range(1, 6):
            module.w.inner = torch.full((64,), float(version))
            publisher.publish(version=version)
            with subscriber.latest(timeout=WAIT_S) as weights:
                assert weights["w"].tolist() == [float(version)] * 64


@pytest.mark.parametrize("patches", [False, True])
def test_what_a_wrapper_stands_for_now_is_loaded_into(bus_name: str, patches: bool) -> None:
    source, target = model(0.0, plain), model(0.0, Wrapper)
    options: dict[str, Any] = {"patches": True} if patches else {}
    with (
        WeightPublisher(bus_name, ModuleSource(source), carrier="shm", **options) as publisher,
        WeightSubscriber(bus_name) as subscriber,
    ):
        for version in range(1, 8):
            source.w.data[version] = float(version)
            publisher.publish(version=version)
            if version > 3:
                target.w.inner = torch.zeros(64)
            with subscriber.latest(timeout=WAIT_S) as weights:
                weights.load_into(target)
            assert torch.equal(target.w.inner, source.w.data)


def test_a_tensor_without_memory_of_its_own_cannot_be_told() -> None:
    tensors = {"w": Wrapper(torch.ones(4)), "plain": torch.ones(4)}
    found = SeenTensors(tensors)
    assert not found.can_tell and not found.still(tensors)
    empty = {"plain": torch.ones(4), "empty": torch.ones(0)}
    assert SeenTensors(empty).still(empty)
