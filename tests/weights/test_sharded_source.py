"""Shards of every trainer's layout are the model that any engine's layout loads, bit for bit."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from conftest import together
from fused_model import FusedModel, Shape, checkpoint
from weight_models import published

from shmbus.weights import (
    ExportedSource,
    LocalPiece,
    ManifestError,
    MegatronLayout,
    ParamMeta,
    Shard,
    ShardedSource,
    WeightPublisher,
    WeightSubscriber,
    megatron_shards,
    module_shards,
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
    """What all ranks publish, from one process."""

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


def megatron_rank(
    full: Tensors, shape: Shape, sizes: tuple[int, int, int, int], at: tuple[int, int, int, int]
) -> tuple[MegatronLayout, Tensors, dict[str, int]]:
    """Lay out what one rank has, by reshaping whole tensors: another way than by boxes."""
    tp, ep, pp, fsdp = sizes
    tp_rank, ep_rank, pp_rank, fsdp_rank = at
    layers = shape.layers // pp
    layout = MegatronLayout(
        hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head,
        inner=shape.inner, vocab=shape.vocab, experts=shape.experts, expert_inner=shape.inner,
        tp=tp, tp_rank=tp_rank, ep=ep, ep_rank=ep_rank, etp=tp, etp_rank=tp_rank,
        first_layer=pp_rank * layers,
    )  # fmt: skip
    own: Tensors = {}

    def vocabulary(tensor: torch.Tensor) -> torch.Tensor:
        rows = -(-shape.vocab // (128 * tp)) * 128 * tp
        padded = torch.full((rows, shape.hidden), 7.0, dtype=shape.dtype)
        padded[: shape.vocab] = tensor
        return padded.chunk(tp)[tp_rank]

    if pp_rank == 0:
        own["embedding.word_embeddings.weight"] = vocabulary(full["model.embed_tokens.weight"])
    if pp_rank == pp - 1:
        own["output_layer.weight"] = vocabulary(full["lm_head.weight"])
        own["decoder.final_layernorm.weight"] = full["model.norm.weight"]
    for layer in range(layers):
        there, here = f"model.layers.{pp_rank * layers + layer}", f"decoder.layers.{layer}"
        groups = shape.kv_heads
        q, k, v = (
            full[f"{there}.self_attn.{name}_proj.weight"].view(groups, -1, shape.hidden)
            for name in "qkv"
        )
        fused = torch.cat([q, k, v], dim=1).chunk(tp)[tp_rank].reshape(-1, shape.hidden)
        own[f"{here}.self_attention.linear_qkv.weight"] = fused
        own[f"{here}.self_attention.linear_proj.weight"] = full[
            f"{there}.self_attn.o_proj.weight"
        ].chunk(tp, dim=1)[tp_rank]
        own[f"{here}.self_attention.linear_qkv.layer_norm_weight"] = full[
            f"{there}.input_layernorm.weight"
        ]
        own[f"{here}.pre_mlp_layernorm.weight"] = full[f"{there}.post_attention_layernorm.weight"]
        mlps = {"mlp.linear_fc{}.weight": f"{there}.mlp"}
        if shape.experts:
            own[f"{here}.mlp.router.weight"] = full[f"{there}.mlp.gate.weight"]
            each = shape.experts // ep
            mlps = {
                f"mlp.experts.linear_fc{{}}.weight{n}"
                if layer % 2
                else f"mlp.experts.local_experts.{n}.linear_fc{{}}.weight":
                f"{there}.mlp.experts.{ep_rank * each + n}"
                for n in range(each)
            }  # fmt: skip
        for name, mlp in mlps.items():
            parts = [
                full[f"{mlp}.{which}_proj.weight"].chunk(tp)[tp_rank] for which in ("gate", "up")
            ]
            own[f"{here}.{name.format(1)}"] = torch.cat(parts)
            down = full[f"{mlp}.down_proj.weight"].chunk(tp, dim=1)[tp_rank]
            own[f"{here}.{name.format(2)}"] = down
    first: dict[str, int] = {}
    for name, tensor in own.items():
        rows = -(-len(tensor) // fsdp)  # cuts through a head, as it comes
        first[name] = min(fsdp_rank * rows, len(tensor))
        own[name] = tensor[first[name] : first[name] + rows].clone()
    return layout, own, first


@pytest.mark.parametrize("shape", [DENSE, SHAPE], ids=["dense", "experts"])
@pytest.mark.parametrize("sizes", [*itertools.product((1, 2), repeat=4), (4, 1, 1, 3)], ids=str)
def test_every_trainers_layout_is_what_every_engines_layout_loads(
    bus_name: str, seed: int, sizes: tuple[int, int, int, int], shape: Shape
) -> None:
    full = whole(shape, seed)
    ranks = [
        megatron_rank(full, shape, sizes, at)
        for at in itertools.product(*(range(size) for size in sizes))
    ]
    assert (
        max(sum(each.nbytes for each in own.values()) for _, own, _ in ranks)
        <= sum(each.nbytes for each in full.values()) + 2 * 128 * sizes[0] * shape.hidden * 2
    )
    shards = [
        lambda layout=layout, own=own, first=first: megatron_shards(
            own.items(), layout, first_row=first
        )
        for layout, own, first in ranks
    ]
    source = Together(Ranks(len(ranks)).sources(shards))
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
            for _, own, _ in ranks:
                for tensor in own.values():
                    tensor.neg_()
            for tensor in full.values():
                tensor.neg_()


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
    source = ShardedSource(lambda: shards)
    with WeightPublisher(bus_name, source) as publisher:
        publisher.publish(version=1)
        shards[:] = [row_shard("a", 0, 4)]
        with pytest.raises(ManifestError, match=r"'a' at .* is gone"):
            publisher.publish(version=2)
        with WeightSubscriber(bus_name) as subscriber, subscriber.latest(timeout=5) as weights:
            assert weights.version == 1


def test_a_module_is_its_own_shards(bus_name: str) -> None:
    model = torch.nn.Linear(4, 3)
    with published(bus_name, ShardedSource(lambda: module_shards(model))) as (
        publisher,
        subscriber,
    ):
        publisher.publish(version=1)
        with subscriber.latest(timeout=5) as weights:
            assert torch.equal(weights["weight"], model.weight)


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


def test_a_layout_that_cannot_be_cut_and_a_parameter_that_is_unknown_are_refused() -> None:
    sizes = dict(hidden=8, heads=4, kv_heads=2, head_dim=2, inner=8, vocab=10)
    with pytest.raises(ValueError, match="kv_heads 2 by tp 4"):
        MegatronLayout(**sizes, tp=4)
    layout = MegatronLayout(**sizes)
    with pytest.raises(ValueError, match=r"'mamba\.weight' of a layer"):
        list(megatron_shards([("decoder.layers.0.mamba.weight", torch.ones(2))], layout))
    with pytest.raises(ValueError, match="expected at most"):
        wrong = torch.ones(17, 8)
        list(
            megatron_shards([("decoder.layers.0.self_attention.linear_qkv.weight", wrong)], layout)
        )
