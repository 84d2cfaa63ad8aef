"""Evaluation beside training, on the same bus and by the same workers.

    python examples/evaluation.py              # 20 seconds on two cores; --quick for less

Evaluation prompts are requested with ``split="eval"`` and a higher priority. The worker answers
them greedily; the bus needs no more help: ``requests.answer`` takes the split of the request. The
groups go to ``Consumer(bus, split="eval")``, beside the trainer's handler, and never into a batch;
a split owns its counters. Two consumers on a bus need the daemon, which the script starts.

Task: answer "repeat 7" with "7 7 7 7". The reward is the share of right digits.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import subprocess
import sys

import numpy as np
import torch

import shmbus
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import OnlineDataHandler
from trainer_adapter.losses import policy_loss

DIGITS, ANSWER_TOKENS, GROUP_SIZE, GROUPS_PER_BATCH, EVALUATE_EVERY = 10, 4, 8, 16, 5


def policy() -> torch.nn.Embedding:
    """Make the table: logits of the next digit, given its predecessor."""
    return torch.nn.Embedding(DIGITS, DIGITS, _weight=torch.zeros(DIGITS, DIGITS))


def work(bus: str) -> None:
    """Answer requests with the newest weights, until killed."""
    rng, version, table = np.random.default_rng(0), -1, policy()
    with shmbus.Producer(bus, wait=60.0) as producer, WeightSubscriber(bus) as weights:
        while (request := producer.requests.next()) is not None:
            if producer.policy_version != version:
                with weights.latest(timeout=60.0) as newest:
                    newest.load_into(table)
                    version = newest.version
            tokens, logprobs = request["prompt"].tolist(), [0.0]
            for _ in range(ANSWER_TOKENS):
                log_p = table.weight[tokens[-1]].log_softmax(-1).detach().numpy()
                noise = 0.0 if request.split == "eval" else rng.gumbel(size=DIGITS)
                tokens.append(int(np.argmax(log_p + noise)))
                logprobs.append(log_p[tokens[-1]])
            producer.requests.answer(
                request,
                score=np.mean(np.array(tokens[1:]) == tokens[0]),
                policy_version=version,
                tokens=tokens,
                logprobs=logprobs,
                loss_mask=[0] + [1] * ANSWER_TOKENS,
            )


def evaluate(handler: OnlineDataHandler, consumer: shmbus.Consumer, step: int) -> float:
    """Ask each prompt once; return the mean score."""
    for digit in range(DIGITS):
        prompt = np.array([digit], np.int32)
        name = f"eval-{step}-{digit}"
        handler.request(name, group_size=1, split="eval", priority=7, prompt=prompt)
    scores: list[float] = []
    while len(scores) < DIGITS:
        for group in consumer.take(timeout=60.0):
            with group:  # acknowledges
                scores += [trajectory.score for trajectory in group]
    return float(np.mean(scores))


def train(bus: str, steps: int) -> list[float]:
    """Train, and evaluate every few steps; return the evaluations' scores."""
    model, rng, evaluations = policy(), np.random.default_rng(1), []
    prompts = ({"prompt": rng.integers(DIGITS, size=1)} for _ in itertools.count())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    with (
        OnlineDataHandler(bus, groups_per_batch=GROUPS_PER_BATCH) as handler,
        shmbus.Consumer(bus, split="eval") as consumer,
        WeightPublisher(bus, ModuleSource(model)) as publisher,
    ):
        publisher.publish(version=0)
        handler.offer(prompts, ahead=2, group_size=GROUP_SIZE)
        for step in range(steps + 1):
            if step % EVALUATE_EVERY == 0:
                evaluations.append(evaluate(handler, consumer, step))
                print(f"step {step}: evaluation {evaluations[-1]:.2f}", flush=True)
            if step == 0:
                continue
            batch = handler.next_batch(60.0)
            assert not any(name.startswith("eval") for name in batch.instance_ids)
            picked = model(batch.tokens[:-1]).log_softmax(-1).gather(1, batch.tokens[1:, None])
            logprobs = torch.nn.functional.pad(picked[:, 0], (1, 0))
            loss = policy_loss(logprobs, batch.logprobs, batch.advantages, batch.loss_mask)
            optimizer.zero_grad()
            loss.loss.backward()
            optimizer.step()
            publisher.publish(version=step)
            handler.set_policy_version(step)
            handler.ack(batch)
            print(f"step {step}: reward {batch.scores.mean():.2f}", flush=True)
    return evaluations


def main() -> int:
    """Start daemon and worker, and train; return 0 after a rise of the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 20 if parser.parse_args().quick else 60
    bus = f"evaluation-{os.getpid()}-{secrets.token_hex(3)}"
    torch.set_num_threads(1)
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(bus,), daemon=True)
    serve = [sys.executable, "-m", "shmbus", "serve", bus, "--capacity", "16MiB"]
    daemon = subprocess.Popen(serve)
    try:
        worker.start()
        with shmbus.Producer(bus, wait=60.0):
            pass  # the bus exists
        evaluations = train(bus, steps)
    finally:
        worker.kill()
        worker.join()
        daemon.terminate()
        daemon.wait()
        shmbus.unlink(bus)
    print(f"evaluation {evaluations[0]:.2f} -> {evaluations[-1]:.2f}")
    return 0 if evaluations[-1] > evaluations[0] else 1


if __name__ == "__main__":
    sys.exit(main())
