"""Stochastic rounding: unbiased, repeatable, on the grid, and through every carrier of the host."""

import os
from pathlib import Path

import pytest
import torch

from shmbus.weights import (
    ManifestError,
    ModuleSource,
    Shard,
    ShardedSource,
    WeightPublisher,
    WeightsError,
    WeightSource,
    WeightSubscriber,
)
from shmbus.weights.rounding import HOST_CHUNK_ELEMENTS, round_stochastically

VALUES = [1 + 2**-9, -1.00001, 1e-6, 3e-8, -5e-8, 0.1, 40_000.7, -(2**-14) * 1.0003, 65_503.9]
HALVES = [torch.bfloat16, torch.float16]


def rounded(values: torch.Tensor, dtype: torch.dtype, version: int = 7) -> torch.Tensor:
    return round_stochastically(values, dtype, version, "layer", (0,))


@pytest.mark.parametrize("dtype", HALVES)
def test_each_value_becomes_a_neighbour_on_the_grid_and_the_mean_stays(dtype: torch.dtype) -> None:
    for value in VALUES:
        many = rounded(torch.full((1 << 17,), value), dtype).double()
        nearest = torch.tensor(value).to(dtype)
        step = 2 * abs(float(nearest.double() - value)) + 2.0**-24
        assert len(many.unique()) <= 2
        assert (many - value).abs().max() <= max(step, abs(value) * 2**-7)
        spread = float(many.max() - many.min())
        assert abs(float(many.mean()) - value) <= spread * 0.01 + abs(value) * 1e-7


@pytest.mark.parametrize("dtype", HALVES)
def test_values_on_the_grid_and_special_values_stay(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, largest, -largest])
    exact = torch.cat([special, torch.randn(4096).to(dtype).float()])
    assert torch.equal(rounded(exact, dtype).view(torch.int16), exact.to(dtype).view(torch.int16))
    beyond = torch.tensor([torch.finfo(torch.float32).max])
    assert rounded(beyond, torch.bfloat16).isfinite().all()


def test_a_version_has_the_same_bits_again_and_another_version_other_bits() -> None:
    values = torch.randn(HOST_CHUNK_ELEMENTS + 5, generator=torch.Generator().manual_seed(1))
    first = rounded(values, torch.bfloat16)
    assert torch.equal(first, rounded(values, torch.bfloat16))
    assert not torch.equal(first, rounded(values, torch.bfloat16, version=8))
    turned = torch.randn(33, 17).t()
    assert torch.equal(rounded(turned, torch.bfloat16), rounded(turned.clone(), torch.bfloat16))


def master(count: int = 50_000) -> torch.nn.Module:
    """Weights on the bfloat16 grid, and an update of a tenth of a grid step."""
    module = torch.nn.Module()
    grid = torch.ones(count)
    module.register_parameter("w", torch.nn.Parameter(grid * (1 + 0.1 * 2**-7)))
    module.register_parameter("whole", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))
    module.register_buffer("steps", torch.tensor([3]))
    return module


def sources(module: torch.nn.Module) -> dict[str, WeightSource]:
    def shards() -> list[Shard]:
        return [Shard("w", (50_000,), (0,), module.w, dtype=torch.bfloat16)]  # type: ignore[arg-type]

    return {
        "module": ModuleSource(module, dtype=torch.bfloat16, rounding="stochastic"),
        "shards": ShardedSource(shards, rounding="stochastic"),
    }


@pytest.mark.parametrize("source", ["module", "shards"])
@pytest.mark.parametrize("carrier", ["shm", "memfd", "checkpoint", "patches"])
def test_an_update_below_the_grid_reaches_readers_of_each_carrier_in_the_mean(
    carrier: str, source: str, tmp_path: Path
) -> None:
    bus = f"test-rounding-{os.getpid()}"
    module = master()
    given = sources(module)[source]
    patches = 1.0 if carrier == "patches" else False
    name = "shm" if carrier == "patches" else carrier
    options = {"carrier": name} | ({"directory": tmp_path} if name == "checkpoint" else {})
    with (
        WeightPublisher(bus, given, patches=patches, **options) as publisher,  # type: ignore[arg-type]
        WeightSubscriber(bus, **options) as subscriber,  # type: ignore[arg-type]
    ):
        for version in (1, 2, 3):
            publisher.publish(version)
            with subscriber.latest(timeout=10.0) as weights:
                found = weights["w"].clone()
            assert torch.equal(
                found,
                round_stochastically(module.w.data, torch.bfloat16, version, "w", (0,)),  # type: ignore[union-attr, arg-type]
            )
            share = float((found > 1).float().mean())
            assert 0.09 < share < 0.11  # rounded to nearest: none


@pytest.mark.parametrize(
    ("value", "own", "published"),
    [
        (70_000.0, torch.float32, torch.float16),
        (66_000.0, torch.bfloat16, torch.float16),
        (1e39, torch.float64, torch.bfloat16),
        (500.0, torch.float32, torch.float8_e4m3fn),
    ],
)
def test_an_overflow_of_any_part_names_the_tensor_and_keeps_the_version_before(
    value: float, own: torch.dtype, published: torch.dtype, bus_name: str
) -> None:
    head, tail = torch.tensor([[1, torch.nan], [1, torch.inf]], dtype=own)
    parts = [Shard("w", (4,), (at,), part, dtype=published) for at, part in ((0, head), (2, tail))]
    source = ShardedSource(lambda: parts, rounding="stochastic")
    with WeightPublisher(bus_name, source) as publisher, WeightSubscriber(bus_name) as subscriber:
        publisher.publish(1)
        head[0] = value
        with pytest.raises(WeightsError, match="'w' has"):
            publisher.publish(2)
        with subscriber.latest(timeout=10.0) as weights:
            assert weights.version == 1 and float(weights["w"][0]) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int32])
def test_a_reader_refuses_a_cast_that_loses_the_value(dtype: torch.dtype, bus_name: str) -> None:
    model = torch.nn.ParameterDict({"w": torch.tensor([1.0, 70_000.5])})
    target = {"w": torch.zeros(2, dtype=dtype)}
    source = ModuleSource(model)
    with WeightPublisher(bus_name, source) as publisher, WeightSubscriber(bus_name) as subscriber:
        publisher.publish(1)
        with subscriber.latest(timeout=10.0) as weights:
            with pytest.raises(ManifestError, match="'w'"):
                weights.load_into(target, cast=True)
            assert not target["w"].any()
