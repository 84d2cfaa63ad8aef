"""An engine's loader runs once; what it did stands for it, bit for bit, or it is run again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from bench.fused_engine import FusedModel, Shape, checkpoint
from shmbus.engines.planned import PlannedLoader
from shmbus.errors import DamagedError
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from shmbus.weights.plan_patch import PlanPatch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, needs_gpu])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the engine's model is; the trainer's is on the host."""
    return torch.device(request.param)


class Trainer(torch.nn.Module):
    """A model with a checkpoint's tensors."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.names = checkpoint(shape)
        self.generator = torch.Generator().manual_seed(seed)
        for name, sizes in self.names.items():
            made = torch.empty(sizes, dtype=shape.dtype)
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(made))
        self.step()

    @torch.no_grad()
    def step(self, share: float = 1.0) -> None:
        for each in self.parameters():
            new = torch.randn(each.shape, generator=self.generator).to(each.dtype)
            stays = torch.rand(each.shape, generator=self.generator) >= share
            each.copy_(torch.where(stays, each, new))

    def source(self) -> ModuleSource:
        return ModuleSource(self, rename=lambda name: name.replace("/", "."))


@pytest.fixture
def bus(bus_name: str) -> str:
    return bus_name


@contextlib.contextmanager
def published(
    bus: str, trainer: Trainer, device: torch.device, *, share: float = 1.0, patches: bool = False
) -> Iterator[Callable[..., Any]]:
    """Publish a step's weights, and lease them; or those before again."""
    with contextlib.ExitStack() as stack:
        made = WeightPublisher(bus, trainer.source(), patches=patches)
        publisher = stack.enter_context(made)
        subscriber = stack.enter_context(WeightSubscriber(bus, device=device))
        number = 0

        def following(*, again: bool = False) -> Any:
            nonlocal number
            if not again:
                number += 1
                trainer.step(share)
                publisher.publish(version=number)
            return subscriber.latest(timeout=10)

        yield following


class Counted:
    """A loader, and which tensors it was given in each call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.given: list[list[str]] = []

    def __call__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], modules: Sequence[torch.nn.Module] | None
    ) -> None:
        names: list[str] = []
        self.given.append(names)

        def seen() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                names.append(name)
                yield name, tensor

        self.model.load_weights(seen())  # type: ignore[operator]


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def require_loaded(model: FusedModel, trainer: Trainer) -> None:
    """Compare with what a loader of its own makes of the same weights."""
    fresh = type(model)(model.shape, model.rank, model.ranks, "cpu")
    fresh.load_weights(
        (name, trainer.get_parameter(name.replace(".", "/"))) for name in trainer.names
    )
    for (name, ours), theirs in zip(state(model).items(), state(fresh).values(), strict=True):
        assert torch.equal(ours.cpu(), theirs), name


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_every_version_is_what_the_loader_would_have_made(
    bus: str, device: torch.device, seed: int, rank: int, ranks: int, experts: int
) -> None:
    shape = Shape(experts=experts)
    trainer, model = Trainer(shape, seed), FusedModel(shape, rank, ranks, device)
    loader = PlannedLoader(model, device, load := Counted(model))
    with published(bus, trainer, device) as following:
        for number in range(5):
            with following() as weights:
                loader.prepare(weights)
                loader.load(weights)
            require_loaded(model, trainer)
            assert len(load.given) == 1, f"version {number + 1} was loaded by the engine"


class Scaled(FusedModel):
    """Keeps down projections by a scale of their own, as a quantised layer does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for layer in self.layers:
            layer.register_buffer("scale", torch.zeros((), device=layer.o.device))

    def fill_layer(self, layer: Any, parts: list[str], tensor: torch.Tensor) -> None:
        super().fill_layer(layer, parts, tensor)
        if parts[-2] == "down_proj":
            layer.scale.copy_(tensor.float().abs().max())


class Unseen(FusedModel):
    """Reads norms by numpy, which torch does not see."""

    def fill_layer(self, layer: Any, parts: list[str], tensor: torch.Tensor) -> None:
        if "norm" in parts[-2]:
            array = tensor.cpu().view(torch.int16).numpy().copy()
            tensor = torch.from_numpy(array).view(tensor.dtype)
        super().fill_layer(layer, parts, tensor)


