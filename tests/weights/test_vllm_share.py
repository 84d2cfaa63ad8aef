"""A vLLM worker shares its parameters under the checkpoint's names, or its start fails by name."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from weight_models import without_memory

from shmbus import Bus
from shmbus.engines.vllm_share import share_engine
from shmbus.errors import WeightsError
from shmbus.weights import attach_model, bridge


class Linear(torch.nn.Linear):
    def __init__(self, rows: int, *sizes: int) -> None:
        super().__init__(4, rows, bias=False)
        self.output_sizes = sizes
        self.quant_method = type("UnquantizedLinearMethod", (), {})()
        self.register_buffer("_k_scale", torch.ones(1))  # in no checkpoint


def worker() -> Any:
    model = torch.nn.Module()
    model.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"], "o_proj": ["o_proj"],  # fused in the checkpoint
    }  # fmt: skip
    model.attn = torch.nn.Module()
    model.attn.qkv_proj, model.attn.o_proj = Linear(12, 8, 2, 2), Linear(4)
    model.lm_head = model.embed = Linear(6)
    return model


def config(bus: str) -> Any:
    return SimpleNamespace(
        additional_config={"shmbus_share": bus},
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(enable_sleep_mode=False, use_mla=False),
        lora_config=None,
    )


def test_a_trainer_steps_in_the_parts_of_fused_parameters(bus_name: str) -> None:
    engine = worker()
    before = engine.attn.qkv_proj.weight.detach().clone()
    rows = {"attn.q_proj": 8, "attn.k_proj": 2, "attn.v_proj": 2, "attn.o_proj": 4}
    rows |= {"lm_head": 6, "embed": 6}
    shapes = {f"{name}.weight": (count, 4) for name, count in rows.items()}
    trainer: Any = without_memory(shapes, torch.float32)
    with Bus.create(bus_name, "1MiB") as bus:
        bus.policy_version = 5  # of the server before a restart
        shared = share_engine(config(bus_name), engine)
        assert shared is not None and bus.policy_version == 0
    with shared, attach_model(bus_name, trainer, writable=True) as guest, torch.no_grad():
        assert guest.version == 0
        parts = [getattr(trainer.attn, f"{name}_proj").weight for name in "qkv"]
        assert torch.equal(torch.cat(parts), before)
        with guest.stepping(1):
            parts[1].fill_(7)
            trainer.embed.weight.fill_(8)
        assert torch.equal(engine.attn.qkv_proj.weight[8:10], torch.full((2, 4), 7.0))
        assert torch.equal(engine.lm_head.weight, torch.full((6, 4), 8.0))
        assert shared.version == 1
    assert share_engine(SimpleNamespace(additional_config={}), worker()) is None


def test_a_bridge_file_has_vllms_own_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_exported", lambda tensor: (0, b"i", 9, 0, b"c", 0, b"e", False))
    engine = config("")
    engine.model_config.model = "Qwen/Qwen3-0.6B"
    engine.additional_config = {"shmbus_bridge": str(tmp_path)}
    assert share_engine(engine, worker()) is None
    written = json.loads((tmp_path / bridge.FILE).read_text())
    assert written["model"] == "Qwen/Qwen3-0.6B"
    # The tied embedding once.
    names = ["attn.qkv_proj.weight", "attn.o_proj.weight", "lm_head.weight"]
    assert written["param_names"] == list(written["ipc_handles"]) == names
    engine.additional_config = {"shmbus_bridge": 5}
    with pytest.raises(TypeError, match="shmbus_bridge"):
        share_engine(engine, worker())


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("4 ranks", lambda engine, model: vars(engine.parallel_config).update(world_size=4)),
        ("sleep-mode", lambda engine, model: vars(engine.model_config).update(enable_sleep_mode=1)),
        ("latent attention", lambda engine, model: vars(engine.model_config).update(use_mla=True)),
        (
            "no handles",
            lambda engine, model: engine.additional_config.update(shmbus_bridge="logs"),
        ),
        ("enable-lora", lambda engine, model: vars(engine).update(lora_config=True)),
        ("repacks at", lambda engine, model: setattr(model.attn.o_proj, "quant_method", object())),
        ("repacks at", lambda engine, model: setattr(model.attn.o_proj.weight, "data", model.none)),
        (
            "repacks at",
            lambda engine, model: setattr(model.attn.o_proj, "cpu_linear", lambda: model),
        ),
    ],
)
def test_weights_in_another_form_or_place_are_refused(
    said: str, change: Callable[[Any, Any], object], bus_name: str
) -> None:
    engine, model = config(bus_name), worker()
    model.none = torch.empty(0)
    change(engine, model)
    with pytest.raises(WeightsError, match=said):
        share_engine(engine, model)
