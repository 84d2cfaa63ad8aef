"""Replay of top-k sampling: the policy is the softmax over the ids eligible at each token.

    python examples/sampling_masks.py             # a second

Without masks the trainer's probabilities cover the whole vocabulary, and ratios are wrong before
the first step. With masks every ratio is 1.
"""

from __future__ import annotations

import argparse
import os
import secrets

import numpy as np
import torch

import shmbus
from trainer_adapter import OnlineDataHandler
from trainer_adapter.logprobs import token_logprobs
from trainer_adapter.losses import policy_loss

VOCABULARY, TOP_K, LENGTH, GROUP_SIZE = 50, 5, 32, 8


def policy() -> torch.Tensor:
    """Logits of the next token, by its predecessor."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2


def put_group(producer: shmbus.Producer, rng: np.random.Generator) -> None:
    """Sample a group by top-k, and put the eligible ids with each token; the prompt is a token."""
    logits, samples = policy().numpy(), []
    for _ in range(GROUP_SIZE):
        tokens, logprobs, allowed = [int(rng.integers(VOCABULARY))], [0.0], []
        for _ in range(LENGTH):
            row = logits[tokens[-1]]
            ids = np.argsort(row)[-TOP_K:]
            kept = row[ids] - np.logaddexp.reduce(row[ids])
            at = rng.choice(TOP_K, p=np.exp(kept) / np.exp(kept).sum())
            allowed.append(ids)
            tokens.append(int(ids[at]))
            logprobs.append(float(kept[at]))
        sample = {
            "tokens": tokens,
            "logprobs": logprobs,
            "loss_mask": [0] + [1] * LENGTH,
            "support": np.concatenate(allowed).astype(np.int32),
            "support_counts": np.array([0] + [TOP_K] * LENGTH, np.int32),
        }
        samples.append({**sample, "score": float(np.mean(tokens))})
    producer.put_group("q", samples)


def main() -> None:
    """Compare the ratios of new over old probability, under the sampling weights."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="accepted as in other examples; changes nothing"
    )
    parser.parse_args()
    bus = f"masks-{os.getpid()}-{secrets.token_hex(3)}"
    with (
        shmbus.Bus.create(bus, "16MiB"),
        shmbus.Producer(bus) as producer,
        OnlineDataHandler(bus, groups_per_batch=1, extra_fields={"support": "support"}) as handler,
    ):
        put_group(producer, np.random.default_rng(0))
        batch = handler.next_batch(10.0)
        logits = policy()[batch.tokens]
        ratios = []
        for support in ("support", None):
            logprobs = token_logprobs(logits, batch, support=support)
            loss = policy_loss(logprobs, batch.logprobs, batch.advantages, batch.loss_mask)
            ratios.append(float(loss.mean_ratio))
        handler.ack(batch)
    print(f"mean ratio {ratios[0]:.2f} with the masks, {ratios[1]:.2f} without")


if __name__ == "__main__":
    main()
