"""Weights as they are used by hand: names, slices, sources and targets that make half a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from shmbus import BusRemovedError, WaitTimeoutError
from shmbus.pool import unlink_pool
from shmbus.weights import (
    LocalPiece,
    ManifestError,
    ModuleSource,
    ParamMeta,
    Slice,
    WeightPublisher,
    WeightsError,
    WeightSubscriber,
)
from shmbus.weights.manifest import Manifest

Q = torch.arange(16.0).reshape(4, 4)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Free a tensor's storage and leave its shape, as FSDP does."""
    tensor.untyped_storage().resize_(0)
    return tensor


class Holder(torch.nn.Module):
    """Tensors by any names."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class GivenSource:
    """A source of the user's own, which may say one thing and give another."""

    def __init__(self, names: list[str], pieces: list[Any]) -> None:
        self._names, self._pieces = names, pieces

    def params(self) -> list[ParamMeta]:
        return [ParamMeta(name, "float32", (2, 3)) for name in self._names]

    def aliases(self) -> Mapping[str, str]:
        return {}

    def slices(self) -> Mapping[str, Slice]:
        return {}

    def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
        del rank, world_size
        yield from self._pieces


def load(bus: str, model: torch.nn.Module, target: Any, **options: Any) -> None:
    with WeightPublisher(bus, ModuleSource(model)) as publisher, WeightSubscriber(bus) as reader:
        publisher.publish(version=1)
        with reader.latest(timeout=5.0) as weights:
            weights.load_into(target, **options)


@pytest.mark.parametrize(
    "parts",
    [
        {"q": Slice("qk", 0, 0, 4), "k": Slice("qk", 0, 0, 4)},
        {"q": Slice("qk", 0, 0, 4), "k": Slice("qk", 0, 2, 4)},
        {"q": Slice("qk", 0, 2, 4), "k": Slice("qk", 0, 4, 4)},
    ],
)
def test_slices_that_do_not_make_up_a_fused_tensor_change_nothing(
    parts: dict[str, Slice], bus_name: str
) -> None:
    target = {"qk": torch.zeros(8, 4)}
    with pytest.raises(ManifestError, match="each row has to be in one of them"):
        load(bus_name, Holder(q=Q, k=Q + 1), target, slices=parts)
    assert not target["qk"].any()
    whole = {"k": Slice("qk", 0, 4, 4), "q": Slice("qk", 0, 0, 4)}
    load(bus_name, Holder(q=Q, k=Q + 1), target, slices=whole)
    assert torch.equal(target["qk"], torch.cat([Q, Q + 1]))


def test_two_tensors_of_one_name_are_refused_not_lost() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with pytest.raises(ManifestError, match=r"'bias' is what rename gives '1\.bias'"):
        ModuleSource(model, rename=lambda name: name.split(".")[1]).params()


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.zeros(1, 4).expand(4, 4), "is expanded"),
        (torch.zeros(4, 4).to_sparse(), "layout torch.sparse_coo"),
        (freed(torch.zeros(4, 4)), "has no memory"),
        (torch.zeros(4, 4, device="meta"), "meta device"),
        (torch.zeros(4, 4, dtype=torch.complex64).conj(), "conjugate"),
    ],
)
def test_a_target_that_cannot_be_written_is_found_before_the_first_byte(
    tensor: torch.Tensor, match: str, bus_name: str
) -> None:
    first = torch.zeros(4, 4)
    model = Holder(a=Q, b=Q.to(tensor.dtype))
    with pytest.raises(ManifestError, match=match):
        load(bus_name, model, {"a": first, "b": tensor})
    assert not first.any()


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (torch.zeros(4).to_sparse(), "to_dense"),
        (freed(torch.zeros(4)), "has no memory"),
        (torch.nn.parameter.UninitializedBuffer(), "first forward pass"),
    ],
)
def test_a_tensor_without_plain_bytes_is_not_published(tensor: torch.Tensor, match: str) -> None:
    with pytest.raises(WeightsError, match=match):
        ModuleSource(Holder(a=tensor)).params()


@pytest.mark.parametrize("patches", [False, True])
def test_lazy_conjugates_and_negatives_arrive_as_what_they_mean(
    patches: bool, bus_name: str
) -> None:
    plain = torch.complex(Q, Q + 1)
    model = Holder(a=plain.conj(), b=plain.conj().imag)
    target = {"a": torch.zeros_like(plain), "b": torch.zeros(4, 4)}
    with WeightPublisher(bus_name, ModuleSource(model), patches=patches) as publisher:
        for version in range(3):
            plain[0, 0] = complex(version, version)
            publisher.publish(version=version)
            with WeightSubscriber(bus_name) as reader, reader.latest(timeout=5.0) as weights:
                weights.load_into(target)
            assert torch.equal(target["a"], plain.conj().resolve_conj())
            assert torch.equal(target["b"], -plain.imag)


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        (lambda t: [LocalPiece("a", (0, 0), t), LocalPiece("a", (0, 0), t)], "'b' did not come"),
        (lambda t: [LocalPiece("a", (0, 0), t)], "24 of 48 bytes"),
        (lambda t: [LocalPiece("a", (0, 0), t), LocalPiece("b", (-1, 0), t)], "is not inside"),
        (lambda t: [LocalPiece("a", (0, 0), t), LocalPiece("z", (0, 0), t)], "not in the manifest"),
    ],
)
def test_a_source_that_gives_something_else_publishes_nothing(
    pieces: Any, match: str, bus_name: str
) -> None:
    source = GivenSource(["a", "b"], pieces(torch.ones(2, 3)))
    with WeightPublisher(bus_name, source) as publisher:
        with pytest.raises(ManifestError, match=match):
            publisher.publish(version=1)
        source._pieces = [LocalPiece(name, (0, 0), torch.ones(2, 3)) for name in ("a", "b")]
        assert publisher.publish(version=2).copied_bytes == 48


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([("a", torch.ones(2, 3))], "expected LocalPieces, got tuple"),
        ([None], "expected LocalPieces, got NoneType"),
    ],
)
def test_a_source_that_gives_no_pieces_is_told_so(pieces: Any, match: str, bus_name: str) -> None:
    with (
        WeightPublisher(bus_name, GivenSource(["a"], pieces)) as publisher,
        pytest.raises(TypeError, match=match),
    ):
        publisher.publish(version=1)


