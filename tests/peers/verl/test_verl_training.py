"""verl's own trainer takes optimizer steps on groups that outside processes put on a bus."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doc_pages
import pytest
import torch
import yaml
from tiny_policy import (
    COMPLETION_TOKENS,
    PROMPTS,
    ROLLOUTS,
    STEPS,
    check_ledger,
    check_moved,
    make,
    sampling,
)

import shmbus

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(600)


def flat(node: Any, *keys: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from flat(value, *keys, key)
    else:
        yield ".".join(keys), node


def recipe() -> dict[str, Any]:
    file = doc_pages.PAGES / "upstream/verl-recipe/shmbus/config/shmbus_trainer.yaml"
    found = yaml.safe_load(file.read_text())
    return dict(flat({key: found[key] for key in found if key not in ("hydra", "defaults")}))


def overrides(bus: str, root: Path) -> list[str]:
    """What a user would write; the second half makes it small, and of a CPU."""
    return [
        *(f"{name}={bus}" for name, value in recipe().items() if value == doc_pages.BUS),
        f"actor_rollout_ref.model.path={root}/model",
        f"data.train_files={root}/prompts.json",
        f"data.val_files={root}/prompts.json",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "data.dataloader_num_workers=0",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        "actor_rollout_ref.rollout.name=bus",
        "actor_rollout_ref.rollout.nnodes=1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        f"trainer.save_freq={STEPS}",
        f"trainer.default_local_dir={root}/checkpoints",
        "trainer.logger=[file]",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        # Without an accelerator, and without inference servers of verl's own.
        "trainer.v1.trainer_mode=bus",
        "trainer.device=cpu",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.model.use_remove_padding=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=false",
        "actor_rollout_ref.actor.use_torch_compile=false",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=false",
        "+ray_kwargs.ray_init.object_store_memory=209715200",
    ]


def train(bus: str, root: Path) -> list[dict[str, float]]:
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_a_cpu", "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda", "RAY_worker_niceness": "0",
        "RAY_ADDRESS": "local",
        "VERL_FILE_LOGGER_PATH": str(root / "log.jsonl"),
    }  # fmt: skip
    program = "import verl_training; verl_training.main()"
    command = [sys.executable, "-c", program, *overrides(bus, root)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=560, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads(line)["data"] for line in (root / "log.jsonl").read_text().splitlines()]


def check_sent(root: Path, actor: dict[str, torch.Tensor]) -> None:
    """Both of verl's workers got each version whole, and the last equals the saved version."""
    before: dict[str, torch.Tensor] = {}
    for step in range(1, STEPS + 1):
        one, other = root.glob(f"checkpoints/weights-{step}-*.pt")
        sent = torch.load(one)
        again = torch.load(other)
        assert sent.keys() == again.keys() and len(sent) > 5
        assert all(torch.equal(sent[name], again[name]) for name in sent)
        if step > 1:
            assert any(not torch.equal(sent[name], before[name]) for name in sent)
        before = sent
    for name, tensor in actor.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(whole.to(sent[name].dtype), sent[name]), name


def test_verl_trains_though_an_outside_worker_dies(bus_name: str, tmp_path: Path) -> None:
    make(tmp_path)
    with shmbus.Bus.create(bus_name, capacity="1MiB") as bus:
        with sampling(
            "verl.md", "producer.requests.next()", bus_name, tmp_path, count=2, dies_in=3
        ):
            log = train(bus_name, tmp_path)
        stats = bus.stats()
    check_ledger(stats)
    assert [step["training/global_step"] for step in log] == list(range(1, STEPS + 1))
    for step in log:
        assert math.isfinite(step["actor/pg_loss"]) and step["actor/grad_norm"] > 0
        assert step["response_length/mean"] == COMPLETION_TOKENS
        # The bus shows verl's own version of the weights, or its predecessor.
        assert step["training/off_policy/trajectory_staleness/min"] >= 0
    # Before the first update, verl's policy gives the samplers' own logprobs, but in bfloat16.
    assert log[0]["training/rollout_probs_diff_max"] < 0.01
    [saved] = tmp_path.glob(f"checkpoints/global_step_{STEPS}/actor/model_world_size_1_rank_0.pt")
    actor = torch.load(saved, weights_only=False)
    check_moved(tmp_path, actor)
    check_sent(tmp_path, actor)


def test_the_recipe_sets_what_the_page_says() -> None:
    pages = [
        yaml.safe_load(doc_pages.block("verl.md", "custom_sampler:")),
        yaml.safe_load(doc_pages.block("verl.md", "custom_backend_module:")),
    ]
    assert recipe() == {name: value for page in pages for name, value in flat(page)}
