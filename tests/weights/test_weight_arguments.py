"""Wrong arguments of everything about weights: refused by name, and nothing is left or torn."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import INT, let_through, of_value, refused
from weight_models import many

from shmbus.weights import (
    LocalPiece,
    LoraFiles,
    ModuleSource,
    ParamMeta,
    ShardedSource,
    Slice,
    WeightPublisher,
    WeightSubscriber,
    attach_model,
    share_model,
)
from shmbus.weights.manifest import Manifest
from shmbus.weights.patch_policy import patch_share

CONFIG = {"peft_type": "LORA", "r": 4, "target_modules": ["q"]}
NO_TENSOR = torch.ones(1, device="meta")


def publisher(**options: Any) -> Callable[[Any], object]:
    """Make a publisher of a second bus with these options."""
    source = options.pop("source", None)

    def make(given: Any) -> object:
        bus = f"{given.bus}-b"
        return WeightPublisher(bus, source or ModuleSource(many(2)), **options)

    return make


def subscriber(**options: Any) -> Callable[[Any], object]:
    return lambda given: WeightSubscriber(f"{given.bus}-b", **options)


def files(name: str = "run1", config: Any = CONFIG, **options: Any) -> Callable[[Any], object]:
    return lambda given: LoraFiles(given.folder / "none", name, config, **options)


def adapter(state: Any, version: Any = 1) -> Callable[[Any], object]:
    return lambda given: given.files.publish(state, version=version)


def stepped(**options: Any) -> Callable[[Any], None]:
    def step(given: Any) -> None:
        with given.shared.stepping(**options):
            raise AssertionError("it was begun")

    return step


def plan(*params: Any, **slices: Any) -> Callable[[Any], object]:
    return lambda given: Manifest.plan(list(params), slices=slices)


PARAM = ParamMeta("a", "float32", (2,))
BYTES = torch.ones(1)
REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda g: LocalPiece("a", None, BYTES), "TypeError: expected a tuple of ints, got None"),  # type: ignore[arg-type]
    (lambda g: LocalPiece("a", (0.0, 0), BYTES), "TypeError: expected a tuple of ints"),  # type: ignore[arg-type]
    (lambda g: LocalPiece("a", (0,), [1.0]), r"TypeError: expected a torch\.Tensor, got list"),  # type: ignore[arg-type]
    (plan(("a", "float32", (2,))), "TypeError"),
    (plan(ParamMeta(5, "float32", (2,))), "TypeError"),  # type: ignore[arg-type]
    (plan(ParamMeta("a", "float32", "23")), "TypeError"),  # type: ignore[arg-type]
    (plan(ParamMeta("a", "float32", (1 << 40, 1 << 40))), "ManifestError"),
    (plan(PARAM, b=("a", 0, 0, 1)), "TypeError"),
    (plan(PARAM, b=Slice("a", "0", 0, 1)), "TypeError"),  # type: ignore[arg-type]
    (publisher(source=torch.nn.Linear(2, 2)), r"TypeError: ModuleSource\(model\), got Linear"),
    (publisher(rank=True, world_size=2), "TypeError: rank: expected an int, got bool"),
    (publisher(carrier="checkpoint", directory="/tmp", slots=3), "ValueError: no slots"),
    (publisher(carrier="checkpoint", directory="/tmp", patches=True), "ValueError: patches=False"),
    (publisher(carrier="checkpoint", directory="/tmp", world_size=2), "ValueError: world_size=1"),
    (publisher(carrier="checkpoint", directory="/tmp", digests=True), "ValueError: digests=False"),
    (publisher(carrier="memfd", digests=True), "ValueError: digests=False"),
    (publisher(carrier="memfd", keep=True), "ValueError: keep=False"),
    (publisher(directory=""), "ValueError: directory: expected a path"),
    (lambda g: LoraFiles("", "run1", CONFIG), "ValueError: directory: expected a path"),
    (publisher(carrier="checkpoint"), "WeightsError: no directory was given"),
    (subscriber(carrier="shm", directory="x"), "ValueError: an option of the carrier 'checkpoint'"),
    (subscriber(device="cuda:77"), "DeviceMismatchError: 'cuda:77' is not here; this process has"),
    (lambda g: g.reader.latest(timeout="1"), r"TypeError: ^\w+: expected"),
    (lambda g: g.reader.latest(timeout=-1), r"ValueError: ^\w+: expected"),
    (lambda g: g.reader.wait(newer_than="7", timeout=0), r"TypeError: ^\w+: expected"),
    (lambda g: g.reader.wait(timeout=float("nan")), r"ValueError: ^\w+: expected"),
    (lambda g: g.reader.at("7"), r"TypeError: ^\w+: expected"),
    (lambda g: g.reader.at(1 << 70), r"ValueError: ^\w+: expected"),
    (lambda g: g.reader.latest(timeout=0).report_refused(5), r"TypeError: ^\w+: expected"),
    (lambda g: g.reader.latest(timeout=0).load_into([BYTES]), r"TypeError: ^\w+: expected"),
    *(
        (lambda g, c=call, m=model: c(g.bus, m), r"TypeError: model: expected a torch\.nn\.Module")  # type: ignore[misc]
        for call in (share_model, attach_model)
        for model in (None, 5, {"weight": BYTES})
    ),
    (stepped(version="1"), r"TypeError: ^\w+: expected"),
    (stepped(version=1.5), r"TypeError: ^\w+: expected"),
    (stepped(version=1 << 63), r"ValueError: ^\w+: expected"),
    (stepped(version=1, timeout="1"), r"TypeError: ^\w+: expected"),
    (stepped(version=1, heal="no"), r"TypeError: ^\w+: expected"),
    *((adapter({"a": BYTES}, wrong), "TypeError") for wrong in ("1", 1.5, True)),
    *((adapter(state), "TypeError") for state in ({"a": [1.0]}, {5: BYTES}, [BYTES])),
    (adapter({"a": NO_TENSOR}), "WeightsError"),
    (files("a/b"), "ValueError: letters, digits"),
    (files(keep=0), "ValueError: keep"),
    (files(config={}), "WeightsError: peft_type, r, target_modules is missing"),
    *(
        (lambda g, f=make, r=wrong: f(many(1), rounding=r), f"{kind}: rounding")  # type: ignore[misc]
        for make in (ModuleSource, ShardedSource)
        for wrong, kind in (("up", "ValueError"), (None, "TypeError"), (1, "TypeError"))
    ),
    *((lambda g, s=s: patch_share(s), "ValueError: patches: expected") for s in (-0.1, 1.5)),  # type: ignore[misc]
    (lambda g: g.reader.latest(timeout=0).load_into({"x": BYTES}, strict=False), "ManifestError"),
    (lambda g: g.reader.latest(timeout=0).load_into({}, strict=False), "ManifestError"),
    (lambda g: ModuleSource(many(1), rounding="stochastic"), "ValueError: rounding: .*dtype="),
    (lambda g: ModuleSource(many(1), dtype=torch.float8_e8m0fnu), "ValueError: dtype: .*signed"),
    (lambda g: patch_share("yes"), "TypeError: patches: expected"),  # type: ignore[arg-type]
]


@pytest.fixture
def given(bus_name: str, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Every possible question, over weights of version 7 and a shared model."""
    with (
        WeightPublisher(bus_name, ModuleSource(many(2))) as publisher,
        WeightSubscriber(bus_name) as reader,
        share_model(bus_name, torch.nn.Linear(4, 3)) as shared,
    ):
        publisher.publish(version=7)
        files = LoraFiles(tmp_path / "adapters", "run1", CONFIG)
        yield SimpleNamespace(
            bus=bus_name, publisher=publisher, reader=reader, shared=shared, files=files,
            folder=tmp_path,
        )  # fmt: skip


def test_a_version_is_an_int(given: Any) -> None:
    for publish in (given.publisher.publish, given.publisher.publish_async):
        assert let_through(publish, "version", INT + of_value(1 << 63)) == []


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_a_wrong_value_leaves_nothing(call: Callable[[Any], object], said: str, given: Any) -> None:
    refused(said, call, given)
    assert not (given.folder / "none").exists() and not [*(given.folder / "adapters").iterdir()]
    assert not given.shared.torn
    given.publisher.publish(version=8)
    with given.shared.stepping(version=8):
        pass
