"""Tensors of models by any shape: tied, lazy, wrapped, of one element, without plain bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from weight_models import bits, load_newest, published

from shmbus.tensors.tensor_cache import SeenTensors
from shmbus.weights import (
    ManifestError,
    ModuleSource,
    Slice,
    WeightPublisher,
    WeightsError,
    WeightSubscriber,
    attach_model,
    share_model,
)


class Twice(torch.nn.Module):
    """A tied head, and a layer under two names."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.head = torch.nn.Linear(8, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.layer = torch.nn.Linear(8, 8)
        self.again = self.layer


def test_what_is_tied_stays_one_parameter_in_the_next_trainer(bus_name: str) -> None:
    model, successor = Twice(), Twice()
    with share_model(bus_name, model), attach_model(bus_name, successor, writable=False):
        assert successor.head.weight is successor.embed.weight
        assert successor.again.weight is successor.layer.weight
        assert len([*successor.parameters()]) == len([*model.parameters()]) == 3
        assert successor.head.weight.data_ptr() != model.head.weight.data_ptr()


def test_what_the_trainer_has_not_tied_keeps_its_own_values(bus_name: str) -> None:
    model, server = Twice(tied=False), Twice()
    with share_model(bus_name, model), attach_model(bus_name, server):
        assert bits(server.head.weight) == bits(model.head.weight)
        assert bits(server.embed.weight) == bits(model.embed.weight)


@pytest.mark.parametrize("carrier", ["shm", "memfd"])
@pytest.mark.parametrize("patches", [False, True])
def test_one_element_of_any_stride_arrives(bus_name: str, carrier: str, patches: bool) -> None:
    """For example a tensor's scale at a row's end: contiguous, by torch's word."""
    scales, places = torch.arange(8.0), torch.zeros(8)
    model = torch.nn.Module()
    model.register_buffer("scale", scales[3::2][:1])
    model.register_buffer("block", scales.view(2, 4)[::2, 1:2])
    replica = {"scale": places[1::2][:1], "block": places.view(2, 4)[1:, 2:3]}
    options: dict[str, Any] = {"carrier": carrier, "patches": patches and carrier == "shm"}
    with published(bus_name, ModuleSource(model), **options) as (publisher, subscriber):
        for version in range(3):
            scales[3] = 10 + version
            publisher.publish(version=version)
            load_newest(subscriber, replica)
            assert places.tolist() == [0, 10 + version, 0, 0, 0, 0, 1, 0]
    with share_model(bus_name, model) as shared:
        assert shared["scale"].item() == model.scale.item() == 12


def memory_in_one(kind: str) -> dict[str, torch.Tensor]:
    """Return destinations of "a" [4, 6] and "b" [4, 6] in shared memory of some layout."""
    whole = torch.zeros(8, 12)
    row = whole.view(-1)
    first, second = {
        "one tensor": (whole[:4, :6], whole[:4, :6]),
        "one row": (row[:24].view(4, 6), row[23:47].view(4, 6)),
        "one column": (whole[:4, :6], whole[:4, 5:11]),
        "columns apart": (whole[:4, :6], whole[:4, 6:]),
    }[kind]
    return {"a": first, "b": second}


@pytest.mark.parametrize("carrier", ["shm", "memfd"])
@pytest.mark.parametrize("kind", ["one tensor", "one row", "one column", "columns apart"])
def test_values_apart_do_not_go_into_one_memory(bus_name: str, kind: str, carrier: Any) -> None:
    source = torch.nn.ParameterDict({"a": torch.ones(4, 6), "b": torch.full((4, 6), 2.0)})
    target = memory_in_one(kind)
    with published(bus_name, ModuleSource(source), carrier=carrier) as (publisher, subscriber):
        publisher.publish(1)
        with subscriber.latest(timeout=5) as weights:
            if kind != "columns apart":
                with pytest.raises(ManifestError, match="'a' and 'b' of the model share memory"):
                    weights.load_into(target)
                assert not any(tensor.any() for tensor in target.values())
                return
            weights.load_into(target)
        assert (target["a"] == 1).all() and (target["b"] == 2).all()


def test_a_model_that_ties_what_is_published_apart_is_told_both_names(bus_name: str) -> None:
    model, server = Twice(tied=False), Twice()
    before = bits(server.head.weight)
    with published(bus_name, ModuleSource(model)) as (publisher, subscriber):
        publisher.publish(1)
        with subscriber.latest(timeout=5) as weights:
            with pytest.raises(ManifestError, match=r"'(embed|head).weight' and '(embed|head)\."):
                weights.load_into(server)
            assert bits(server.head.weight) == before
            free = Twice(tied=False)
            weights.load_into(free)
            assert bits(free.head.weight) == bits(model.head.weight)


