"""Adapters of real PEFT models, published and written by shmbus, loaded back by PEFT."""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from shmbus.weights import (
    LoraFiles,
    WeightsError,
    lora_state,
)

pytestmark = pytest.mark.timeout(120)
TOKENS = torch.arange(24).view(2, 12) % 60
ATTENTION = ["q_proj", "v_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ATTENTION},
    "all-linear": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": ATTENTION, "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "a whole head": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ATTENTION, "trainable_token_indices": [3, 5]},
    "ranks by name": {"target_modules": ATTENTION, "rank_pattern": {"v_proj": 3}},
}


def base(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def trained(kind: str, *, adapter: str = "default", tied: bool = False) -> PeftModel:
    """A model with an adapter trained for a step, to judge by its outputs."""
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **KINDS[kind])
    model = get_peft_model(base(tied=tied), config, adapter_name=adapter)
    train(model)
    return model


def train(model: PeftModel) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model.train()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        # A first step changes only one factor of LoRA.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found = model(input_ids=TOKENS).logits
    assert isinstance(found, torch.Tensor)
    return found


def bits_of(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in state.items()
    }


@pytest.fixture
def folder(bus_name: str) -> Iterator[Path]:
    path = Path(f"/dev/shm/{bus_name}-adapters")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_are_those_that_peft_saves(kind: str, tied: bool) -> None:
    model = trained(kind, tied=tied)
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert bits_of(lora_state(model)) == bits_of(wanted)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_the_files_and_computes_the_same(kind: str, tied: bool, folder: Path) -> None:
    model = trained(kind, adapter="policy", tied=tied)
    before = logits(base(tied=tied))
    config = model.peft_config["policy"].to_dict()
    made = LoraFiles(folder, "run1", config).publish(lora_state(model, adapter="policy"), 0)
    loaded = PeftModel.from_pretrained(base(tied=tied), made.path).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert not torch.equal(logits(loaded), before)


def test_a_newer_version_is_loaded_beside_the_one_in_use(folder: Path) -> None:
    model = trained("lora")
    files = LoraFiles(folder, "run1", model.peft_config["default"].to_dict())
    first = files.publish(lora_state(model), 1)
    was = logits(model)
    train(model)
    second = files.publish(lora_state(model), 2)
    server = PeftModel.from_pretrained(base(), first.path, adapter_name=first.name).eval()
    server.load_adapter(second.path, adapter_name=second.name)
    assert torch.equal(logits(server), was)
    server.set_adapter(second.name)
    assert torch.equal(logits(server), logits(model))
    server.set_adapter(first.name)
    assert torch.equal(logits(server), was)


def test_the_files_are_those_of_save_pretrained(folder: Path, tmp_path: Path) -> None:
    model = trained("lora")
    model.save_pretrained(tmp_path)
    config = model.peft_config["default"]
    made = LoraFiles(folder, "run1", config.to_dict()).publish(lora_state(model), 7)
    ours, theirs = (
        load_file(f"{made.path}/adapter_model.safetensors"),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    assert bits_of(ours) == bits_of(theirs)
    read = LoraConfig.from_pretrained(made.path)
    wanted = LoraConfig.from_pretrained(tmp_path)
    wanted.inference_mode = read.inference_mode  # save_pretrained marks it for inference
    assert read == wanted


def test_trained_biases_are_no_adapter() -> None:
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(4, 4)),
        LoraConfig(r=2, target_modules=["0"], bias="all"),
    )
    with pytest.raises(WeightsError, match="expected bias='none' in its config, got 'all'"):
        lora_state(model)


def test_an_adapter_among_others_is_published_alone() -> None:
    model = trained("lora", adapter="one")
    model.add_adapter("two", copy.deepcopy(model.peft_config["one"]))
    one = lora_state(model, adapter="one")
    assert one.keys() == lora_state(model, adapter="two").keys()
    assert bits_of(one) == bits_of(get_peft_model_state_dict(model, adapter_name="one"))
    with pytest.raises(WeightsError, match="there are: one, two"):
        lora_state(model, adapter="three")
