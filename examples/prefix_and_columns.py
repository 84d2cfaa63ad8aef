"""Compute a group's shared prompt once, and add the reference's logprobs from a second process.

    python examples/prefix_and_columns.py         # needs transformers; --quick for less

The annotator holds the reference model. The trainer's batches wait for its column.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import shmbus
from trainer_adapter import OnlineDataHandler
from trainer_adapter.attention import register_with_transformers, transformers_inputs
from trainer_adapter.logprobs import logit_rows, token_logprobs
from trainer_adapter.losses import aggregate_loss, kl_estimate, policy_loss

VOCABULARY, PROMPT, ANSWER, GROUP_SIZE, GROUPS = 64, 256, 12, 8, 4
REFERENCE = {"ref_logprobs": "float32"}
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def build() -> torch.nn.Module:
    """Make a tiny model of a stock architecture."""
    torch.manual_seed(0)
    attention = register_with_transformers()
    return AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE), attn_implementation=attention)


def put(bus: str, groups: int) -> None:
    """Put groups of random answers to a prompt; the reward is the share of even tokens."""
    rng = np.random.default_rng(0)
    mask = np.arange(PROMPT + ANSWER) >= PROMPT
    common = {"loss_mask": mask, "logprobs": np.where(mask, -np.log(VOCABULARY), 0)}
    with shmbus.Producer(bus) as producer:
        for number in range(groups):
            tokens = rng.integers(0, VOCABULARY, (GROUP_SIZE, PROMPT + ANSWER), np.int32)
            tokens[:, :PROMPT] = tokens[0, :PROMPT]
            samples = [{"tokens": t, "score": np.mean(t[PROMPT:] % 2), **common} for t in tokens]
            producer.put_group(f"q{number}", samples)


@torch.no_grad()
def annotate(bus: str) -> None:
    """Write the reference's logprob of each token, until killed."""
    reference = build()
    with shmbus.Annotator(bus, writes=REFERENCE) as annotator:
        for group in annotator:
            tokens = torch.from_numpy(np.stack([one["tokens"] for one in group])).long()
            logits = reference(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
            found = logits.gather(2, tokens[:, 1:, None]).squeeze(2)
            group.write(ref_logprobs=[*torch.nn.functional.pad(found, (1, 0)).numpy()])


def train(bus: str, steps: int) -> None:
    """Train on the finished batches."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"groups_per_batch": GROUPS, "layout": "prefix"}
    with (
        shmbus.Columns(bus, REFERENCE, timeout=120) as columns,
        OnlineDataHandler(bus, annotate_group=columns, **options) as handler,
    ):
        for _ in range(steps):
            batch = handler.next_batch(120)
            rows = logit_rows(batch)
            logits = model(**transformers_inputs(batch), logits_to_keep=rows).logits[0]
            new = token_logprobs(logits, batch, rows=rows)
            loss = policy_loss(new, batch.logprobs, batch.advantages, batch.loss_mask).loss
            kl = kl_estimate(new, batch.extra["ref_logprobs"], batch.loss_mask)
            optimizer.zero_grad()
            (loss + 0.01 * aggregate_loss(kl, batch.loss_mask)).backward()
            optimizer.step()
            handler.ack(batch)
    print(f"{batch.prefix_tree.num_rows} rows for {batch.num_tokens} tokens")


def main() -> None:
    """Start the annotator, put groups, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 steps instead of 10")
    steps = 2 if parser.parse_args().quick else 10
    name = f"prefix-{os.getpid()}-{secrets.token_hex(3)}"
    annotator = multiprocessing.get_context("spawn").Process(target=annotate, args=(name,))
    with shmbus.Bus.create(name, "64MiB"):
        put(name, steps * GROUPS)
        annotator.start()
        try:
            train(name, steps)
        finally:
            annotator.kill()
            annotator.join()
            shmbus.unlink(f"{name}.columns.ref_logprobs")


if __name__ == "__main__":
    main()
