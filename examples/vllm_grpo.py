"""GRPO with a real vLLM server: prompts out, samples in, weights back, a checkpoint to resume from.

    pip install 'shmbus[engines]' vllm peft             # on a CPU: see docs/vllm.md
    python examples/vllm_grpo.py --output runs/one    # some minutes on two cores
    shmbus web vllm-one                               # the page, beside it

The command starts everything: the server, a process of workers with many requests in flight, and
the trainer, a stock transformers model. Kill any part, or the whole: the same command resumes, and
no prompt is trained twice. Nothing to download: the script makes a model with random weights.
``--model FOLDER`` takes your model; then replace the task, the first part of this file.

``--weights`` chooses the way of a step's weights to the server: ``keep``, shared memory beside
requests in flight; ``lora``, only an adapter; ``checkpoint``, files read again by the server;
``restart``, a fresh server with the files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch

import shmbus
from shmbus.engines import EngineFleet, LoraFleet, ManagedServer, VllmServer
from shmbus.weights import LoraFiles, ModuleSource, WeightPublisher, lora_state
from trainer_adapter import OnlineDataHandler
from trainer_adapter.attention import register_with_transformers, transformers_inputs
from trainer_adapter.losses import policy_loss

# --- the task: asked "say c", answer "c c c c c c"; the reward is the share of right letters

LETTERS = "abcdefghijklmnop"
WORDS = ["<pad>", "<unk>", "<eos>", "say", "please", *LETTERS]
SAY, PLEASE, FIRST = WORDS.index("say"), WORDS.index("please"), WORDS.index("a")
ANSWER_TOKENS = 6


def prompts(*, held_out: bool) -> list[dict[str, Any]]:
    """Make every prompt: up to three words "please" before and after; a quarter is held out."""
    places = itertools.product(range(4), range(4), range(FIRST, len(WORDS)))
    return [
        {
            "prompt": np.array([PLEASE] * before + [SAY, letter] + [PLEASE] * after, np.int32),
            "meta": {"right": letter},
        }
        for before, after, letter in places
        if ((before + after + letter) % 4 == 1) == held_out
    ]


def forever() -> Iterator[dict[str, Any]]:
    """Yield the prompts again and again, in the same order in each life."""
    rng, asked = random.Random(0), prompts(held_out=False)
    while True:
        rng.shuffle(asked)
        yield from asked


def score(request: shmbus.Request, answer: list[int]) -> float:
    """Return the share of right tokens."""
    return float(np.mean([token == request.meta["right"] for token in answer]))


def write_model(folder: Path) -> None:
    """Write a tiny model with random weights, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=64,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )).save_pretrained(folder)  # fmt: skip
    words = models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder)


# --- workers

SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
GROUP_SIZE, GROUPS_PER_BATCH, AT_ONCE = 8, 16, 64


async def adapter(client: openai.AsyncOpenAI, version: int) -> str:
    """Return the server's name of an adapter: the last publication of a version's number."""
    begins = f"policy-v{version}"
    names = [model.id async for model in client.models.list()]
    return next((name for name in reversed(names) if name.startswith(f"{begins}-")), begins)


async def work(producer: shmbus.Producer, client: openai.AsyncOpenAI, lora: bool) -> None:
    """Answer requests one by one."""
    while (request := await producer.requests.anext()) is not None:
        prompt = request["prompt"].tolist()
        more = {"return_token_ids": True, "ignore_eos": True, "cache_salt": request.cache_salt}
        try:
            version = producer.policy_version
            completion = await client.completions.create(
                model=await adapter(client, version) if lora else "policy",
                prompt=prompt, logprobs=0,
                max_tokens=ANSWER_TOKENS, temperature=float(request.split != "eval"),
                extra_body=more,
            )  # fmt: skip
        except (
            openai.APIConnectionError, openai.InternalServerError, shmbus.VersionUnknownError,
        ):  # fmt: skip
            # This worker waits a little.
            producer.requests.release(request, reason="the server is away, or restarted")
            continue
        except openai.APIStatusError as error:
            producer.requests.fail(request, repr(error))  # asked for again
            continue
        choice: Any = completion.choices[0]
        if choice.finish_reason == "abort":
            producer.requests.release(request)  # cut short for new weights
            continue
        answer = {
            "score": score(request, choice.token_ids),
            "policy_version": version,  # the oldest possible
            "tokens": prompt + choice.token_ids,
            "logprobs": [0.0] * len(prompt) + choice.logprobs.token_logprobs,
            "loss_mask": [0] * len(prompt) + [1] * len(choice.token_ids),
        }
        await asyncio.to_thread(producer.requests.answer, request, **answer)


