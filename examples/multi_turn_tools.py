"""Rollouts of several turns with a tool; the tool's tokens stay untrained.

    python examples/multi_turn_tools.py        # 25 seconds on two cores; --quick for less

A sample is a row of tokens: the prompt, then the policy's turns and the tool's answers in order.
``loss_mask`` is 1 at the policy's tokens and 0 at the prompt's and the tool's; logprobs there are
0: the trainer neither trains on a tool's words nor takes their ratio. A cut conversation carries
``finish_reason="length"``, and ``truncated="mask"`` keeps its tokens out of the loss, while its
score still counts for its group.

Task: name a number known to the tool alone. The policy, a table, may call the tool or guess, and
learns both to call the tool and to repeat the answer.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import sys

import numpy as np
import torch

import shmbus
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import OnlineDataHandler
from trainer_adapter.losses import policy_loss

DIGITS, CALL, QUESTION, VOCABULARY = 10, 10, 11, 12
MAX_TURNS, GROUP_SIZE, GROUPS_PER_BATCH = 4, 8, 16
SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}


def policy() -> torch.nn.Embedding:
    """Make the table: logits of the next token, given its predecessor."""
    return torch.nn.Embedding(VOCABULARY, VOCABULARY, _weight=torch.zeros(VOCABULARY, VOCABULARY))


class Conversation:
    """Tokens of policy and tool, with the mask of the policy's."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens, self.logprobs, self.loss_mask = list(prompt), [0.0], [0]

    def add(self, token: int, logprob: float | None = None) -> None:
        """Append a token; a tool's token comes without a logprob."""
        self.tokens.append(token)
        self.logprobs.append(logprob or 0.0)
        self.loss_mask.append(int(logprob is not None))


def converse(table: np.ndarray, secret: int, rng: np.random.Generator) -> tuple[Conversation, str]:
    """Let the policy speak until a number comes, and the tool after a call."""
    said = Conversation([QUESTION])
    for _ in range(MAX_TURNS):
        logits = table[said.tokens[-1]]
        logprobs = logits - np.log(np.exp(logits).sum())
        token = int(np.argmax(logprobs + rng.gumbel(size=VOCABULARY)))
        said.add(token, float(logprobs[token]))
        if token < DIGITS:
            return said, "stop"
        if token == CALL:
            said.add(secret)
    return said, "length"


def work(bus: str, seed: int) -> None:
    """Answer requests with the newest weights, until killed."""
    rng, version, table = np.random.default_rng(seed), -1, policy()
    with shmbus.Producer(bus, wait=60.0) as producer, WeightSubscriber(bus) as weights:
        while (request := producer.requests.next()) is not None:
            if producer.policy_version != version:
                with weights.latest(timeout=60.0) as newest:
                    newest.load_into(table)
                    version = newest.version
            said, why = converse(table.weight.detach().numpy(), request.meta["secret"], rng)
            producer.requests.answer(
                request,
                score=float(why == "stop" and said.tokens[-1] == request.meta["secret"]),
                policy_version=version,
                meta={"finish_reason": why, "calls": said.tokens.count(CALL)},
                tokens=said.tokens,
                logprobs=said.logprobs,
                loss_mask=said.loss_mask,
            )


def train(bus: str, steps: int) -> list[float]:
    """Request prompts a batch ahead, and train."""
    model, rewards, rng = policy(), [], np.random.default_rng(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    prompts = ({"secret": int(rng.integers(DIGITS))} for _ in itertools.count())
    with (
        WeightPublisher(bus, ModuleSource(model)) as publisher,
        OnlineDataHandler(
            bus, groups_per_batch=GROUPS_PER_BATCH, truncated="mask", extra_fields={"calls": "meta"}
        ) as handler,
    ):
        publisher.publish(version=0)
        handler.offer(prompts, ahead=2, group_size=GROUP_SIZE)
        for step in range(1, steps + 1):
            batch = handler.next_batch(60.0)
            picked = model(batch.tokens[:-1]).log_softmax(-1).gather(1, batch.tokens[1:, None])
            logprobs = torch.nn.functional.pad(picked[:, 0], (1, 0))
            optimizer.zero_grad()
            loss = policy_loss(logprobs, batch.logprobs, batch.advantages, batch.loss_mask)
            loss.loss.backward()
            optimizer.step()
            publisher.publish(version=step)
            handler.set_policy_version(step)
            handler.ack(batch)
            rewards.append(float(batch.scores.mean()))
            calls = np.mean(batch.extra["calls"])
            print(f"step {step}: reward {rewards[-1]:.2f}, calls {calls:.2f}", flush=True)
    return rewards


def main() -> int:
    """Run a worker's process and the trainer; return 0 after a rise of the reward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 20 if parser.parse_args().quick else 60
    bus = f"tools-{os.getpid()}-{secrets.token_hex(3)}"
    torch.set_num_threads(1)
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(bus, 0), daemon=True)
    with shmbus.Bus.create(bus, "16MiB", schema=SCHEMA):
        worker.start()
        try:
            rewards = train(bus, steps)
        finally:
            worker.kill()
            worker.join()
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    print(f"reward {first:.2f} -> {last:.2f}")
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
