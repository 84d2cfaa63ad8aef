"""GRPO on a stock Hugging Face model, over the bus, in packed batches.

    pip install 'shmbus[train]' transformers
    python examples/grpo_transformers.py                 # a tiny Llama, about a minute on two cores
    python examples/grpo_transformers.py --model qwen3 --steps 200

A rollout process samples from the model with transformers' own ``generate`` and puts the
completions on the bus; this process takes complete groups, packed into rows without padding, and
trains with `varlen_attention` plugged into the model. Nothing to download: the model comes from a
config with random weights, the tokenizer from a handful of words.

Task, for a minute's training: answer "repeat c" with "c c c c c c". The reward is the share of
right words, at random 1 in the number of letters.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event, Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shmbus
from trainer_adapter import OnlineDataHandler, logprob_mismatch
from trainer_adapter.attention import register_with_transformers, transformers_inputs
from trainer_adapter.losses import policy_loss

LETTERS = "abcdefgh"
ANSWER_TOKENS = 6
GROUP_SIZE = 8
GROUPS_PER_BATCH = 16
#: Most versions between the rollout process's weights and the newest.
MAX_POLICY_LAG = 4
LEARNING_RATE = 3e-3
FIRST_BATCH_S = 60.0


def build_tokenizer() -> Any:
    """Make a tokenizer of single words, in place."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "repeat", "twice", "please", *LETTERS]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )


