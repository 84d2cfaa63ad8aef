"""A trainer's `torch.set_default_device` moves no tensor of the product."""

import ast
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_style import ROOT, tree
from torch.utils._device import _device_constructors

from shmbus import Bus, Producer
from shmbus.tensors import TensorChannel
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import OnlineDataHandler

MAKERS = {each.__name__ for each in _device_constructors()} - {"fill"}
#: The demo's policy lives where its user wants.
FREE = ROOT / "trainer_adapter" / "demo"


def test_every_tensor_is_made_on_a_named_device() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.func.attr}"
        for path in tree()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in ("shmbus", "trainer_adapter")
        and not path.is_relative_to(FREE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value) == "torch" and node.func.attr in MAKERS
        if all(keyword.arg != "device" for keyword in node.keywords)
    ]
    assert not found, found


@pytest.fixture
def bus() -> Any:
    with Bus.create(f"test-device-{os.getpid()}", "4MiB") as bus:
        yield bus


def test_weights_pass_under_another_default_device(bus: Bus, tmp_path: Path) -> None:
    model, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).bfloat16()
    with torch.device("meta"):
        source = ModuleSource(model, dtype=torch.bfloat16, rounding="stochastic")
        with WeightPublisher(bus.name, source) as publisher:
            publisher.publish(version=1)
            with (
                WeightSubscriber(bus.name) as subscriber,
                subscriber.latest(timeout=5.0) as weights,
            ):
                weights.load_into(other)
        files = {"carrier": "checkpoint", "directory": tmp_path}
        with WeightPublisher(bus.name, ModuleSource(model), **files) as publisher:  # type: ignore[arg-type]
            publisher.publish(version=2)
    torch.testing.assert_close(other.weight.float(), model.weight, rtol=2**-6, atol=0)
    (file,) = tmp_path.rglob("*.safetensors")
    assert torch.equal(load_file(file)["weight"], model.weight)


def test_batches_and_channels_pass_under_another_default_device(bus: Bus) -> None:
    with torch.device("meta"):
        with Producer(bus.name) as producer:
            for index in range(2):
                producer.put(
                    "q", group_size=2, index=index, score=float(index), tokens=np.arange(4),
                    loss_mask=np.ones(4, np.uint8), logprobs=np.zeros(4, np.float32),
                    ref=np.ones(4, np.float32),
                )  # fmt: skip
        with OnlineDataHandler(
            bus.name, groups_per_batch=1, extra_fields={"ref": "token"}
        ) as handler:
            batch = handler.next_batch(timeout=5.0)
            assert batch is not None
            assert batch.tokens.tolist() == [0, 1, 2, 3] * 2
            assert batch.extra["ref"].tolist() == [1.0] * 8
            handler.ack(batch)
        name = f"{bus.name}.hidden"
        with (
            TensorChannel.create(name, slots=2) as sender,
            TensorChannel.open(name, specs={"hidden": ("float32", (3,))}) as receiver,
        ):
            sender.send({"hidden": torch.ones(3, device="cpu")}, step=0)
            with receiver.recv(timeout=5.0) as item:
                assert item["hidden"].tolist() == [1.0] * 3
