"""A copy that a module derives from a tensor is renewed by `Tensor._version` after each update."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from shmbus.engines.rank_loader import PlannedLoader
from shmbus.weights import (
    ModuleSource,
    WeightPublisher,
    WeightSubscriber,
    attach_model,
    share_model,
)

SIZE = 4096


class Model(torch.nn.Module):
    """Weights in bfloat16, with which the forward pass computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16))
        self.other = torch.nn.Parameter(torch.zeros(SIZE))
        self.derived: tuple[int, torch.Tensor] | None = None

    def forward(self) -> float:
        if self.derived is None or self.derived[0] != self.weight._version:
            self.derived = self.weight._version, self.weight.detach().float()
        return float(self.derived[1][0])

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], modules: Any) -> None:
        """Load as engines do: through `.data`, which counts its writes for itself."""
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor)


def by_load_into(bus: str, stack: ExitStack) -> Callable[[Model, int], None]:
    subscriber = stack.enter_context(WeightSubscriber(bus))

    def bring(model: Model, version: int) -> None:
        with subscriber.latest(timeout=10) as weights:
            weights.load_into(model)

    return bring


def by_plan(bus: str, stack: ExitStack) -> Callable[[Model, int], None]:
    subscriber = stack.enter_context(WeightSubscriber(bus))
    loaders: list[PlannedLoader] = []
    expected = ["loader", *["plan"] * 3]  # though the publisher makes patches

    def bring(model: Model, version: int) -> None:
        if not loaders:
            loaders.append(PlannedLoader(model, torch.device("cpu"), model.load_weights))
        with subscriber.latest(timeout=10) as weights:
            assert loaders[0].load(weights) == expected[version - 1]

    return bring


@pytest.mark.parametrize("way", [by_load_into, by_plan])
def test_a_derived_copy_is_renewed_after_every_version(way: Any, bus_name: str) -> None:
    trained, served = Model(), Model()
    with ExitStack() as stack:
        made = WeightPublisher(bus_name, ModuleSource(trained), patches=True)
        publisher = stack.enter_context(made)
        bring = way(bus_name, stack)
        for version in range(1, 5):
            with torch.no_grad():
                trained.weight[0] = version
            publisher.publish(version=version)
            bring(served, version)
            assert served() == version


def test_a_derived_copy_of_the_one_shared_model_is_renewed_after_each_step(bus_name: str) -> None:
    trained, served = Model(), Model()
    with share_model(bus_name, trained) as shared, attach_model(bus_name, served) as attached:
        for version in (1, 2):
            with shared.stepping(version=version), torch.no_grad():
                trained.weight.data[0] = version
            with attached.reading(timeout=10):
                assert served() == version