async def run_workers(bus: str, url: str, lora: bool) -> None:
    """Keep many requests in flight."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with client, await shmbus.Producer.awaited(bus) as producer:
        await asyncio.gather(*(work(producer, client, lora) for _ in range(AT_ONCE)))


def be_workers(*arguments: Any) -> None:
    """Run as the workers' process, until the trainer's end or death."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None

    def end_with_it() -> None:
        trainer.join()
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()
    asyncio.run(run_workers(*arguments))


# --- the server, and weights to it


def managed(options: argparse.Namespace, folder: Path) -> ManagedServer:
    """Describe the server; its life ends with this process."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", "{checkpoint}", "--served-model-name", "policy"]
    command += ["--port", str(options.port)]
    command += ["--host", "127.0.0.1", "--weight-transfer-config", '{"backend": "shmbus"}']
    command += options.server.split()
    if options.weights == "restart":  # files missing from a version's folder
        command += ["--hf-config-path", str(folder), "--tokenizer", str(folder)]
        command += ["--generation-config", "vllm"]
    if options.weights == "lora":
        command += ["--enable-lora", "--max-lora-rank", "32", "--max-loras", "2"]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if not torch.cuda.is_available():
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    return ManagedServer(
        command, url=f"http://127.0.0.1:{options.port}", checkpoint=folder, environment=environment
    )


@contextlib.contextmanager
def sender(
    options: argparse.Namespace, bus: str, model: Any, server: ManagedServer
) -> Iterator[Callable[[int], Any]]:
    """Make the function that brings a version to the server."""
    engine = VllmServer(server.address)
    if options.weights == "keep":
        fleet = EngineFleet([engine], bus=bus, mode="keep")
        with WeightPublisher(bus, ModuleSource(model)) as publisher:
            yield lambda version: fleet.update_sync(publisher, version)
    elif options.weights == "lora":
        folder = options.output.resolve() / "adapters"
        files = LoraFiles(folder, "policy", model.peft_config["default"].to_dict())
        adapters = LoraFleet([engine], bus=bus)
        yield lambda version: asyncio.run(
            adapters.update(files.publish(lora_state(model), version))
        )
    else:
        fleet = EngineFleet(
            [engine if options.weights == "checkpoint" else server], bus=bus, mode="abort"
        )
        folder = options.output / "weights"
        with WeightPublisher(
            bus, ModuleSource(model), carrier="checkpoint", directory=folder
        ) as publisher:

            def send(version: int) -> Any:
                publisher.publish(version)
                return asyncio.run(fleet.reload(folder))

            yield send


# --- the trainer


def load(options: argparse.Namespace, folder: Path) -> Any:
    """Load the model, and add an adapter for adapter-only training."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=register_with_transformers(), dtype=torch.float32
    ).to(options.device)
    if options.weights != "lora":
        return model
    import peft  # type: ignore[import-not-found]

    return peft.get_peft_model(
        model, peft.LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
    )


def logprobs_of(model: Any, batch: Any) -> torch.Tensor:
    """Compute each token's logprob, aligned to the token itself, [T]."""
    logits = model(**transformers_inputs(batch)).logits[0, :-1].float().log_softmax(-1)
    return torch.nn.functional.pad(logits.gather(1, batch.tokens[1:, None])[:, 0], (1, 0))


