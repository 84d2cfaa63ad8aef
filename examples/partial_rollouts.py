"""Rollouts continued by a second worker, each token with the version of its weights.

    python examples/partial_rollouts.py           # a second; --quick for less

At a weight update a worker gives a long rollout back with the tokens so far. The next worker
samples the rest with the newer weights. The trainer sees the span of versions.
"""

from __future__ import annotations

import argparse
import os
import secrets
from typing import Any

import numpy as np

import shmbus

PROMPT = np.array([1, 2, 3, 4], np.int32)


def begin(request: shmbus.Request) -> dict[str, Any]:
    """Return a rollout's tokens so far: the prompt, or an earlier worker's part."""
    prompt = request["prompt"]
    return request.so_far or {
        "tokens": prompt,
        "loss_mask": np.zeros(len(prompt), np.uint8),
        "logprobs": np.zeros(len(prompt), np.float32),
        "token_versions": np.zeros(len(prompt), np.int64),
    }


def sample(so_far: dict[str, Any], version: int, rng: np.random.Generator) -> dict[str, Any]:
    """Sample the next token; an engine samples chunks."""
    more = {"tokens": rng.integers(10), "loss_mask": 1, "logprobs": -2.3, "token_versions": version}
    return {
        name: np.append(known, np.asarray(more[name], known.dtype))
        for name, known in so_far.items()
    }


def work(producer: shmbus.Producer, rng: np.random.Generator) -> int:
    """Make a sample, or give the rollout back at an update of the weights; return the returns."""
    request = producer.requests.next(timeout=1.0)
    if request is None:
        return 0
    rollout, version = begin(request), producer.policy_version
    while len(rollout["tokens"]) < 24:
        rollout = sample(rollout, version, rng)
        if rng.random() < 0.05:  # the trainer wants to load new weights
            return int(producer.requests.release(request, rollout, max_lag=64))
    producer.requests.answer(request, score=1.0, **rollout)
    return 0


def main() -> None:
    """Have two workers share the rollouts of a few groups."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer groups")
    groups = 5 if parser.parse_args().quick else 50
    bus = f"partial-{os.getpid()}-{secrets.token_hex(3)}"
    rng, released, spans, taken = np.random.default_rng(0), 0, [], 0
    with (
        shmbus.Bus.create(bus, "16MiB"),
        shmbus.Consumer(bus) as consumer,
        shmbus.Producer(bus) as one,
        shmbus.Producer(bus) as other,
    ):
        for number in range(groups):
            consumer.request(f"q{number}", group_size=4, prompt=PROMPT)
        while taken < groups:
            for worker in (one, other):
                released += work(worker, rng)
            consumer.policy_version += 1
            for group in consumer.take(timeout=0):
                spans += [t.newest_policy_version - t.policy_version for t in group]
                taken += 1
                group.ack()
    went_on = sum(span > 0 for span in spans)
    print(f"{len(spans)} samples, {released} releases, {went_on} of more than one version")


if __name__ == "__main__":
    main()
