"""An engine's loader runs once; its recorded plan replaces it, bit for bit, or it runs again."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fused_model import FusedModel, Shape, checkpoint

from shmbus.engines import rank_loader
from shmbus.engines.rank_loader import PlannedLoader
from shmbus.errors import DamagedError
from shmbus.tensors.copy_plan import CopyPlan
from shmbus.tensors.copy_table import Pair
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber, load_plan


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


class Trainer(torch.nn.Module):
    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.names = checkpoint(shape)
        self.generator = torch.Generator().manual_seed(seed)
        for name, sizes in self.names.items():
            made = torch.empty(sizes, dtype=shape.dtype)
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(made))
        self.step()

    @torch.no_grad()
    def step(self) -> None:
        for each in self.parameters():
            each.copy_(torch.randn(each.shape, generator=self.generator))

    def source(self) -> ModuleSource:
        return ModuleSource(self, rename=lambda name: name.replace("/", "."))


@pytest.fixture
def bus(bus_name: str) -> str:
    return bus_name


@contextlib.contextmanager
def published(bus: str, trainer: Trainer, device: torch.device) -> Iterator[Callable[..., Any]]:
    """Publish a step's weights, and lease them; or those before again."""
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(WeightPublisher(bus, trainer.source()))
        subscriber = stack.enter_context(WeightSubscriber(bus, device=device))
        number = 0

        def following(*, again: bool = False) -> Any:
            nonlocal number
            if not again:
                number += 1
                trainer.step()
                publisher.publish(version=number)
            return subscriber.latest(timeout=10)

        yield following


class Counted:
    """A loader, with the tensors of each call."""

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


def reloading(model: torch.nn.Module, load: Counted) -> Any:
    """Load into new memory, as vLLM's layerwise reload does, and copy into the model's."""

    def reload(tensors: Any, modules: Any) -> None:
        with torch.no_grad():
            kept = {name: each.data for name, each in model.named_parameters()}
            for each in model.parameters():
                each.data = torch.empty_like(each)
            load(tensors, modules)
            for name, each in model.named_parameters():
                loaded, each.data = each.data, kept[name]
                each.copy_(loaded)

    return reload


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def require_loaded(model: FusedModel, trainer: Trainer) -> None:
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
            model.layers[0].o.data.neg_()  # a write from elsewhere


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
    """Reads norms by numpy, out of torch's sight."""

    def fill_layer(self, layer: Any, parts: list[str], tensor: torch.Tensor) -> None:
        if "norm" in parts[-2]:
            array = tensor.cpu().view(torch.int16).numpy().copy()
            tensor = torch.from_numpy(array).view(tensor.dtype)
        super().fill_layer(layer, parts, tensor)


class Added(FusedModel):
    def fill_layer(self, layer: Any, parts: list[str], tensor: torch.Tensor) -> None:
        super().fill_layer(layer, parts, tensor)
        if parts[-2] == "o_proj":
            layer.o.data.mul_(2)


LIBRARY = torch.library.Library("shmbus_test", "DEF")
LIBRARY.define("packed(Tensor weight) -> int")
LIBRARY.impl(
    "packed",
    lambda weight: hash(weight.cpu().view(torch.int16).numpy().tobytes()),
    "CompositeImplicitAutograd",
)


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
    """Fills new memory, and copies a whole layer into the old memory, like vLLM's reload."""

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


def test_moved_memory_means_an_ordinary_load(bus: str, device: torch.device, seed: int) -> None:
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


@pytest.mark.parametrize(
    ("published_as", "engine", "warned"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_an_engine_that_rounds_what_was_published_is_named_once(
    bus: str, seed: int, published_as: Any, engine: Any, warned: bool, caplog: Any
) -> None:
    cpu = torch.device("cpu")
    trainer = Trainer(Shape(dtype=published_as), seed)
    model = FusedModel(Shape(dtype=engine), device=cpu)
    loader = PlannedLoader(model, cpu, Counted(model))
    with published(bus, trainer, cpu) as following:
        for _ in range(2):
            with following() as weights:
                loader.load(weights)
    found = [each for each in caplog.records if each.levelname == "WARNING"]
    assert len(found) == warned
    if warned:
        assert found[0].args == (
            len(trainer.names),
            next(iter(trainer.names)),
            published_as,
            engine,
        )


def test_a_recorded_loads_work_per_tensor_is_flat_in_the_layers(
    bus: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules visited in the first load, whose engine waits meanwhile."""
    cpu, visited, per_tensor = torch.device("cpu"), 0, []

    def counted(module: torch.nn.Module, of: Any = load_plan._own_tensors) -> Any:
        nonlocal visited
        visited += 1
        return of(module)

    monkeypatch.setattr(load_plan, "_own_tensors", counted)
    for layers in (4, 32):
        trainer = Trainer(Shape(layers=layers), seed)
        model = FusedModel(Shape(layers=layers), device=cpu)
        load = Counted(model)
        with published(f"{bus}-{layers}", trainer, cpu) as following, following() as weights:
            visited = 0
            PlannedLoader(model, cpu, reloading(model, load)).load(weights)
        require_loaded(model, trainer)
        per_tensor.append(visited / len(trainer.names))
    assert per_tensor[1] < 1.5 * per_tensor[0], per_tensor


def test_unplannable_modules_load_each_time(bus: str, device: torch.device, seed: int) -> None:
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


def test_a_load_waits_for_what_a_thread_prepares_and_uses_it(
    bus: str, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model = Trainer(Shape(), seed), FusedModel(Shape(), 1, 2, device)
    loader = PlannedLoader(model, device, load := Counted(model))
    may_sort, threads = threading.Event(), []

    def sort(pairs: list[Pair]) -> CopyPlan:
        threads.append(threading.current_thread())
        assert may_sort.wait(30)
        return CopyPlan(pairs)

    monkeypatch.setattr(rank_loader, "CopyPlan", sort)
    with published(bus, trainer, device) as following:
        for number in range(4):
            may_sort.clear()
            loader.prepare_aside(following())
            if number in (1, 2):  # the thread waits, and takes one version at a time
                loader.prepare_aside(ignored := following(again=True))
                assert " closed" in repr(ignored)
            timer = threading.Timer(0.2, may_sort.set)
            timer.start()
            with following(again=True) as weights:
                assert loader.load(weights) == ("plan" if number else "loader")
            timer.join()
            require_loaded(model, trainer)
    assert len(load.given) == 1
    assert len(threads) == 2  # a thread a slot
    assert threading.current_thread() not in threads


def test_what_a_thread_cannot_prepare_the_load_reports(
    bus: str, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    trainer, model = Trainer(Shape(), seed), FusedModel(Shape(), device=device)
    loader = PlannedLoader(model, device, Counted(model))

    def refuse(pairs: list[Pair]) -> None:
        raise DamagedError("no copy fits")

    with published(bus, trainer, device) as following:
        with following() as weights:
            loader.load(weights)
        monkeypatch.setattr(rank_loader, "CopyPlan", refuse)
        loader.prepare_aside(following())
        loader.await_prepared()
        assert "version 2: no copy fits" in caplog.text
        with following(again=True) as weights, pytest.raises(DamagedError):
            loader.load(weights)
        monkeypatch.undo()
        with following(again=True) as weights:
            loader.load(weights)
        require_loaded(model, trainer)
