"""Matrices in fp8 by blocks: the bits are those of the plainest way, and scales come with them."""

import os
from collections.abc import Iterator, Mapping

import pytest
import torch
from weight_models import published

from shmbus.weights import (
    Fp8BlockSource,
    LocalPiece,
    ModuleSource,
    ParamMeta,
    Slice,
    WeightPublisher,
    WeightsError,
)


def plainly(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = matrix.shape
    elements = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            block = matrix[row : row + 128, column : column + 128].float()
            largest = max(abs(value) for value in block.flatten().tolist())
            scale = torch.tensor(largest) / 448 if largest else torch.tensor(1.0)
            scales[row // 128, column // 128] = scale
            elements[row : row + 128, column : column + 128] = (block / scale).to(elements.dtype)
    return elements, scales


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    module = torch.nn.Module()
    for number, shape in enumerate([(256, 384), (200, 130), (1, 5), (300,)]):
        value = torch.randn(shape) * 10.0 ** (number - 2)
        module.register_parameter(f"p{number}", torch.nn.Parameter(value.to(torch.bfloat16)))
    with torch.no_grad():
        module.p0[:128, :128] = 0  # type: ignore[operator]
    module.register_parameter("tied", module.p0)  # type: ignore[arg-type]
    return module


@pytest.mark.parametrize("patches", [False, 0.5])
def test_a_version_equals_the_plainest_conversion(patches: float | bool) -> None:
    bus = f"test-fp8-{os.getpid()}"
    module = model()
    parts = {"top": Slice("p0", 0, 0, 128), "last": Slice("p1", 0, 128, 72)}
    source = Fp8BlockSource(ModuleSource(module, slices=parts))
    with published(bus, source, patches=patches) as (publisher, subscriber):
        for version in range(4):
            with torch.no_grad():
                module.p1[version, version] = 1000.0 * version  # type: ignore[operator]
            publisher.publish(version)
            with subscriber.latest(timeout=5) as weights:
                for name in ("p0", "p1", "p2"):
                    elements, scales = plainly(module.get_parameter(name).detach())
                    assert same(weights[name], elements), (version, name)
                    assert same(weights[name + "_scale_inv"], scales), (version, name)
                assert same(weights["p3"], module.get_parameter("p3").detach())
                assert same(weights["tied_scale_inv"], weights["p0_scale_inv"])
                assert same(weights["top_scale_inv"], weights["p0_scale_inv"][:1])
                assert same(weights["last_scale_inv"], weights["p1_scale_inv"][1:])


class Shards:
    def __init__(self, matrix: torch.Tensor, cut: int) -> None:
        self.matrix, self.cut = matrix, cut

    def params(self) -> list[ParamMeta]:
        return [ParamMeta("w", "bfloat16", tuple(self.matrix.shape))]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def slices(self) -> Mapping[str, Slice]:
        return {}

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        del rank, world_size
        yield LocalPiece("w", (0, 0), self.matrix[: self.cut])
        yield LocalPiece("w", (self.cut, 0), self.matrix[self.cut :])


def test_shards_of_whole_blocks_are_the_whole_and_others_are_refused() -> None:
    bus = f"test-fp8-shards-{os.getpid()}"
    matrix = torch.randn(300, 140, generator=torch.Generator().manual_seed(1))
    with published(bus, Fp8BlockSource(Shards(matrix, 128))) as (publisher, subscriber):
        publisher.publish(1)
        with subscriber.latest(timeout=5) as weights:
            elements, scales = plainly(matrix)
            assert same(weights["w"], elements)
            assert same(weights["w_scale_inv"], scales)
    cut = Fp8BlockSource(Shards(matrix, 100))
    with WeightPublisher(bus, cut) as publisher, pytest.raises(WeightsError, match="cuts a block"):
        publisher.publish(1)


def test_a_slice_that_cuts_a_block_is_refused() -> None:
    source = ModuleSource(model(), slices={"part": Slice("p0", 0, 64, 64)})
    with pytest.raises(WeightsError, match="'part'"):
        Fp8BlockSource(source).slices()


def test_what_is_left_out_stays_as_it_is() -> None:
    source = Fp8BlockSource(ModuleSource(model()), only=lambda name: name != "p0")
    dtypes = {param.name: param.dtype for param in source.params()}
    assert dtypes["p0"] == "bfloat16"
    assert dtypes["p1"] == "float8_e4m3fn"
    assert "p0_scale_inv" not in dtypes


def test_a_block_with_nan_or_an_infinity_is_nan_and_no_other() -> None:
    for bad in (torch.nan, torch.inf):
        matrix = torch.ones(130, 256)
        matrix[3, 4] = bad
        source = Fp8BlockSource(Shards(matrix, 128))
        found = {
            piece.name: piece.tensor for piece in source.iter_local(0, 1) if piece.start == (0, 0)
        }
        assert bool(found["w"][:128, :128].float().isnan().all())
        assert not bool(found["w"][:, 128:].float().isnan().any())
