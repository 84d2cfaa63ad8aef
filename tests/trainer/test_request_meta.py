"""What adapters tell workers beside a prompt: how to sample, and the columns of its row."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import next_request, wait_until

import shmbus
from trainer_adapter.adapters.requested_groups import columns_for


def test_arrays_and_tensors_go_along_as_lists_and_nothing_else_changes() -> None:
    row = {
        "answer": "4", "level": 3, "tests": {"in": [1, None]}, "image": b"\x89PNG",
        "array": np.arange(3), "number": np.float32(0.5),
        "tensor": torch.ones(2, requires_grad=True),
    }  # fmt: skip
    assert columns_for("a stack", row) == {
        **row, "array": [0, 1, 2], "number": 0.5, "tensor": [1.0, 1.0],
    }  # fmt: skip


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", np.array([object()]), {1j: 2}])
def test_a_value_without_messagepack_is_told(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    column = f"column of {value!r:.20}"
    for _ in range(3):
        assert columns_for("a stack", {column: value, "answer": 4}) == {"answer": 4}
    [said] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.message.startswith(f"a stack: the column {column!r} does not go to workers: ")


def test_a_column_by_a_name_that_the_meta_has_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert columns_for("another stack", {"split": "hard", "answer": 4}, ("split",)) == {"answer": 4}
    assert "rename the column" in caplog.text


@pytest.fixture
def manager(
    bus: shmbus.Bus, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Any], dict[str, Any]]]:
    """Have verl's manager offer a prompt, without verl; return its worker's view."""
    queue = ModuleType("transfer_queue")
    vars(queue)["kv_put"] = lambda **_: None
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    module = importlib.import_module("trainer_adapter.adapters.verl.manager")
    made: list[Any] = []

    def tell(prompts: dict[str, Any]) -> dict[str, Any]:
        sampler = SimpleNamespace(get={"sampler_kwargs": {"bus": bus.name}}.get)
        rollout = _Config(
            n=1, temperature=0.7, top_p=0.9, top_k=20, response_length=8, prompt_length=4,
            val_kwargs=_Config(n=1, temperature=0.0, top_p=1.0, top_k=-1, do_sample=False),
        )  # fmt: skip
        made.append(
            module.ShmbusAgentLoopManager(
                SimpleNamespace(
                    trainer=SimpleNamespace(v1=SimpleNamespace(sampler=sampler)),
                    actor_rollout_ref=SimpleNamespace(rollout=rollout),
                )
            )
        )
        made[-1].generate_sequences(_Batch(prompts))
        with shmbus.Producer(bus.name) as producer:
            request = next_request(producer)
            producer.requests.fail(request, "told")
        meta: dict[str, Any] = request.meta
        return meta

    yield tell
    for each in made:
        each.close()
    sys.modules.pop("trainer_adapter.adapters.verl.manager", None)


class _Config(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class _Batch(dict[str, Any]):
    def __len__(self) -> int:
        return 1


def test_verls_parameters_and_columns_reach_workers(
    manager: Callable[[Any], dict[str, Any]], bus: shmbus.Bus, caplog: pytest.LogCaptureFixture
) -> None:
    image = f"image of {bus.name}"
    meta = manager({"uid": ["u1"], "raw_prompt": ["a"], "answer": [4], image: [object()]})
    assert meta["sampling"] == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 20, "response_length": 8,
    }  # fmt: skip
    assert (meta["raw_prompt"], meta["answer"]) == ("a", 4)
    wait_until(lambda: image in caplog.text, what="the column to be named")


def test_verls_evaluation_has_own_parameters(manager: Callable[[Any], dict[str, Any]]) -> None:
    assert manager({"uid": ["u1"], "raw_prompt": ["a"], "validate": [True]})["sampling"] == {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "do_sample": False, "response_length": 8,
    }  # fmt: skip
