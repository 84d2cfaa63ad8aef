"""TRL's GRPOTrainer with prompts answered by your own rollout processes, over a bus.

    pip install shmbus trl==1.16.0 'torch>=2.8'
    python examples/trl_sync.py                      # a tiny model from a config; two CPU cores do
    python examples/trl_sync.py --steps 100 --workers 4

The trainer offers its prompts as requests. Workers, free of TRL, take a sample at a time, and
answer with tokens, logprobs and a score. Weights return through shared memory. Kill a worker at any
time: a surviving worker samples its prompts.

Task: repeat a word. The reward is the share of right words.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import shmbus
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter.adapters.trl import ShmbusRollouts

WORDS = 16
ANSWER_TOKENS = 6
GROUP_SIZE = 8


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
    model: Any, prompt: torch.Tensor, sampling: dict[str, Any], generator: torch.Generator
) -> tuple[Any, Any]:
    """Sample a completion by TRL's options; return all tokens and their logprobs, [n] each."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    # TRL divides its own logits by the temperature, and corrects for further sampling options.
    warpers: list[Any] = [TemperatureLogitsWarper(float(sampling["temperature"]))]
    if sampling["top_k"] > 0:
        warpers.append(TopKLogitsWarper(sampling["top_k"]))
    if sampling["top_p"] < 1:
        warpers.append(TopPLogitsWarper(sampling["top_p"]))
    ids = prompt[None]
    logprobs = torch.zeros(1, len(prompt))
    for _ in range(sampling["max_completion_length"]):
        scores = model(input_ids=ids).logits[:, -1].float()
        for warper in warpers:
            scores = warper(ids, scores)
        scores = scores.log_softmax(-1)
        drawn = torch.multinomial(scores.exp(), 1, generator=generator)
        ids = torch.cat([ids, drawn], 1)
        logprobs = torch.cat([logprobs, scores.gather(1, drawn)], 1)
    return ids[0], logprobs[0]


def work(bus: str, directory: str, seed: int) -> None:
    """Run as a rollout process: a request, the newest weights, a sample, until the bus is gone."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    version = -1
    with shmbus.Producer(bus, wait=60.0) as producer, WeightSubscriber(bus) as subscriber:
        while True:
            request = producer.requests.next()
            if request is None:
                continue
            with subscriber.latest(timeout=600.0) as weights:
                if weights.version != version:
                    weights.load_into(model)
                    version = weights.version
            prompt = torch.from_numpy(request["prompt"].copy()).long()
            tokens, logprobs = sample(model, prompt, request.meta["sampling"], generator)
            completion = tokens[len(prompt) :]
            producer.requests.answer(
                request,
                # The data set's further columns lie in the meta, too.
                score=(completion == request.meta["answer"]).float().mean(),
                policy_version=version,
                tokens=tokens,
                logprobs=logprobs,
                loss_mask=[0] * len(prompt) + [1] * len(completion),
            )


def train(arguments: argparse.Namespace, model: str) -> float:
    """Train; return the mean reward of the last steps."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    rollouts = ShmbusRollouts(arguments.bus)
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            num_generations=GROUP_SIZE,
            max_completion_length=ANSWER_TOKENS,
            temperature=arguments.temperature,
            per_device_train_batch_size=4 * GROUP_SIZE,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            seed=arguments.seed,
            beta=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [f"w{i}" for i in range(2, WORDS)], "answer": list(range(2, WORDS))}
        ),
        # The default by model type would be a wrong tokenizer for this directory.
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        rollout_func=rollouts,
        reward_funcs=rollouts.reward,
    )
    with WeightPublisher(arguments.bus, ModuleSource(trainer.model)) as publisher:
        rollouts.attach(trainer, publisher.publish)
        trainer.train()
    rollouts.close()
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed: pip install trl==1.16.0")
    model = Path(arguments.output) / "model"
    if not model.exists():
        write_model(model)
    with shmbus.Bus.create(arguments.bus, capacity="16MiB") as bus:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--as-worker", arguments.bus, str(model), str(seed)]
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
    print(f"reward {reward:.3f}; {counts.committed} samples, {counts.acknowledged} acknowledged")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-worker"]:
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
