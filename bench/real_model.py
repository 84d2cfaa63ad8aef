"""GRPO of a real chat model with a real vLLM on one GPU: does the policy learn, and at which rate.

    python -m bench.real_model --model FOLDER --output FILE.json
    python -m bench.real_model --model FOLDER --arms nearest stochastic --seeds 0 1 2

The task: "Which number is larger, a or b? Reply with the number only." A reply earns 1 for the
exact number and 0.5 for a text whose first number is right. An arm is a way to publish float32
masters to a 16-bit engine, or a remedy in the loss; all arms of an engine dtype share one server.

Invariants: every arm starts from the same checkpoint, prompts and sampling settings; the trainer's
precision gap is measured by a second forward pass at the engine's dtype every `PROBE_STEPS` steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import shmbus
from bench import machine
from shmbus.engines import EngineFleet, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher
from trainer_adapter import OnlineDataHandler, logprob_mismatch
from trainer_adapter.attention import register_with_transformers
from trainer_adapter.corrections import importance_correction
from trainer_adapter.demo import chat_task
from trainer_adapter.losses import policy_loss

GROUPS_PER_BATCH: Final = 32
HELD_OUT: Final = 128
#: Steps between two evaluations, and between two measurements of the precision gap.
EVALUATE_STEPS: Final = 20
PROBE_STEPS: Final = 10


class Arm(NamedTuple):
    """A way to train: engine dtype, rounding, dtype of the trainer's forward pass, correction."""

    engine: str = "bfloat16"
    rounding: str = "nearest"
    forward: str = "float32"
    correction: str = "none"


ARMS: Final = {
    "nearest": Arm(),
    "stochastic": Arm(rounding="stochastic"),
    "bf16-forward": Arm(forward="bfloat16"),
    "truncated": Arm(correction="truncated"),
    "recomputed": Arm(correction="recomputed"),
    "stochastic-bf16-forward": Arm(rounding="stochastic", forward="bfloat16"),
    "float16": Arm(engine="float16"),
}