class Added(FusedModel):
    """Changes what it has copied."""

    def fill_layer(self, layer: Any, parts: list[str], tensor: torch.Tensor) -> None:
        super().fill_layer(layer, parts, tensor)
        if parts[-2] == "o_proj":
            layer.o.data.mul_(2)


#: An operation that torch does not take apart, and whose kernel reads memory by itself.
LIBRARY = torch.library.Library("shmbus_test", "DEF")
LIBRARY.define("packed(Tensor weight) -> int")


def _packed(weight: torch.Tensor) -> int:
    return hash(weight.cpu().view(torch.int16).numpy().tobytes())


LIBRARY.impl("packed", _packed, "CompositeImplicitAutograd")


class Packed(FusedModel):
    """Keeps a handle of a weight, as vLLM does on a CPU, beside the weight itself."""

    handle = 0

    def fill_rows(self, parameter: Any, tensor: torch.Tensor) -> None:
        super().fill_rows(parameter, tensor)
        if parameter is self.head:
            self.handle = torch.ops.shmbus_test.packed(parameter.data)


class Cast(FusedModel):
    """Casts, clones and moves before it narrows."""

    def narrowed(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return super().narrowed(tensor.clone().to(torch.float32), dim)


class Layerwise(FusedModel):
    """Fills new memory, and copies it into what it has once a layer is whole, as vLLM reloads."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        kept = {
            (layer, name): parameter
            for layer in self.layers
            for name, parameter in layer.named_parameters()
        }
        for layer, name in kept:
            made = torch.empty_like(kept[layer, name])
            layer.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))
        super().load_weights(tensors)
        for (layer, name), parameter in kept.items():
            parameter.data.copy_(layer.get_parameter(name))
            layer.register_parameter(name, parameter)


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        (Scaled, ["self_attn", "mlp", "layernorm"]),
        (Unseen, ["layernorm"]),
        (Added, ["self_attn", "mlp", "layernorm"]),
        (Packed, ["lm_head", "embed_tokens", "model.norm"]),
        (Cast, []),
        (Layerwise, []),
    ],
)
def test_what_a_loader_computes_with_is_loaded_by_it_each_time_and_the_rest_is_not(
    bus: str, device: torch.device, seed: int, kind: type[FusedModel], again: list[str]
) -> None:
    shape = Shape()
    trainer, model = Trainer(shape, seed), kind(shape, 1, 2, device)
    loader = PlannedLoader(model, device, load := Counted(model))
    with published(bus, trainer, device) as following:
        for _ in range(4):
            with following() as weights:
                loader.load(weights)
            require_loaded(model, trainer)
    for given in load.given[1:]:
        assert given and all(any(word in name for word in again) for name in given)
        assert all(any(word in name for name in given) for word in again)
    assert len(load.given) == (4 if again else 1)


def test_a_model_whose_memory_moved_is_loaded_by_its_loader(
    bus: str, device: torch.device, seed: int
) -> None:
    trainer, model = Trainer(Shape(), seed), FusedModel(Shape(), device=device)
    loader = PlannedLoader(model, device, load := Counted(model))
    with published(bus, trainer, device) as following:
        for turn in range(3):
            if turn == 1:
                model.norm.data = model.norm.data.clone()
            with following() as weights:
                loader.load(weights)
            require_loaded(model, trainer)
    assert len(load.given) == 2


def test_modules_that_may_not_be_planned_are_loaded_each_time(
    bus: str, device: torch.device, seed: int
) -> None:
    trainer, model = Trainer(Shape(), seed), FusedModel(Shape(), device=device)
    loader = PlannedLoader(
        model, device, load := Counted(model), may_plan=lambda module: module is not model.layers[1]
    )
    with published(bus, trainer, device) as following:
        for _ in range(2):
            with following() as weights:
                loader.load(weights)
            require_loaded(model, trainer)
    assert load.given[1] == [name for name in trainer.names if "layers.1." in name]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.03])
def test_a_patch_brings_what_changed_and_nothing_else(
    bus: str, device: torch.device, seed: int, rank: int, ranks: int, share: float
) -> None:
    shape = Shape(experts=2)
    trainer, model = Trainer(shape, seed), FusedModel(shape, rank, ranks, device)
    loader = PlannedLoader(model, device, load := Counted(model))
    how = []
    with published(bus, trainer, device, share=share, patches=True) as following:
        for number in range(5):
            with following() as weights:
                if number % 2:
                    loader.prepare(weights)
                how.append(loader.load(weights))
            require_loaded(model, trainer)
    assert how == ["loader", "patch", "patch", "patch", "patch"]
    assert len(load.given) == 1


def test_a_load_waits_for_what_a_thread_looks_up_and_uses_it(
    bus: str, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model = Trainer(Shape(), seed), FusedModel(Shape(), 1, 2, device)
    loader = PlannedLoader(model, device, load := Counted(model))
    may_look, threads = threading.Event(), []
    real = PlanPatch.of

    def look_up(*arguments: Any) -> PlanPatch | None:
        threads.append(threading.current_thread())
        assert may_look.wait(30)
        return real(*arguments)

    monkeypatch.setattr(PlanPatch, "of", look_up)
    with published(bus, trainer, device, share=0.01, patches=True) as following:
        for number in range(4):
            may_look.clear()
            loader.prepare_aside(following())
            loader.prepare_aside(ignored := following(again=True))  # one at a time
            assert number == 0 or " closed" in repr(ignored)
            timer = threading.Timer(0.2, may_look.set)
            timer.start()
            with following(again=True) as weights:
                assert loader.load(weights) == ("patch" if number else "loader")
            timer.join()
            require_loaded(model, trainer)
    assert len(load.given) == 1
    assert len(threads) == 3
    assert threading.current_thread() not in threads


def test_what_a_thread_cannot_look_up_the_load_reports(
    bus: str, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    trainer, model = Trainer(Shape(), seed), FusedModel(Shape(), device=device)
    loader = PlannedLoader(model, device, Counted(model))

    def refuse(*arguments: Any) -> None:
        raise DamagedError("a patch was damaged")

    with published(bus, trainer, device, share=0.01, patches=True) as following:
        with following() as weights:
            loader.load(weights)
        monkeypatch.setattr(PlanPatch, "of", refuse)
        loader.prepare_aside(following())
        loader.await_prepared()
        assert "version 2: a patch was damaged" in caplog.text
        with following(again=True) as weights, pytest.raises(DamagedError):
            loader.load(weights)
        monkeypatch.undo()
        with following(again=True) as weights:
            loader.load(weights)
        require_loaded(model, trainer)


def test_a_model_that_something_else_wrote_gets_all_of_a_version(
    bus: str, device: torch.device, seed: int
) -> None:
    trainer, model = Trainer(Shape(), seed), FusedModel(Shape(), 1, 2, device)
    loader = PlannedLoader(model, device, Counted(model))
    with published(bus, trainer, device, share=0.05, patches=True) as following:
        with following() as weights:
            loader.load(weights)
        with torch.no_grad():
            model.layers[0].o.add_(1)
        with following() as weights:
            loader.prepare(weights)
            assert loader.load(weights) == "plan"
        require_loaded(model, trainer)
        with following() as weights:
            assert loader.load(weights) == "patch"
        require_loaded(model, trainer)
        following().close()  # one that this model never gets
        with following() as weights:
            assert loader.load(weights) == "plan"
        require_loaded(model, trainer)


def test_what_is_cast_or_computed_is_whole_beside_a_patch(
    bus: str, device: torch.device, seed: int
) -> None:
    shape = Shape()
    for kind in (Cast, Scaled):
        trainer, model = Trainer(shape, seed), kind(shape, 0, 2, device)
        loader = PlannedLoader(model, device, Counted(model))
        with published(bus, trainer, device, share=0.01, patches=True) as following:
            for _ in range(3):
                with following() as weights:
                    how = loader.load(weights)
                require_loaded(model, trainer)
        assert how == "patch"
