"""GRPO of a real chat model with a real vLLM on one GPU: does the policy learn, and at which rate.

    python -m bench.real_model --model FOLDER --arms nearest stochastic --seeds 0 1 2 --output FILE

An arm is a way to publish float32 masters to a 16-bit engine, or a remedy in the loss; the run is
that of ``shmbus demo --engine vllm``, from the same checkpoint and prompts in each arm.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from bench import machine
from trainer_adapter.demo.chat import CPU, GPU, ChatConfig, ChatRun, Remedy, Scale

ARMS: Final = {
    "nearest": ("bfloat16", Remedy("nearest")),
    "stochastic": ("bfloat16", Remedy("stochastic")),
    "bf16-forward": ("bfloat16", Remedy("nearest", forward="bfloat16")),
    "truncated": ("bfloat16", Remedy("nearest", correction="truncated")),
    "recomputed": ("bfloat16", Remedy("nearest", correction="recomputed")),
    "stochastic-bf16-forward": ("bfloat16", Remedy("stochastic", forward="bfloat16")),
    "float16": ("float16", Remedy("nearest")),
    "turns": ("bfloat16", Remedy()),  # the server sleeps while the trainer trains
}


def trial(options: argparse.Namespace, scale: Scale, name: str, seed: int) -> dict[str, Any]:
    """Run an arm with a seed; return the figures, rates without the server's start."""
    dtype, remedy = ARMS[name]
    with tempfile.TemporaryDirectory() as output:
        config = ChatConfig(
            model=str(options.model), seed=seed, steps=options.steps or None, output=output,
            turns=name == "turns",
        )  # fmt: skip
        run = ChatRun(config, scale._replace(dtype=dtype), remedy)
        run.run()
    last, seconds = run.figures[-20:], run.training[-1].seconds - run.held_out[0].seconds
    found = {
        f"{key}_last": statistics.fmean(row[key] for row in last)
        for key in ("reward", "mean", "p99", "k3", "clip_fraction")
    }
    times = ("wait_s", "sleep_s", "train_s", "update_s", "free_gb")
    found |= {key: statistics.median(row.get(key, 0) for row in run.figures) for key in times}
    return {
        "arm": name, "engine": dtype, **remedy._asdict(), "seed": seed, **found,
        "held_out": [(each.step, each.seconds, each.reward) for each in run.held_out],
        "step_s": seconds / len(run.figures),
        "tokens_per_s": sum(row["tokens"] for row in run.figures) / seconds,
    }  # fmt: skip


def main() -> int:
    """Run the arms, and write the figures after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["nearest", "stochastic"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="a JSON file of the figures")
    options = parser.parse_args()
    scale = GPU if options.device == "cuda" else CPU
    found: dict[str, Any] = {"machine": machine.describe(), "trials": []}
    for name in options.arms:
        for seed in options.seeds:
            found["trials"].append(trial(options, scale, name, seed))
            if options.output:
                options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
