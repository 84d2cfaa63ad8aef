"""One shared copy, adapters and bridge files by hand: what would tear a model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shmbus import BusClosedError, DamagedError
from shmbus.weights import LoraFiles, WeightsError, attach_model, share_model

CONFIG = {"peft_type": "LORA", "r": 4, "target_modules": ["q"]}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"version": "1"}, TypeError),
        ({"version": 1.5}, TypeError),
        ({"version": 1 << 63}, ValueError),
        ({"version": 1, "guard": "None"}, ValueError),
        ({"version": 1, "timeout": "1"}, TypeError),
        ({"version": 1, "heal": "no"}, TypeError),
    ],
)
def test_a_step_that_is_refused_tears_nothing(
    options: dict[str, Any], error: type[Exception], bus_name: str
) -> None:
    with share_model(bus_name, torch.nn.Linear(4, 3)) as shared:
        with pytest.raises(error, match=r"^\w+: expected"), shared.stepping(**options):
            raise AssertionError("it was begun")
        assert not shared.torn
        with shared.stepping(version=2):
            pass
        assert shared.version == 2


def test_a_parameter_that_was_replaced_is_not_stepped_for_nobody(bus_name: str) -> None:
    model, replica = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    with share_model(bus_name, model) as shared, attach_model(bus_name, replica) as server:
        mine = model.weight
        model.weight = torch.nn.Parameter(torch.zeros(3, 4))
        refused = pytest.raises(WeightsError, match="'weight' of the model")
        with refused, shared.stepping(version=1):
            raise AssertionError("it was begun")
        model.weight = mine
        with shared.stepping(version=1):
            mine.data.fill_(7.0)
        with server.reading(timeout=20.0) as version:
            assert version == 1 and bool((replica.weight == 7.0).all())


def test_a_closed_copy_says_so(bus_name: str) -> None:
    shared = share_model(bus_name, torch.nn.Linear(4, 3))
    server = attach_model(bus_name, torch.nn.Linear(4, 3))
    server.close()
    shared.close()
    with pytest.raises(BusClosedError, match="are closed"), server.reading():
        pass
    with pytest.raises(BusClosedError, match="are closed"), shared.stepping(version=1):
        pass


def test_a_step_that_raised_is_torn_until_it_is_healed(bus_name: str) -> None:
    with share_model(bus_name, torch.nn.Linear(4, 3)) as shared:
        with pytest.raises(KeyError), shared.stepping(version=1):
            raise KeyError("in the user's step")
        with pytest.raises(DamagedError), shared.stepping(version=1):
            pass
        with shared.stepping(version=1, heal=True):
            pass
        assert not shared.torn


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
