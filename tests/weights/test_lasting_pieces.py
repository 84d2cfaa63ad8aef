"""What a publisher found out about a model for one version is never used for another model."""

import itertools
from typing import Any

import pytest
import torch
from conftest import together
from weight_models import load_newest, move, published, replace, square, swap, turn, write

from shmbus.weights import ManifestError, ModuleSource


def nothing(module: Any) -> None:
    del module


def change_values(module: Any) -> None:
    with torch.no_grad():
        module.p0.add_(0.5)


EACH = [change_values, move, turn, nothing, replace, swap, write]
IN_TURN = [nothing, nothing, *EACH, *reversed(EACH)]


CARRIERS = [
    ("shm", "cpu"),
    ("memfd", "cpu"),
    pytest.param("shm", "cuda:0", marks=pytest.mark.gpu),
    pytest.param("cuda_vmm", "cuda:0", marks=pytest.mark.gpu),
]


def both_sides(bus: str, module: torch.nn.Module, carrier: Any, device: str) -> Any:
    options: Any = {"device": device} if carrier == "cuda_vmm" else {}
    return published(bus, ModuleSource(module), {"device": device}, carrier=carrier, **options)


def arrived(live: torch.nn.Module, module: torch.nn.Module) -> bool:
    expected = module.state_dict()
    return all(torch.equal(value, expected[name]) for name, value in live.state_dict().items())


@pytest.mark.parametrize("changed", ["the trainer's", "the server's"])
@pytest.mark.parametrize(("carrier", "device"), CARRIERS)
def test_any_change_arrives(carrier: Any, device: str, changed: str, bus_name: str) -> None:
    module, live = square().to(device), square().to(device)
    with both_sides(bus_name, module, carrier, device) as (publisher, subscriber):
        for version, change in enumerate(IN_TURN):
            change_values(module)
            change(module if changed == "the trainer's" else live)
            told = publisher.publish(version)
            assert told.copied_bytes == sum(v.numel() * 4 for v in live.state_dict().values())
            load_newest(subscriber, live)
            assert arrived(live, module), (version, change.__name__)


@pytest.mark.parametrize(("carrier", "device"), CARRIERS)
def test_a_misfit_skips_to_the_newest(carrier: Any, device: str, bus_name: str) -> None:
    module, live = square().to(device), square().to(device)
    other = {name: torch.zeros(5, device=device) for name in module.state_dict()}
    with both_sides(bus_name, module, carrier, device) as (publisher, subscriber):
        numbers = itertools.count()
        for version in range(6):
            change_values(module)
            publisher.publish(next(numbers))
            if version % 2:
                continue  # the loaded versions share a slot
            with subscriber.latest(timeout=5) as weights:
                if version:
                    with pytest.raises(ManifestError, match="the model is unchanged"):
                        weights.load_into(other)
            change_values(module)
            publisher.publish(next(numbers))
            publisher.publish(next(numbers))
            load_newest(subscriber, live)
            assert arrived(live, module), version
    assert not any(value.any() for value in other.values())


@pytest.mark.parametrize(("carrier", "device"), CARRIERS)
def test_a_thread_new_to_the_device_works(carrier: Any, device: str, bus_name: str) -> None:
    module, live = square().to(device), square().to(device)
    with both_sides(bus_name, module, carrier, device) as (publisher, subscriber):
        for version in range(6):
            change_values(module)
            together(publisher.publish, [version])
            with subscriber.latest(timeout=5) as weights:
                together(weights.load_into, [live])
            assert arrived(live, module), version