@pytest.mark.parametrize(
    ("start", "tensor", "match"),
    [
        (None, torch.ones(2, 3), "expected a tuple of ints, got None"),
        ((0.0, 0), torch.ones(2, 3), "expected a tuple of ints"),
        ((0, 0), [1.0], r"expected a torch\.Tensor, got list"),
    ],
)
def test_a_piece_of_something_else_is_refused(start: Any, tensor: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        LocalPiece("a", start, tensor)


@pytest.mark.parametrize(
    ("params", "slices", "error"),
    [
        ([("a", "float32", (2,))], None, TypeError),
        ([ParamMeta(5, "float32", (2,))], None, TypeError),  # type: ignore[arg-type]
        ([ParamMeta("a", "float32", "23")], None, TypeError),  # type: ignore[arg-type]
        ([ParamMeta("a", "float32", (1 << 40, 1 << 40))], None, ManifestError),
        ([ParamMeta("a", "float32", (2,))], {"b": ("a", 0, 0, 1)}, TypeError),
        ([ParamMeta("a", "float32", (2,))], {"b": Slice("a", "0", 0, 1)}, TypeError),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_manifest_is_refused(
    params: Any, slices: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Manifest.plan(params, slices=slices)


def test_weights_that_were_removed_are_not_published_to_nobody(bus_name: str) -> None:
    with WeightPublisher(bus_name, ModuleSource(Holder(a=Q))) as publisher:
        publisher.publish(version=1)
        unlink_pool(bus_name, "weights")
        with pytest.raises(BusRemovedError, match="make a new publisher"):
            publisher.publish(version=2)


@pytest.mark.parametrize("version", [int, np.arange(2), torch.arange(2), "1", 1.0, True])
def test_a_version_that_is_no_int_is_refused_by_its_name(version: Any, bus_name: str) -> None:
    got = f"version: expected an int, got {type(version).__name__}"
    with (
        WeightPublisher(bus_name, ModuleSource(Holder(a=Q))) as publisher,
        pytest.raises(TypeError, match=got),
    ):
        publisher.publish(version=version)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"source": torch.nn.Linear(2, 2)}, TypeError, r"ModuleSource\(model\), got Linear"),
        ({"slots": -1}, ValueError, "slots: expected 1 to 8"),
        ({"slots": "2"}, TypeError, "slots: expected an int"),
        ({"slots": (1 << 32) + 2}, ValueError, "slots: expected 1 to 8"),
        ({"rank": "0"}, TypeError, "rank: expected an int"),
        ({"rank": True, "world_size": 2}, TypeError, "rank: expected an int, got bool"),
        ({"timeout": None}, TypeError, "timeout: expected seconds"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"label": 5}, TypeError, "label: expected a str"),
        ({"digests": "no"}, TypeError, "digests: expected True or False"),
        ({"device": "abacus"}, ValueError, "device: expected one that torch knows"),
        ({"device": None}, TypeError, "device: expected a torch"),
        ({"carrier": "checkpoint", "directory": "/tmp", "slots": 3}, ValueError, "no slots"),
    ],
)
def test_options_of_another_type_are_refused_and_leave_nothing(
    options: dict[str, Any], error: type[Exception], match: str, bus_name: str
) -> None:
    given = {"source": ModuleSource(Holder(a=Q)), **options}
    with pytest.raises(error, match=match):
        WeightPublisher(bus_name, given.pop("source"), **given)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda reader: reader.latest(timeout="1"), TypeError),
        (lambda reader: reader.latest(timeout=-1), ValueError),
        (lambda reader: reader.wait(newer_than="7", timeout=0), TypeError),
        (lambda reader: reader.wait(timeout=float("nan")), ValueError),
        (lambda reader: reader.at("7"), TypeError),
        (lambda reader: reader.at(1 << 70), ValueError),
        (lambda reader: reader.latest(timeout=0).report_refused(5), TypeError),
        (lambda reader: reader.latest(timeout=0).apply_patch({}, base="7"), TypeError),
        (lambda reader: reader.latest(timeout=0).load_into([Q]), TypeError),
    ],
)
def test_what_makes_no_question_is_refused_by_its_name(
    call: Any, error: type[Exception], bus_name: str
) -> None:
    with (
        WeightPublisher(bus_name, ModuleSource(Holder(a=Q))) as publisher,
        WeightSubscriber(bus_name) as reader,
    ):
        publisher.publish(version=7)
        with pytest.raises(error, match=r"^\w+: expected"):
            call(reader)


def test_a_wait_in_vain_is_said_in_the_seconds_that_were_given(bus_name: str) -> None:
    with (
        WeightSubscriber(bus_name) as subscriber,
        pytest.raises(WaitTimeoutError, match=r" in 0\.1 s: there is no pool"),
    ):
        subscriber.latest(timeout=0.1)
