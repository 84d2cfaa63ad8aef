"""What a publisher found out about a model for one version is never used for another model."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shmbus.weights import (
    ManifestError,
    ModuleSource,
    WeightPublisher,
    WeightSubscriber,
)


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


on_a_device = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
CARRIERS = [
    ("shm", "cpu"),
    ("memfd", "cpu"),
    pytest.param("shm", "cuda:0", marks=on_a_device),
    pytest.param("cuda_vmm", "cuda:0", marks=on_a_device),
]


@contextlib.contextmanager
def both_sides(
    bus: str, module: torch.nn.Module, carrier: Any, device: str
) -> Iterator[tuple[WeightPublisher, WeightSubscriber]]:
    options: Any = {"device": device} if carrier == "cuda_vmm" else {}
    with (
        WeightPublisher(bus, ModuleSource(module), carrier=carrier, **options) as publisher,
        WeightSubscriber(bus, device=device) as subscriber,
    ):
        yield publisher, subscriber


@pytest.mark.parametrize(("carrier", "device"), CARRIERS)
def test_a_model_that_was_changed_in_any_way_arrives_as_it_is(carrier: Any, device: str) -> None:
    bus = f"test-lasting-{carrier}-{os.getpid()}"
    module = model().to(device)
    live = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    with both_sides(bus, module, carrier, device) as (publisher, subscriber):
        # Each change meets both slots, with and without what was known of them.
        for version, change in enumerate([nothing, nothing, *CHANGES, *reversed(CHANGES)]):
            change(module)
            module.to(device)
            told = publisher.publish(version)
            assert told.copied_bytes == sum(v.numel() * 4 for v in live.values())
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(live)
            for name, value in module.state_dict().items():
                assert torch.equal(live[name], value), (version, change.__name__, name)


@pytest.mark.parametrize(("carrier", "device"), CARRIERS)
def test_a_live_model_that_was_changed_in_any_way_gets_what_was_published(
    carrier: Any, device: str
) -> None:
    bus = f"test-lasting-live-{carrier}-{os.getpid()}"
    module, live = model().to(device), model().to(device)
    with both_sides(bus, module, carrier, device) as (publisher, subscriber):
        for version, change in enumerate([nothing, nothing, *CHANGES, *reversed(CHANGES)]):
            change_values(module)
            publisher.publish(version)
            change(live)
            live.to(device)
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(live)
            expected = module.state_dict()
            for name, value in live.state_dict().items():
                assert torch.equal(value, expected[name]), (version, change.__name__, name)


@pytest.mark.parametrize(("carrier", "device"), CARRIERS)
def test_after_a_model_that_does_not_fit_the_next_one_gets_what_is_newest(
    carrier: Any, device: str
) -> None:
    bus = f"test-lasting-misfit-{carrier}-{os.getpid()}"
    module, live = model().to(device), model().to(device)
    other = {name: torch.zeros(5, device=device) for name in module.state_dict()}
    with both_sides(bus, module, carrier, device) as (publisher, subscriber):
        numbers = itertools.count()
        for version in range(6):
            change_values(module)
            publisher.publish(next(numbers))
            if version % 2:
                continue  # each of those that are loaded is in the same slot
            with subscriber.latest(timeout=5) as weights:
                if version:
                    with pytest.raises(ManifestError, match="nothing of it was changed"):
                        weights.load_into(other)
            change_values(module)
            publisher.publish(next(numbers))
            publisher.publish(next(numbers))
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(live)
            expected = module.state_dict()
            for name, value in live.state_dict().items():
                assert torch.equal(value, expected[name]), (version, name)
    assert not any(value.any() for value in other.values())


def in_a_thread_of_its_own(call: Callable[[], object]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.mark.parametrize(("carrier", "device"), CARRIERS)
def test_a_thread_that_never_used_the_device_publishes_and_loads(carrier: Any, device: str) -> None:
    bus = f"test-lasting-thread-{carrier}-{os.getpid()}"
    module, live = model().to(device), model().to(device)
    with both_sides(bus, module, carrier, device) as (publisher, subscriber):
        for version in range(6):
            change_values(module)
            in_a_thread_of_its_own(lambda version=version: publisher.publish(version))  # type: ignore[misc]
            with subscriber.latest(timeout=5) as weights:
                in_a_thread_of_its_own(lambda weights=weights: weights.load_into(live))  # type: ignore[misc]
            expected = module.state_dict()
            for name, value in live.state_dict().items():
                assert torch.equal(value, expected[name]), (version, name)
