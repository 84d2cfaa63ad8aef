"""What a publisher found out about a model for one version is never used for another model."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer_adapter.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter.weights.source import as_seen


def model() -> torch.nn.Module:
    module = torch.nn.Module()
    for number in range(6):
        value = torch.arange(64, dtype=torch.float32).view(8, 8) + 100 * number
        module.register_parameter(f"p{number}", torch.nn.Parameter(value))
    module.register_buffer("scale", torch.ones(3))
    return module


def replace_data(module: Any) -> None:
    module.p1.data = torch.full((8, 8), 7.0)


def turn(module: Any) -> None:
    module.p2.data = module.p2.data.t()  # the same memory, seen otherwise


def replace_parameter(module: Any) -> None:
    module.p3 = torch.nn.Parameter(torch.full((8, 8), 9.0))


def swap(module: Any) -> None:
    module.p4, module.p5 = module.p5, module.p4


def change_values(module: Any) -> None:
    with torch.no_grad():
        module.p0.add_(0.5)


def nothing(module: Any) -> None:
    del module


CHANGES = [change_values, replace_data, turn, nothing, replace_parameter, swap, change_values]


@pytest.mark.parametrize("carrier", ["shm", "memfd"])
def test_a_model_that_was_changed_in_any_way_arrives_as_it_is(carrier: Any) -> None:
    bus = f"test-lasting-{carrier}-{os.getpid()}"
    module = model()
    live = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    with (
        WeightPublisher(bus, ModuleSource(module), carrier=carrier) as publisher,
        WeightSubscriber(bus) as subscriber,
    ):
        # Each change meets both slots, with and without what was known of them.
        for version, change in enumerate([nothing, nothing, *CHANGES, *reversed(CHANGES)]):
            change(module)
            told = publisher.publish(version)
            assert told.copied_bytes == sum(v.numel() * 4 for v in live.values())
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(live)
            for name, value in module.state_dict().items():
                assert torch.equal(live[name], value), (version, change.__name__, name)


@pytest.mark.parametrize("change", [replace_data, turn, replace_parameter, swap])
def test_what_is_more_than_a_value_is_seen(change: Callable[[Any], None]) -> None:
    module = model()
    before = module.state_dict(keep_vars=True)
    seen = as_seen(before)
    change_values(module)
    assert as_seen(module.state_dict(keep_vars=True)) == seen
    change(module)
    assert as_seen(module.state_dict(keep_vars=True)) != seen


def test_what_is_no_tensor_is_not_looked_at() -> None:
    tensor = torch.zeros(3)
    assert as_seen({"a": tensor, "state": object()}) == as_seen({"a": tensor})
    assert as_seen({"a": tensor}) != as_seen({"b": tensor})
