"""Wrong arguments of everything about weights: refused by name, and nothing is left or torn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weight_models import many

from shmbus.weights import (
    LocalPiece,
    LoraFiles,
    ManifestError,
    ModuleSource,
    ParamMeta,
    Slice,
    WeightPublisher,
    WeightsError,
    WeightSubscriber,
    attach_model,
    share_model,
)
from shmbus.weights.manifest import Manifest


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


@pytest.mark.parametrize("version", [int, np.arange(2), torch.arange(2), "1", 1.0, True])
def test_a_version_that_is_no_int_is_refused_by_its_name(version: Any, bus_name: str) -> None:
    got = f"version: expected an int, got {type(version).__name__}"
    with (
        WeightPublisher(bus_name, ModuleSource(many(2))) as publisher,
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
    given = {"source": ModuleSource(many(2)), **options}
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
        (lambda reader: reader.latest(timeout=0).load_into([torch.zeros(1)]), TypeError),
    ],
)
def test_what_makes_no_question_is_refused_by_its_name(
    call: Any, error: type[Exception], bus_name: str
) -> None:
    with (
        WeightPublisher(bus_name, ModuleSource(many(2))) as publisher,
        WeightSubscriber(bus_name) as reader,
    ):
        publisher.publish(version=7)
        with pytest.raises(error, match=r"^\w+: expected"):
            call(reader)


CONFIG = {"peft_type": "LORA", "r": 4, "target_modules": ["q"]}


@pytest.mark.parametrize("model", [None, 5, {"weight": torch.zeros(3, 4)}])
def test_what_is_no_model_is_not_shared(model: Any, bus_name: str) -> None:
    for call in (share_model, attach_model):
        with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module"):
            call(bus_name, model)


@pytest.mark.parametrize(
    ("state", "version", "error"),
    [
        ({"a": torch.ones(1)}, "1", TypeError),
        ({"a": torch.ones(1)}, 1.5, TypeError),
        ({"a": torch.ones(1)}, True, TypeError),
        ({"a": [1.0]}, 1, TypeError),
        ({5: torch.ones(1)}, 1, TypeError),
        ([torch.ones(1)], 1, TypeError),
        ({"a": torch.ones(1, device="meta")}, 1, WeightsError),
    ],
)
def test_what_makes_no_adapter_leaves_no_file(
    state: Any, version: Any, error: type[Exception], tmp_path: Path
) -> None:
    files = LoraFiles(tmp_path / "adapters", "run1", CONFIG)
    with pytest.raises(error):
        files.publish(state, version=version)
    assert [*(tmp_path / "adapters").iterdir()] == []


def test_tensors_of_an_adapter_may_share_memory(tmp_path: Path) -> None:
    both = torch.ones(4)
    written = LoraFiles(tmp_path, "run1", CONFIG).publish({"a": both, "b": both}, version=1)
    assert written.size == 32