def train(options: argparse.Namespace, bus: str, model: Any, send: Callable[[int], Any]) -> float:
    """Train from the last checkpoint on; return the last evaluation."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    saved, evaluation, began = options.output / "checkpoint.pt", 0.0, time.monotonic()
    with OnlineDataHandler(
        bus, groups_per_batch=GROUPS_PER_BATCH, device=options.device, sample_retries=5,
        max_policy_lag=4,
    ) as handler:  # fmt: skip
        if saved.exists():
            state = torch.load(saved, map_location=options.device)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            handler.load_state_dict(state["handler"])
            evaluation = state["evaluation"]
            print(f"resumed after step {handler.step}", flush=True)
        send(handler.step)
        handler.offer(forever(), ahead=2, group_size=GROUP_SIZE)
        trained = []
        while handler.step < options.steps and evaluation < options.until:
            batch = handler.next_batch(300.0)
            loss = policy_loss(
                logprobs_of(model, batch), batch.logprobs, batch.advantages, batch.loss_mask
            )
            optimizer.zero_grad()
            loss.loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step, sending = handler.step, time.monotonic()
            send(step)
            print(
                f"step {step}: reward {batch.scores.mean():.3f}, "
                f"weights {time.monotonic() - sending:.2f} s, "
                f"age {step - 1 - batch.policy_versions.float().mean():.1f} versions, "
                f"{time.monotonic() - began:.0f} s", flush=True,
            )  # fmt: skip
            trained.append(batch)
            if step % options.save_steps:
                continue
            for number, each in enumerate(prompts(held_out=True)):
                handler.request(
                    f"eval-{step}-{number}", group_size=1, split="eval", priority=7, **each
                )
            figures = handler.evaluate(len(prompts(held_out=True)), timeout=300.0)
            evaluation = figures["eval/reward/mean"]
            print(f"step {step}: evaluation {evaluation:.3f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"handler": handler.state_dict(), "evaluation": evaluation}
            torch.save(state, saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
            while trained:  # after the checkpoint: unsaved groups come again
                handler.ack(trained.pop(0))
    return evaluation


def main() -> int:
    """Start missing parts, and train; return 0 after learning the task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/vllm"))
    parser.add_argument("--model", type=Path, help="a folder of yours")
    parser.add_argument(
        "--weights", default="keep", choices=("keep", "lora", "checkpoint", "restart")
    )
    parser.add_argument("--port", type=int, default=8200, help="of the server, in each life")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument(
        "--until",
        type=float,
        default=0.9,
        help="stop at this mean reward of the evaluation (default 0.9)",
    )
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default 0.003)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--server", default="--dtype float32 --enforce-eager --max-model-len 64",
        help="arguments added to the server's command",
    )  # fmt: skip
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed: pip install vllm (on a CPU: docs/vllm.md)")
    bus, folder = f"vllm-{options.output.name}", options.model or options.output / "model"
    torch.set_num_threads(1)
    if not folder.exists():
        write_model(folder)
    model, server = load(options, folder), managed(options, folder)
    with shmbus.Bus.ensure(bus, "64MiB", schema=SCHEMA) as made:
        try:
            asyncio.run(server.start())
            spawn = multiprocessing.get_context("spawn")
            arguments = (bus, server.address, options.weights == "lora")
            spawn.Process(target=be_workers, args=arguments, daemon=True).start()
            with sender(options, bus, model, server) as send:
                evaluation = train(options, bus, model, send)
        finally:
            asyncio.run(server.end())
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"evaluation {evaluation:.3f}, {made.stats().acknowledged} samples, {most} MiB here")
    if evaluation >= options.until:
        shmbus.unlink(bus)
    return 0 if evaluation >= options.until else 1


if __name__ == "__main__":
    sys.exit(main())
