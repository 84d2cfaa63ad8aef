"""TRL's AsyncGRPOTrainer fed from a bus by rollout processes of your own, without vLLM.

    pip install shmbus trl==1.16.0 requests 'torch>=2.8'
    python examples/trl_async.py                     # a tiny model from a config; a Hopper GPU
    python examples/trl_async.py --steps 200 --workers 4 --output runs/trl

TRL's asynchronous trainer needs FlashAttention 3, hence a Hopper GPU. The rollout processes need
nothing of TRL: they load each version of the weights from shared memory, sample, score, and put
whole groups. Kill any of them at any time: the rest goes on, unnoticed by the trainer. Restart a
killed trainer with the same ``--output`` and ``--bus``: training resumes, with every group trained
once.

Task: repeat a word. The reward is the share of right words.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import shmbus
from shmbus.weights import WeightSubscriber
from trainer_adapter.adapters.trl import (
    ShmbusRolloutWorker,
    ShmbusWeights,
    last_whole_checkpoint,
)

WORDS = 16
ANSWER_TOKENS = 6
GROUP_SIZE = 8
#: Groups workers may be ahead of the trainer: half of a step's.
MAX_LEAD = 8


def write_model(directory: Path) -> None:
    """Write a model with random weights, and a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)
    words = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", padding_side="left"
    ).save_pretrained(directory)


@torch.no_grad()
def sample(
    model: Any, word: int, temperature: float, generator: torch.Generator
) -> tuple[Any, Any]:
    """Sample a group for a prompt; return tokens and their logprobs, [group, n] each."""
    ids = torch.full((GROUP_SIZE, 1), word)
    logprobs = torch.zeros(GROUP_SIZE, 1)
    for _ in range(ANSWER_TOKENS):
        scores = (model(input_ids=ids).logits[:, -1].float() / temperature).log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        ids = torch.cat([ids, drawn], 1)
        logprobs = torch.cat([logprobs, scores.gather(1, drawn)], 1)
    return ids, logprobs


def work(bus: str, directory: str, temperature: float, seed: int) -> None:
    """Run as a rollout process: newest weights, a group, and again, until the bus is gone."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    version = -1
    with shmbus.Producer(bus, wait=60.0) as producer, WeightSubscriber(bus) as subscriber:
        while True:
            with subscriber.latest(timeout=600.0) as weights:
                if weights.version != version:
                    weights.load_into(model)
                    version = weights.version
            word = dice.randrange(2, WORDS)
            tokens, logprobs = sample(model, word, temperature, generator)
            rewards = (tokens[:, 1:] == word).float().mean(1).tolist()
            round = producer.next_round()
            producer.put_many(
                {
                    "instance_id": f"w{word}", "round": round, "group_size": GROUP_SIZE,
                    "index": index, "score": reward, "policy_version": version,
                    "tokens": tokens[index], "logprobs": logprobs[index],
                    "loss_mask": [0] + [1] * ANSWER_TOKENS,
                }
                for index, reward in enumerate(rewards)
            )  # fmt: skip


def train(arguments: argparse.Namespace, model: str) -> float:
    """Train; return the mean reward of the last steps."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    worker = ShmbusRolloutWorker(arguments.bus, acknowledge="save")
    trainer = AsyncGRPOTrainer(
        model=model,
        args=AsyncGRPOConfig(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            num_generations=GROUP_SIZE,
            max_completion_length=ANSWER_TOKENS,
            # TRL requests no samples here: the command line configures the workers.
            temperature=arguments.temperature,
            # Tokens of a step; without the value TRL asks a vLLM server.
            token_budget=256,
            per_device_train_batch_size=16,
            learning_rate=arguments.learning_rate,
            seed=arguments.seed,
            save_steps=arguments.save_steps,
            logging_steps=1,
            gradient_checkpointing=False,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        # TRL wants a data set; the workers bring their own prompts.
        train_dataset=Dataset.from_dict({"prompt": ["w2"]}),
        rollout_worker=worker,
        weight_transfer=ShmbusWeights(arguments.bus),
        callbacks=[worker.callback],
    )
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(arguments.output))
    rewards = [step["reward"] for step in trainer.state.log_history if "reward" in step]
    for first in range(0, len(rewards), 10):
        part = rewards[first : first + 10]
        print(f"steps {first + 1:4} to {first + len(part):4}: reward {sum(part) / len(part):.3f}")
    return sum(rewards[-10:]) / len(rewards[-10:])


def main() -> None:
    """Start the workers, train, and end them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bus", default=f"trl-{os.getpid()}")
    parser.add_argument("--output", default=tempfile.mkdtemp(prefix="trl-"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed: pip install trl==1.16.0")
    model = Path(arguments.output) / "model"
    if not model.exists():
        write_model(model)
    with shmbus.Bus.ensure(arguments.bus, capacity="16MiB", max_lead=MAX_LEAD) as bus:
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--as-worker",
                    arguments.bus,
                    str(model),
                    str(arguments.temperature),
                    str(seed),
                ]
            )
            for seed in range(arguments.seed * 100, arguments.seed * 100 + arguments.workers)
        ]
        try:
            reward = train(arguments, str(model))
        finally:
            for process in workers:
                process.kill()
                process.wait()
        counts = bus.stats()
    print(f"reward {reward:.3f}; {counts.committed} samples, {counts.acknowledged} acknowledged, "
          f"stale {counts.dropped.get('stale', 0)}")  # fmt: skip
    shmbus.unlink(arguments.bus)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-worker"]:
        work(sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