class Trial:
    """One arm with one seed: a bus, a publisher, workers and a trainer of their own."""

    def __init__(self, options: argparse.Namespace, name: str, seed: int, url: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.options, self.name, self.seed, self.url = options, name, seed, url
        self.arm = ARMS[name]
        torch.manual_seed(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        self.model = AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation=register_with_transformers(), dtype=torch.float32
        ).to(options.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.lr, weight_decay=0.0, fused=True
        )
        self.rows: list[dict[str, float]] = []
        self.held_out: list[tuple[int, float, float]] = []

    def run(self) -> dict[str, Any]:
        """Train; return the figures."""
        bus = f"real-{os.getpid()}-{self.name}-{self.seed}"
        dtype = getattr(torch, self.arm.engine)
        source = ModuleSource(self.model, dtype=dtype, rounding=self.arm.rounding)  # type: ignore[arg-type]
        spawn = multiprocessing.get_context("spawn")
        arguments = (bus, self.url, str(self.options.model))
        with (
            shmbus.Bus.create(bus, "256MiB", schema=chat_task.SCHEMA),
            OnlineDataHandler(
                bus, groups_per_batch=GROUPS_PER_BATCH, device=self.options.device, prefetch=1,
                sample_retries=5, max_policy_lag=4,
            ) as handler,
            WeightPublisher(bus, source) as publisher,
        ):  # fmt: skip
            fleet = EngineFleet([VllmServer(self.url)], bus=bus, mode="keep")
            fleet.update_sync(publisher, 0)
            workers = spawn.Process(target=chat_task.be_workers, args=arguments, daemon=True)
            workers.start()
            try:
                self._train(handler, fleet, publisher)
                ledger = handler.stats()
            finally:
                workers.terminate()
                workers.join()
        return self._figures(ledger)

    def _train(
        self, handler: OnlineDataHandler, fleet: EngineFleet, publisher: WeightPublisher
    ) -> None:
        handler.offer(
            chat_task.prompts(self.tokenizer, self.seed), ahead=2, group_size=chat_task.GROUP_SIZE
        )
        self._evaluate(handler, 0)
        self.began_s = began = time.monotonic()
        for step in range(1, self.options.steps + 1):
            asked = time.monotonic()
            batch = handler.next_batch(300.0)
            got = time.monotonic()
            figures = self._step(batch, probe=step % PROBE_STEPS == 0)
            stepped = time.monotonic()
            fleet.update_sync(publisher, step)
            handler.set_policy_version(step)
            updated = time.monotonic()
            handler.ack(batch)
            row = {
                "step": step, "seconds": updated - began, "reward": float(batch.scores.mean()),
                "tokens": batch.num_tokens, "wait_s": got - asked, "train_s": stepped - got,
                "update_s": updated - stepped, **figures,
            }  # fmt: skip
            self.rows.append(row)
            if step % EVALUATE_STEPS == 0:
                paused = time.monotonic()
                self._evaluate(handler, step)
                began += time.monotonic() - paused  # the curve is of training time
                print(self._line(), flush=True)

    def _step(self, batch: Any, *, probe: bool) -> dict[str, float]:
        logprobs = chat_task.logprobs_of(self.model, batch, self.arm.forward)
        low = None
        if probe:
            with torch.no_grad():
                low = chat_task.logprobs_of(self.model, batch, self.arm.engine)
        figures = logprob_mismatch(logprobs.detach(), batch, at_engine_dtype=low)
        old, weights = batch.logprobs, None
        if self.arm.correction != "none":  # the ratio is against the trainer's own logprobs
            old = logprobs.detach()
            if self.arm.correction == "truncated":
                weights = importance_correction(old, batch.logprobs, batch.loss_mask).weights
        loss = policy_loss(logprobs, old, batch.advantages, batch.loss_mask, weights=weights)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss.loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"clip_fraction": float(loss.clip_fraction), **figures.metrics("")}

    def _evaluate(self, handler: OnlineDataHandler, step: int) -> None:
        held_out = chat_task.prompts(self.tokenizer, chat_task.HELD_OUT_SEED)
        for number in range(HELD_OUT):
            handler.request(
                f"eval-{step}-{number}", group_size=1, split="eval", priority=7, **next(held_out)
            )
        found = handler.evaluate(HELD_OUT, timeout=300.0)
        seconds = self.rows[-1]["seconds"] if self.rows else 0.0
        self.held_out.append((step, seconds, found["eval/reward/mean"]))

    def _line(self) -> str:
        recent = self.rows[-EVALUATE_STEPS:]
        mean = {name: statistics.fmean(row[name] for row in recent) for name in ("reward", "mean")}
        return (
            f"{self.name} seed {self.seed} step {self.rows[-1]['step']:.0f}: reward "
            f"{mean['reward']:.3f}, held-out {self.held_out[-1][2]:.3f}, |dlogp| {mean['mean']:.4f}"
        )

    def _figures(self, ledger: shmbus.Ledger) -> dict[str, Any]:
        def median(name: str) -> float:
            return statistics.median(row[name] for row in self.rows[5:] or self.rows)

        seconds = self.rows[-1]["seconds"]
        last = self.rows[-EVALUATE_STEPS:]
        probes = [row["gap_share"] for row in self.rows if "gap_share" in row]
        return {
            "arm": self.name, **self.arm._asdict(), "seed": self.seed, "steps": len(self.rows),
            "lr": self.options.lr, "held_out": self.held_out,
            "reward_first": statistics.fmean(row["reward"] for row in self.rows[:10]),
            "reward_last": statistics.fmean(row["reward"] for row in last),
            "dlogp_last": statistics.fmean(row["mean"] for row in last),
            "p99_last": statistics.fmean(row["p99"] for row in last),
            "k3_last": statistics.fmean(row["k3"] for row in last),
            "clipped_last": statistics.fmean(row["clip_fraction"] for row in last),
            "gap_share_median": statistics.median(probes) if probes else None,
            "step_s": seconds / len(self.rows), "wait_s": median("wait_s"),
            "train_s": median("train_s"), "update_s": median("update_s"),
            "tokens_per_s": sum(row["tokens"] for row in self.rows) / seconds,
            "ledger_balanced": ledger.balanced, "committed": ledger.committed,
        }  # fmt: skip


def main() -> int:
    """Run the arms, and write the figures after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument(
        "--arms", nargs="+", choices=sorted(ARMS), default=["nearest", "stochastic"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--server", default="--enforce-eager --gpu-memory-utilization 0.3",
        help="arguments added to the server's command",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, help="a JSON file of the figures")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine.describe(), "trials": []}
    for dtype in dict.fromkeys(ARMS[name].engine for name in options.arms):
        server = chat_task.server_of(options.model, options.port, dtype, options.server.split())
        asyncio.run(server.start())
        try:
            for name in (name for name in options.arms if ARMS[name].engine == dtype):
                for seed in options.seeds:
                    found["trials"].append(Trial(options, name, seed, server.address).run())
                    if options.output:
                        options.output.write_text(json.dumps(found, indent=1) + "\n")
        finally:
            asyncio.run(server.end())
    return 0


if __name__ == "__main__":
    sys.exit(main())
