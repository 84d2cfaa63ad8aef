"""TRL's asynchronous trainer beside itself: rollouts of its own worker, and of a bus.

    python -m bench.adapters.trl_learning [SEEDS] [STEPS] [FILE]
    python -m bench.adapters.trl_learning --plot FILE PICTURE

Both train the same tiny model on the same prompts, with the same arguments, sampler and weights;
rewards are compared at equal steps. TRL's worker asks for completions over HTTP, as it asks vLLM:
``--serve`` answers it with the model. Each run is a line of JSON; FILE gets the reward of each
step.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "peers" / "trl"))

import torch
from tiny import COMPLETION_TOKENS, FIRST_WORD, VOCABULARY, make_model, on_a_cpu, sample

import shmbus
from shmbus.weights import WeightSubscriber

torch.set_num_threads(1)

GROUP_SIZE = 8
#: Groups that either kind of worker may be ahead of the trainer.
AHEAD = 8
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ANSWER = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
WORDS = range(FIRST_WORD, VOCABULARY)


class Sampler:
    """The model with the newest weights of a bus."""

    def __init__(self, bus: str, directory: str, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.generator = torch.Generator().manual_seed(seed)
        self.subscriber = WeightSubscriber(bus)
        self.version = -1

    def __call__(self, word: int, count: int) -> Any:
        with self.subscriber.latest(timeout=600.0) as weights:
            if weights.version != self.version:
                weights.load_into(self.model)
                self.version = weights.version
        return sample(self.model, word, count, self.generator)


def work(bus: str, directory: str, seed: int) -> None:
    """Put groups of the prompts, one after the other, until the bus is gone."""
    with shmbus.Producer(bus, wait=60.0) as producer:
        sampler = Sampler(bus, directory, seed)
        for number in range(10**9):
            word = WORDS[number % len(WORDS)]
            # Room for a group first: what is sampled waits for nobody.
            asyncio.run(producer.wait_ready(timeout=None))
            tokens, logprobs, rewards = sampler(word, GROUP_SIZE)
            round = producer.next_round()
            producer.put_group(
                f"w{word}",
                [
                    {
                        "score": reward, "tokens": tokens[index], "logprobs": logprobs[index],
                        "loss_mask": [0] + [1] * COMPLETION_TOKENS,
                        "policy_version": sampler.version,
                    }
                    for index, reward in enumerate(rewards)
                ],
                round=round,
            )  # fmt: skip


def serve(bus: str, directory: str, seed: int, port: int) -> None:
    """Answer TRL's worker as vLLM does; what waits is sampled together."""
    from aiohttp import web

    sampler = Sampler(bus, directory, seed)
    waiting: list[tuple[int, asyncio.Future[Any]]] = []

    async def completions(request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["max_tokens"] == COMPLETION_TOKENS and len(asked["prompt"]) == 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.append((asked["prompt"][0], future))
        ids, logprobs = await future
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
        return web.json_response({"choices": [choice]})

    async def answer() -> None:
        while True:
            await asyncio.sleep(0.002)
            for word in {word for word, _ in waiting}:
                futures = [future for asked, future in waiting if asked == word]
                waiting[:] = [each for each in waiting if each[0] != word]
                tokens, logprobs, _ = sampler(word, len(futures))
                for future, ids, each in zip(futures, tokens, logprobs, strict=True):
                    if not future.done():
                        future.set_result((ids[1:].tolist(), each[1:].tolist()))

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await answer()

    asyncio.run(main())


def share_of_right_words(completion_ids: list[list[int]], word: list[int], **_: Any) -> list[float]:
    """The task's reward, as a reward function of TRL."""
    return [
        sum(token == right for token in ids) / len(ids)
        for ids, right in zip(completion_ids, word, strict=True)
    ]


def own_worker(module: Any, bus: str, model: Path, port: int, dataset: Any) -> tuple[Any, Any]:
    """TRL's own worker, and weights that count their versions."""
    from transformers import PreTrainedTokenizerFast
    from trl.experimental.async_grpo import async_rollout_worker as rollouts

    from trainer_adapter.adapters.trl import ShmbusWeights

    class Weights(ShmbusWeights):
        def resume(self) -> None:
            with shmbus.Bus.open(self.bus) as handle:
                handle.policy_version += 1

    rollouts.is_vllm_available = lambda: True  # the server above stands in for it
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.chat_template = CHAT
    tokenizer.response_template = ANSWER
    worker = rollouts.AsyncRolloutWorker(
        model_name=str(model), dataset=dataset, reward_funcs=[share_of_right_words],
        processing_class=tokenizer, eos_token_ids=[1], num_generations=GROUP_SIZE,
        max_inflight_tasks=AHEAD * GROUP_SIZE // 2, queue_maxsize=AHEAD * GROUP_SIZE // 2,
        max_tokens=COMPLETION_TOKENS, vllm_server_url=f"http://127.0.0.1:{port}",
    )  # fmt: skip
    return worker, Weights(bus)


def train(kind: str, seed: int, steps: int, root: Path) -> dict[str, Any]:
    """Train once; return what the trainer logged at each step."""
    model = make_model(root / f"model-{seed}", seed)
    module = on_a_cpu()
    from datasets import Dataset

    from trainer_adapter.adapters.trl import ShmbusRolloutWorker, ShmbusWeights

    bus = f"side-{os.getpid()}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dataset = Dataset.from_dict({
        "prompt": [[{"role": "user", "content": f"w{word}"}] for word in WORDS],
        "word": list(WORDS),
    })  # fmt: skip
    common = [sys.executable, "-W", "ignore", __file__]
    with shmbus.Bus.create(bus, capacity="4MiB", max_lead=AHEAD):
        if kind == "bus":
            worker: Any = ShmbusRolloutWorker(bus, daemon=False)
            weights: Any = ShmbusWeights(bus)
            command = [*common, "--work", bus, str(model), str(seed)]
        else:
            worker, weights = own_worker(module, bus, model, port, dataset)
            command = [*common, "--serve", bus, str(model), str(seed), str(port)]
        process = subprocess.Popen(command)
        try:
            trainer = module.AsyncGRPOTrainer(
                model=str(model),
                args=module.AsyncGRPOConfig(
                    output_dir=str(root / f"out-{kind}-{seed}"), max_steps=steps, seed=seed,
                    num_generations=GROUP_SIZE, max_completion_length=COMPLETION_TOKENS,
                    token_budget=256, learning_rate=2e-3, lr_scheduler_type="constant",
                    max_staleness=4, save_strategy="no",
                    logging_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False,
                    report_to=[], disable_tqdm=True, gradient_accumulation_steps=1,
                    heartbeat_stale_after_s=300.0,
                ),
                train_dataset=dataset,
                rollout_worker=worker,
                weight_transfer=weights,
                callbacks=[worker.callback] if kind == "bus" else [],
            )  # fmt: skip
            began_s = time.monotonic()
            trainer.train()
            seconds = time.monotonic() - began_s
        finally:
            process.kill()
            process.wait()
    log = [step for step in trainer.state.log_history if "reward" in step]
    return {
        "kind": kind, "seed": seed, "seconds": round(seconds, 1),
        "reward": [round(step["reward"], 4) for step in log],
        "staleness": round(sum(step["sample/staleness_mean"] for step in log) / len(log), 2),
        "stale": sum(step.get("sample/dropped_stale_total", 0) for step in log),
    }  # fmt: skip


