"""Shards of every trainer's layout are the model that any engine's layout loads, bit for bit."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from conftest import together
from fused_model import FusedModel, Shape, checkpoint

from shmbus.weights import (
    ExportedSource,
    LocalPiece,
    ManifestError,
    ParamMeta,
    Shard,
    ShardedSource,
    WeightPublisher,
    WeightSubscriber,
)

Tensors = dict[str, torch.Tensor]
SHAPE = Shape(layers=4, hidden=64, heads=8, kv_heads=4, head=16, inner=32, vocab=300, experts=4)
DENSE = SHAPE._replace(experts=0)


def whole(shape: Shape, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(sizes, generator=generator).to(shape.dtype)
        for name, sizes in checkpoint(shape).items()
    }


class Ranks:
    """Ranks as threads that say at once what they have."""

    def __init__(self, count: int) -> None:
        self.said: list[bytes] = [b""] * count
        self.barrier = threading.Barrier(count, timeout=60)

    def sources(self, shards: Sequence[Callable[[], Any]]) -> list[ShardedSource]:
        made: list[Any] = [None] * len(shards)

        def make(rank: int) -> None:
            def exchange(said: bytes) -> Sequence[bytes]:
                self.said[rank] = said
                self.barrier.wait()
                return self.said

            try:
                made[rank] = ShardedSource(shards[rank], exchange=exchange)
            except Exception as error:
                made[rank] = error

        together(make, range(len(shards)))
        errors = [each for each in made if isinstance(each, Exception)]
        if errors:
            assert len({str(each) for each in errors}) == 1, "ranks disagree about what is wrong"
            raise errors[0]
        return made


class Together:
    """Return the publication of every rank, from a single process."""

    def __init__(self, sources: Sequence[ShardedSource]) -> None:
        self.sources = sources

    def params(self) -> list[ParamMeta]:
        assert all(each.params() == self.sources[0].params() for each in self.sources)
        return self.sources[0].params()

    def aliases(self) -> Mapping[str, str]:
        return {}

    def slices(self) -> Mapping[str, Any]:
        return {}

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        for at, source in enumerate(self.sources):
            yield from source.iter_local(at, len(self.sources))


def boxes_of(full: Tensors, ranks: int, chance: random.Random) -> list[list[Shard]]:
    """Deal boxes of every tensor, cut anywhere in two dimensions, to ranks; some have several."""
    found: list[list[Shard]] = [[] for _ in range(ranks)]
    for name, tensor in full.items():
        cuts = [
            [0, *sorted(chance.sample(range(1, size), min(size - 1, chance.randrange(4)))), size]
            for size in tensor.shape
        ]
        for box in itertools.product(*map(itertools.pairwise, cuts)):
            part = tensor[tuple(slice(*edge) for edge in box)]
            shard = Shard(name, tuple(tensor.shape), tuple(start for start, _ in box), part)
            for rank in chance.sample(range(ranks), 1 + (chance.random() < 0.2 and ranks > 1)):
                found[rank].append(shard)
    return found


@pytest.mark.parametrize("shape", [DENSE, SHAPE], ids=["dense", "experts"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_trainers_layout_is_what_every_engines_layout_loads(
    bus_name: str, seed: int, ranks: int, shape: Shape
) -> None:
    full = whole(shape, seed)
    shards = boxes_of(full, ranks, random.Random(seed))
    source = Together(Ranks(ranks).sources([lambda own=own: own for own in shards]))
    with WeightPublisher(bus_name, source) as publisher, WeightSubscriber(bus_name) as subscriber:
        for version in (1, 2):
            publisher.publish(version=version)
            with subscriber.latest(timeout=10) as weights:
                assert set(weights) == set(full)
                for name, tensor in full.items():
                    assert torch.equal(weights[name], tensor), name
                for count in (1, 2, 4):
                    for rank in range(count):
                        model, wanted = (FusedModel(shape, rank, count) for _ in range(2))
                        model.load_weights(weights.items())
                        wanted.load_weights(full.items())
                        pairs = zip(model.parameters(), wanted.parameters(), strict=True)
                        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
            for tensor in full.values():
                tensor.neg_()  # the shards are views


def row_shard(name: str, first: int, rows: int) -> Shard:
    return Shard(name, (8, 2), (first, 0), torch.ones(rows, 2))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([[row_shard("a", 0, 4)], [row_shard("a", 5, 3)]], "'a': 2 of 16 elements are in no rank"),
        ([[row_shard("a", 0, 5)], [row_shard("a", 4, 4)]], r"'a': .* of rank 1 and .* overlap"),
        (
            [[row_shard("a", 0, 8)], [Shard("a", (8, 3), (0, 0), torch.ones(8, 3))]],
            r"'a': rank 1 has float32 \[8, 3\], another rank float32 \[8, 2\]",
        ),
        ([[row_shard("a", 0, 8)], [row_shard("b", 6, 4)]], r"'b': \[4, 2\] at \[6, 0\]"),
    ],
)
def test_holes_overlaps_and_conflicts_are_refused(ranks: list[list[Shard]], said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        if "6, 0" in said:
            ShardedSource(lambda: ranks[1])
        Ranks(len(ranks)).sources([lambda each=each: each for each in ranks])


def test_what_several_ranks_have_alike_is_written_by_one_of_them(seed: int) -> None:
    tensor = torch.randn(8, 2)
    names = [f"norm{number}" for number in range(6)]
    shards = [Shard(name, (8, 2), (0, 0), tensor) for name in names]
    sources = Ranks(3).sources([lambda: shards] * 3)
    written = [[piece.name for piece in each.iter_local(at, 3)] for at, each in enumerate(sources)]
    assert sorted(itertools.chain(*written)) == names
    assert [len(each) for each in written] == [2, 2, 2]


def test_a_rank_that_has_other_shards_than_it_said_publishes_nothing(bus_name: str) -> None:
    shards = [row_shard("a", 0, 8)]
    with WeightPublisher(bus_name, ShardedSource(lambda: shards)) as publisher:
        publisher.publish(version=1)
        shards[:] = [row_shard("a", 0, 4)]
        with pytest.raises(ManifestError, match=r"'a' at .* is gone"):
            publisher.publish(version=2)
        with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=5) as weights:
            assert weights.version == 1


def test_ranks_share_out_what_is_exported_and_notice_what_is_another(seed: int) -> None:
    full = whole(DENSE, seed)
    exports = 0

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal exports
        exports += 1
        yield from ((name, tensor.clone()) for name, tensor in full.items())

    source = ExportedSource(export)
    found: Tensors = {}
    for rank in range(3):
        for piece in source.iter_local(rank, 3):
            assert piece.name not in found and not piece.lasting
            found[piece.name] = piece.tensor
    assert exports == 4
    assert all(torch.equal(found[name], tensor) for name, tensor in full.items())
    del full["model.norm.weight"]
    with pytest.raises(ManifestError, match="exported"):
        list(source.iter_local(0, 1))
