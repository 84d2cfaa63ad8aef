"""SkyRL's own trainer takes optimizer steps on groups that outside processes put on a bus."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
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


def overrides(root: Path) -> list[str]:
    """What a user would write; the second half makes it small, and of a CPU."""
    return [
        f"trainer.policy.model.path={root}/model",
        f"data.train_data=[{root}/prompts.json]",
        f"trainer.train_batch_size={PROMPTS}",
        f"trainer.policy_mini_batch_size={PROMPTS // 2}",
        f"generator.n_samples_per_prompt={ROLLOUTS}",
        f"generator.sampling_params.max_generate_length={COMPLETION_TOKENS}",
        f"trainer.max_training_steps={STEPS}",
        "trainer.max_prompt_length=8",
        "trainer.algorithm.advantage_estimator=grpo",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.policy.optimizer_config.lr=1e-2",
        f"trainer.hf_save_interval={STEPS}",
        f"trainer.export_path={root}/exports",
        f"trainer.ckpt_path={root}/checkpoints",
        f"trainer.log_path={root}/logs",
        "trainer.ckpt_interval=-1",
        "trainer.eval_interval=-1",
        "trainer.resume_mode=none",
        "trainer.print_example_interval=-1",
        "data.dataloader.num_workers=0",
        "trainer.placement.colocate_all=false",
        "trainer.flash_attn=false",
        "trainer.remove_microbatch_padding=false",
        "trainer.gradient_checkpointing=false",
        "trainer.enable_ray_gpu_monitor=false",
        "trainer.logger=console",
        "generator.inference_engine.enable_ray_prometheus_stats=false",
    ]


def train(bus: str, root: Path) -> list[dict[str, float]]:
    paths = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",
    }  # fmt: skip
    command = [sys.executable, str(HERE / "skyrl_training.py"), bus, str(root), *overrides(root)]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=560, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return [json.loads(line) for line in (root / "log.jsonl").read_text().splitlines()]


def test_skyrl_trains_on_groups_of_outside_processes(bus_name: str, tmp_path: Path) -> None:
    make(tmp_path)
    with shmbus.Bus.create(bus_name, capacity="1MiB") as bus:
        with sampling("skyrl.md", "producer.requests.next()", bus_name, tmp_path, count=2):
            log = train(bus_name, tmp_path)
        stats = bus.stats()
    check_ledger(stats)
    assert [step["trainer/global_step"] for step in log] == list(range(1, STEPS + 1))
    for step in log:
        assert math.isfinite(step["policy/policy_loss"]) and step["policy/grad_norm"] > 0
    [saved] = tmp_path.glob(f"exports/global_step_{STEPS}/policy/*.safetensors")
    check_moved(tmp_path, load_file(saved))