def build_model(kind: str, tokenizer: Any, attention: str) -> Any:
    """Make a tiny model of a stock architecture, with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    configs = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    torch.manual_seed(0)
    config = configs[kind](
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


# --- the rollout process


def roll_out(
    bus: str, kind: str, weights: dict[str, Tensor], lock: Lock, stop: Event, seed: int
) -> None:
    """Sample groups of answers and put them on the bus, until told to stop."""
    # The trainer handles Ctrl-C, and stops this process in turn.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    tokenizer = build_tokenizer()
    model = build_model(kind, tokenizer, "sdpa").eval()
    loaded = -1
    round_number = 0
    with shmbus.Producer(bus) as producer:
        while not stop.is_set():
            version = producer.policy_version
            if version != loaded:
                with lock:
                    model.load_state_dict(weights)
                loaded = version
            letters = rng.choice(list(LETTERS), 4)
            # Prompts of different lengths make ragged batches.
            prompts = [
                f"repeat {letter}" + " please" * int(rng.integers(0, 3)) for letter in letters
            ]
            answers = sample(model, tokenizer, prompts)
            for number, prompt in enumerate(prompts):
                for index in range(GROUP_SIZE):
                    tokens, mask, logprobs = answers[number * GROUP_SIZE + index]
                    right = tokenizer.convert_tokens_to_ids(letters[number])
                    try:
                        producer.put(
                            prompt,
                            round=round_number * len(prompts) + number,
                            group_size=GROUP_SIZE,
                            index=index,
                            score=float(np.mean(tokens[-ANSWER_TOKENS:] == right)),
                            policy_version=version,
                            tokens=tokens,
                            loss_mask=mask,
                            logprobs=logprobs,
                            meta={"finish_reason": "stop"},
                            timeout=1.0,
                        )
                    except shmbus.BusFullError:
                        # The trainer is behind; a later round replaces the dropped samples.
                        break
            round_number += 1


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: list[str]) -> list[tuple[np.ndarray, ...]]:
    """Return tokens, loss mask and logprobs of a group of answers to each prompt."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        top_k=0,
        max_new_tokens=ANSWER_TOKENS,
        num_return_sequences=GROUP_SIZE,
        return_dict_in_generate=True,
        output_logits=True,
    )
    answers = out.sequences[:, -ANSWER_TOKENS:]
    all_logprobs = torch.stack(out.logits, dim=1).float().log_softmax(dim=-1)
    picked = all_logprobs.gather(2, answers[..., None]).squeeze(2)
    results = []
    for row, logprobs in enumerate(picked):
        prompt = inputs["input_ids"][row // GROUP_SIZE]
        prompt = prompt[inputs["attention_mask"][row // GROUP_SIZE] != 0]
        tokens = torch.cat([prompt, answers[row]]).to(torch.int32).numpy()
        mask = np.zeros(len(tokens), np.uint8)
        mask[-ANSWER_TOKENS:] = 1
        aligned = np.zeros(len(tokens), np.float32)
        aligned[-ANSWER_TOKENS:] = logprobs.numpy()
        results.append((tokens, mask, aligned))
    return results


# --- the trainer


def token_logprobs(model: Any, batch: Any) -> Tensor:
    """Return the model's logprob of each token, aligned to the token itself: [T]."""
    logits = model(**transformers_inputs(batch)).logits[0].float()
    # Position i - 1 predicts position i; the first token of a sequence stays untrained.
    picked = logits[:-1].log_softmax(dim=-1).gather(1, batch.tokens[1:, None]).squeeze(1)
    return torch.nn.functional.pad(picked, (1, 0))


def train(
    bus: str, kind: str, weights: dict[str, Tensor], lock: Lock, steps: int, device: str
) -> tuple[float, float]:
    """Train, and return the mean reward of the first and of the last batches."""
    tokenizer = build_tokenizer()
    model = build_model(kind, tokenizer, register_with_transformers()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rewards: list[float] = []
    with OnlineDataHandler(
        bus,
        groups_per_batch=GROUPS_PER_BATCH,
        advantages="grpo",
        device=device,
        max_policy_lag=MAX_POLICY_LAG,
        group_timeout=10.0,
        on_timeout="drop",
        prefetch=1,
    ) as handler:
        for step in range(1, steps + 1):
            batch = handler.next_batch(FIRST_BATCH_S)
            logprobs = token_logprobs(model, batch)
            handler.note_mismatch(logprob_mismatch(logprobs, batch))
            loss = policy_loss(logprobs, batch.logprobs, batch.advantages, batch.loss_mask)
            optimizer.zero_grad()
            loss.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with lock:
                for name, value in model.state_dict().items():
                    weights[name].copy_(value)
            handler.set_policy_version(step)
            handler.ack(batch)
            rewards.append(float(batch.scores.mean()))
            if step % 10 == 0 or step == steps:
                print(
                    f"step {step}: reward {np.mean(rewards[-10:]):.3f}, "
                    f"loss {loss.loss.item():.4f}, ratio {loss.mean_ratio.item():.3f}, "
                    f"|dlogp| {handler.metrics()['mismatch/mean']:.4f}",
                    flush=True,
                )
        ledger = handler.stats()
        print(f"{ledger.acknowledged} trajectories trained, balanced: {ledger.balanced}")
    return float(np.mean(rewards[:5])), float(np.mean(rewards[-10:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run both processes; return exit status 0 after a rise of the reward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=["llama", "qwen2", "qwen3"], default="llama")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    # A core for each process; such small matrices gain nothing from threads.
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    name = f"grpo-{os.getpid()}-{secrets.token_hex(3)}"
    model = build_model(options.model, build_tokenizer(), "sdpa")
    weights = {key: value.clone().share_memory_() for key, value in model.state_dict().items()}
    lock, stop = context.Lock(), context.Event()
    began = time.monotonic()
    with shmbus.Bus.create(name, "8MiB"):
        worker = context.Process(
            target=roll_out, args=(name, options.model, weights, lock, stop, 1), daemon=True
        )
        worker.start()
        try:
            first, last = train(name, options.model, weights, lock, options.steps, options.device)
        finally:
            stop.set()
            worker.join(30)
            if worker.is_alive():
                worker.kill()
                worker.join()
    print(f"reward {first:.3f} -> {last:.3f} in {time.monotonic() - began:.0f} s")
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
