"""Patches by several ranks: each makes its own, and readers that are cut otherwise follow."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from weight_models import bits, step

from shmbus.pool.lifecycle import pool_path
from shmbus.weights import (
    LocalPiece,
    ParamMeta,
    Slice,
    WeightPublisher,
    WeightSubscriber,
)

VERSIONS = 6


class Whole(torch.nn.Module):
    """Tensors of which no number of ranks divides each dimension, in several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(3)
        shapes = {"up": (30, 514), "down": (700, 13), "experts": (5, 70, 33), "bias": (9,)}
        for number, (name, shape) in enumerate(shapes.items()):
            dtype = (torch.bfloat16, torch.float32, torch.float16, torch.float64)[number]
            value = torch.randn(shape, generator=made).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(value))


class Shards:
    """A source that has the shards of one dimension, as a tensor-parallel trainer does."""

    def __init__(self, model: torch.nn.Module, dim: int) -> None:
        self._model, self._dim = model, dim

    def params(self) -> list[ParamMeta]:
        """All tensors."""
        return [
            ParamMeta(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in self._model.state_dict().items()
        ]

    def aliases(self) -> Mapping[str, str]:
        """None."""
        return {}

    def slices(self) -> Mapping[str, Slice]:
        """None."""
        return {}

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        """The rank's chunk of each tensor, in memory of its own; uneven, and maybe empty."""
        for name, value in self._model.state_dict().items():
            dim = min(self._dim, value.dim() - 1)
            chunk = -(-value.shape[dim] // world_size)
            at = min(rank * chunk, value.shape[dim])
            length = min(chunk, value.shape[dim] - at)
            start = tuple(at if each == dim else 0 for each in range(value.dim()))
            yield LocalPiece(name, start, value.narrow(dim, at, length).clone())


def publish_all(publishers: list[WeightPublisher], version: int) -> list[int | None]:
    """Publish a version from every rank at once."""
    told: list[int | None] = [None] * len(publishers)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            told[rank] = publishers[rank].publish(version=version).changed
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(publishers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    return told


def part(model: torch.nn.Module, dim: int, rank: int, world: int) -> dict[str, torch.Tensor]:
    """What a server of a tensor-parallel group has of a model."""
    return {piece.name: piece.tensor for piece in Shards(model, dim).iter_local(rank, world)}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_patches_of_every_layout_make_one_model_for_every_reader(
    world: int, dim: int, bus_name: str, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = Whole(), Whole()
    publishers = [
        WeightPublisher(
            bus_name, Shards(model, dim), rank=rank, world_size=world, patches=0.3, timeout=30
        )
        for rank in range(world)
    ]
    try:
        with WeightSubscriber(bus_name, patches=True) as subscriber:
            for version in range(VERSIONS):
                step(model, made, 0.02)
                told = publish_all(publishers, version)
                assert [it is None for it in told] == [version == 0] * world
                with subscriber.latest(timeout=5) as weights:
                    weights.load_into(replica)
                    assert weights.loaded == ("patch" if version else "whole")
                    views = {name: weights[name] for name in weights}
                    for servers in (1, 2, 4):
                        for server in range(servers):
                            wanted = part(model, dim, server, servers)
                            found = torch.nn.Module()
                            for name, view in views.items():
                                found.register_buffer(name, view)
                            for name, value in part(found, dim, server, servers).items():
                                assert bits(value) == bits(wanted[name])
                    del views, view, found
                state = model.state_dict()
                assert all(bits(it) == bits(state[n]) for n, it in replica.state_dict().items())
    finally:
        for publisher in reversed(publishers):
            publisher.close()
        Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)


def test_a_rank_whose_patch_is_full_leaves_the_version_whole_for_all(
    bus_name: str, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    model, replica = Whole(), Whole()
    publishers = [
        WeightPublisher(
            bus_name, Shards(model, 0), rank=rank, world_size=2, patches=0.3, timeout=30
        )
        for rank in range(2)
    ]
    loaded = []
    try:
        with WeightSubscriber(bus_name, patches=True) as subscriber:
            for version in range(6):
                step(model, made, 0.01)
                if version == 2:  # all that rank 1 has, and no more
                    with torch.no_grad():
                        for value in model.parameters():
                            value[-(value.shape[0] // 2) :] += 1
                publish_all(publishers, version)
                with subscriber.latest(timeout=5) as weights:
                    weights.load_into(replica)
                    loaded.append(weights.loaded)
                state = model.state_dict()
                assert all(bits(it) == bits(state[n]) for n, it in replica.state_dict().items())
    finally:
        for publisher in reversed(publishers):
            publisher.close()
        Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)
    # One goes out without an attempt after it, and the next has a whole one to begin with.
    assert loaded == ["whole", "patch", "whole", "whole", "patch", "patch"]
