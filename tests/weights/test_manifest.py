"""Manifests: what contradicts itself is refused whole, and no bytes deceive who reads one."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shmbus.pool.pool_file import pool_path
from shmbus.tensors.views import TensorPlace
from shmbus.weights import (
    LocalPiece,
    ManifestError,
    ModuleSource,
    ParamMeta,
    Slice,
    WeightPublisher,
    WeightSource,
)
from shmbus.weights.manifest import Manifest


class Strange:
    """A source of one's own, with what it is told to have."""

    def __init__(
        self, *params: ParamMeta, slices: dict[str, Slice] | None = None, pieces: Any = ()
    ) -> None:
        self._params = list(params)
        self._slices = slices or {}
        self.pieces = pieces

    def params(self) -> list[ParamMeta]:
        return self._params

    def aliases(self) -> dict[str, str]:
        return {}

    def slices(self) -> dict[str, Slice]:
        return self._slices

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        yield from self.pieces


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (Strange(ParamMeta("a", "float32", (1,)), ParamMeta("a", "int8", (2,))), "there twice"),
        (Strange(ParamMeta("a", "float31", (1,))), "dtype 'float31' is unknown"),
        (Strange(ParamMeta("", "float32", (1,))), "has no name"),
        (
            Strange(ParamMeta("a", "float32", (4,)), slices={"s": Slice("b", 0, 0, 1)}),
            "'b', which is no tensor",
        ),
        (
            Strange(ParamMeta("a", "float32", (4,)), slices={"s": Slice("a", 0, 3, 2)}),
            "3 to 5 of dimension 0",
        ),
        (
            Strange(
                ParamMeta("a", "int8", (4,)),
                slices={"s": Slice("t", 0, 0, 1), "t": Slice("s", 0, 0, 1)},
            ),
            "more than 4 slices",
        ),
    ],
)
def test_a_contradictory_source_is_refused(source: Strange, text: str, bus_name: str) -> None:
    assert isinstance(source, WeightSource)
    with pytest.raises(ManifestError, match=text):
        WeightPublisher(bus_name, source)
    assert not Path(pool_path(bus_name, "weights")).exists()


def planned() -> Manifest:
    params = [ParamMeta("a", "float32", (4, 4)), ParamMeta("b", "bfloat16", (7,))]
    return Manifest.plan(params, aliases={"c": "a"}, slices={"d": Slice("a", 0, 1, 2)})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "format 2, expected 1"),
        ({"total": 128}, "it says 128 bytes, 512 are there"),
        ({"tensors": [TensorPlace("a", "int8", (4,), 0, 5)]}, "5 bytes for int8"),
        ({"tensors": [TensorPlace("a", "int8", (4,), 8, 4)]}, "no multiple of 256"),
        ({"tensors": [TensorPlace("a", "int8", (-4,), 0, -4)]}, r"shape \[-4\]"),
        ({"tensors": [TensorPlace("a", "int8", (600,), 0, 600)]}, "ends at 600 of 512 bytes"),
        (
            {"tensors": [TensorPlace("a", "int8", (300,), 0, 300),
                         TensorPlace("b", "int8", (4,), 256, 4)]},
            "'a' and 'b' overlap",
        ),
        ({"aliases": {"c": "x"}}, "alias 'c' of 'x', which is no tensor"),
        ({"aliases": {"b": "a"}}, "alias 'b' is a tensor too"),
        ({"slices": {"b": Slice("a", 0, 0, 1)}}, "slice 'b' is a tensor or an alias too"),
        ({"slices": {"d": Slice("a", 5, 0, 1)}}, "dimension 5"),
        ({"slices": {"d": Slice("a", 0, 0, 2, drop_dim=True)}}, "drops a dimension of 2"),
    ],
)  # fmt: skip
def test_a_contradictory_manifest_is_refused(change: dict[str, object], text: str) -> None:
    good = planned()
    assert Manifest.decode(good.encode(), good.total) == good and good.total == 512
    bad = msgspec.structs.replace(good, **change)
    with pytest.raises(ManifestError, match=text):
        Manifest.decode(bad.encode(), 512)


def test_no_bytes_deceive_who_reads_a_manifest(seed: int) -> None:
    rng = random.Random(seed)
    data = planned().encode()
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            found = Manifest.decode(bytes(changed[: rng.randint(0, len(changed))]), 512)
        except ManifestError:
            continue
        for place in found.tensors:
            assert 0 <= place.offset <= place.offset + place.size <= 512


def test_two_tensors_of_one_name_are_refused_not_lost() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with pytest.raises(ManifestError, match=r"'bias' is what rename gives '1\.bias'"):
        ModuleSource(model, rename=lambda name: name.split(".")[1]).params()


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        (lambda t: [LocalPiece("a", (0, 0), t), LocalPiece("a", (0, 0), t)], "'b' did not come"),
        (lambda t: [LocalPiece("a", (0, 0), t)], "24 of 48 bytes"),
        (lambda t: [LocalPiece("a", (0, 0), t), LocalPiece("b", (-1, 0), t)], "is not inside"),
        (lambda t: [LocalPiece("a", (0, 0), t), LocalPiece("z", (0, 0), t)], "not in the manifest"),
        (lambda t: [("a", t)], "expected LocalPieces, got tuple"),
        (lambda t: [None], "expected LocalPieces, got NoneType"),
    ],
)
def test_an_unreliable_source_publishes_nothing(pieces: Any, match: str, bus_name: str) -> None:
    params = [ParamMeta(name, "float32", (2, 3)) for name in "ab"]
    source = Strange(*params, pieces=pieces(torch.ones(2, 3)))
    with WeightPublisher(bus_name, source) as publisher:
        with pytest.raises((ManifestError, TypeError), match=match):
            publisher.publish(version=1)
        source.pieces = [LocalPiece(name, (0, 0), torch.ones(2, 3)) for name in ("a", "b")]
        assert publisher.publish(version=2).copied_bytes == 48