def plot(file: Path, picture: Path) -> None:
    """Draw the mean of the seeds, and the range that they span, of each ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    runs = json.loads(file.read_text())
    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for kind, name, colour in (("own", "TRL's own worker", "#868e96"), ("bus", "a bus", "#d6336c")):
        rewards = np.array([run["reward"] for run in runs if run["kind"] == kind])
        tens = rewards[:, : rewards.shape[1] // 10 * 10].reshape(len(rewards), -1, 10).mean(2)
        steps = 10 * np.arange(1, tens.shape[1] + 1)
        axes.fill_between(steps, tens.min(0), tens.max(0), color=colour, alpha=0.25, linewidth=0)
        axes.plot(steps, tens.mean(0), color=colour, label=name)
    axes.set(xlabel="step of AsyncGRPOTrainer", ylabel="mean reward of ten steps", ylim=(0, 1))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    file = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    runs = []
    with tempfile.TemporaryDirectory() as root:
        for seed in range(seeds):
            for kind in ("own", "bus"):
                command = [sys.executable, "-W", "ignore", __file__, "--train", kind, str(seed)]
                done = subprocess.run(
                    [*command, str(steps), root], stdout=subprocess.PIPE, text=True
                )
                done.check_returncode()
                found = json.loads(done.stdout.splitlines()[-1])
                runs.append(found.copy())
                if file is not None:
                    file.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
                rewards = found.pop("reward")
                tens = [
                    round(sum(rewards[first : first + 10]) / 10, 3)
                    for first in range(0, steps - 9, 10)
                ]
                print(json.dumps({**found, "reward of each 10 steps": tens}), flush=True)


if __name__ == "__main__":
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how == "--work":
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif how == "--serve":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    elif how == "--train":
        print(json.dumps(train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))))
    elif how == "--plot":
        plot(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