def test_what_is_published_as_one_goes_into_models_that_tie_it_or_its_parts(bus_name: str) -> None:
    model = Twice()
    parts = {
        "up": Slice("layer.weight", dim=0, start=0, length=4),
        "down": Slice("layer.weight", dim=0, start=4, length=4),
    }
    with published(bus_name, ModuleSource(model, slices=parts)) as (publisher, subscriber):
        publisher.publish(1)
        with subscriber.latest(timeout=5) as weights:
            for tied in (True, False):
                server = Twice(tied=tied)
                weights.load_into(server)
                assert bits(server.head.weight) == bits(model.head.weight)
            whole = torch.zeros(8, 8)
            targets = {"layer.weight": whole, "up": whole[:4], "down": whole[4:]}
            weights.load_into(targets, strict=False)
            assert bits(whole) == bits(model.layer.weight)
            wrong = {"layer.weight": whole, "up": whole[4:]}
            with pytest.raises(ManifestError, match="share memory"):
                weights.load_into(wrong, strict=False)


WAIT_S = 20.0


class Wrapper(torch.Tensor):
    """Has no memory; a second tensor holds its elements, as in libraries of quantised weights."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def inner(value: object) -> object:
            return value.inner if isinstance(value, Wrapper) else value

        found = function(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return cls(found) if function is torch.ops.aten.detach.default else found


def wrapping(value: float, kind: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(kind(torch.full((64,), value)), requires_grad=False)
    module.plain = torch.nn.Parameter(torch.full((8,), value))
    return module


def plain(value: torch.Tensor) -> torch.Tensor:
    return value


def test_what_a_wrapper_stands_for_is_looked_at_for_each_version(bus_name: str) -> None:
    module = wrapping(1.0, Wrapper)
    with published(bus_name, ModuleSource(module), carrier="shm") as (publisher, subscriber):
        for version in range(1, 6):
            module.w.inner = torch.full((64,), float(version))
            publisher.publish(version=version)
            with subscriber.latest(timeout=WAIT_S) as weights:
                assert weights["w"].tolist() == [float(version)] * 64


@pytest.mark.parametrize("patches", [False, True])
def test_what_a_wrapper_stands_for_now_is_loaded_into(bus_name: str, patches: bool) -> None:
    source, target = wrapping(0.0, plain), wrapping(0.0, Wrapper)
    options: dict[str, Any] = {"carrier": "shm", "patches": patches}
    with published(bus_name, ModuleSource(source), **options) as (publisher, subscriber):
        for version in range(1, 8):
            source.w.data[version] = float(version)
            publisher.publish(version=version)
            if version > 3:
                target.w.inner = torch.zeros(64)
            load_newest(subscriber, target)
            assert torch.equal(target.w.inner, source.w.data)


def test_a_tensor_without_memory_of_its_own_cannot_be_told() -> None:
    tensors = {"w": Wrapper(torch.ones(4)), "plain": torch.ones(4)}
    found = SeenTensors(tensors)
    assert not found.can_tell and not found.still(tensors)
    empty = {"plain": torch.ones(4), "empty": torch.ones(0)}
    assert SeenTensors(empty).still(empty)


Q = torch.arange(16.0).reshape(4, 4)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Free a tensor's storage and leave its shape, like FSDP."""
    tensor.untyped_storage().resize_(0)
    return tensor


class Holder(torch.nn.Module):
    """Tensors by any names."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def load(bus: str, model: torch.nn.Module, target: Any, **options: Any) -> None:
    with WeightPublisher(bus, ModuleSource(model)) as publisher, WeightSubscriber(bus) as reader:
        publisher.publish(version=1)
        load_newest(reader, target, **options)


@pytest.mark.parametrize(
    "parts",
    [
        {"q": Slice("qk", 0, 0, 4), "k": Slice("qk", 0, 0, 4)},
        {"q": Slice("qk", 0, 0, 4), "k": Slice("qk", 0, 2, 4)},
        {"q": Slice("qk", 0, 2, 4), "k": Slice("qk", 0, 4, 4)},
    ],
)
def test_partial_slices_change_no_fused_tensor(parts: dict[str, Slice], bus_name: str) -> None:
    target = {"qk": torch.zeros(8, 4)}
    with pytest.raises(ManifestError, match="each row has to be in one of them"):
        load(bus_name, Holder(q=Q, k=Q + 1), target, slices=parts)
    assert not target["qk"].any()
    whole = {"k": Slice("qk", 0, 4, 4), "q": Slice("qk", 0, 0, 4)}
    load(bus_name, Holder(q=Q, k=Q + 1), target, slices=whole)
    assert torch.equal(target["qk"], torch.cat([Q, Q + 1]))


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
def test_an_unwritable_target_is_found(tensor: torch.Tensor, match: str, bus_name: str) -> None:
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
def test_lazy_conjugates_and_negatives_arrive_resolved(patches: bool, bus_name: str) -> None:
    plain = torch.complex(Q, Q + 1)
    model = Holder(a=plain.conj(), b=plain.conj().imag, c=plain)
    target = {"a": torch.zeros_like(plain), "b": torch.zeros(4, 4).half(), "c": plain.clone()}
    source = ModuleSource(model, dtype=torch.float16, rounding="stochastic")
    with WeightPublisher(bus_name, source, patches=patches) as publisher:
        for version in range(3):
            plain[0, 0] = complex(version, version)
            publisher.publish(version=version)
            with WeightSubscriber(bus_name) as reader, reader.latest(timeout=5.0) as weights:
                weights.load_into(target)
            assert torch.equal(target["a"], plain.conj().resolve_conj())
            assert torch.equal(target["b"].float(), -plain.imag)
            assert torch.equal(target["c"], plain)
