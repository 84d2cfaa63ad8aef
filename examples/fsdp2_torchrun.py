"""Two ranks under torchrun with FSDP2, each with its shard of every step, from the same daemon.

    python examples/fsdp2_torchrun.py          # twenty seconds on two CPU cores; --quick for less

The script starts a job's parts: ``shmbus serve``, a rollout worker, and ``torchrun`` on itself.
`OnlineDataHandler` with ``rank`` and ``world_size`` gets disjoint shards, balanced by tokens;
rank 0 requests the prompts. Each rank's `WeightPublisher` writes its own shards of the weights
without a gather, and the worker reads whole versions. Tokens of every rank divide the loss, since
FSDP averages gradients over the ranks.

On GPUs: backend "nccl", ``device="cuda"``, and your model in place of the table.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import subprocess
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shmbus
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import Batch, OnlineDataHandler
from trainer_adapter.losses import policy_loss

DIGITS, ANSWER_TOKENS, GROUP_SIZE, GROUPS_PER_STEP, WORLD_SIZE = 10, 4, 8, 16, 2


def policy() -> torch.nn.Module:
    """Make the policy: logits of the next digit, given its predecessor."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(DIGITS, 32), torch.nn.Tanh(), torch.nn.Linear(32, DIGITS)
    )


def work(bus: str) -> None:
    """Answer "repeat 7" with the newest weights, until killed."""
    rng, version, model = np.random.default_rng(0), -1, policy()
    with shmbus.Producer(bus, wait=60.0) as producer, WeightSubscriber(bus) as weights:
        while (request := producer.requests.next()) is not None:
            if producer.policy_version != version:
                with weights.latest(timeout=60.0) as newest:
                    newest.load_into(model)
                    version = newest.version
            tokens, logprobs = request["prompt"].tolist(), [0.0]
            for _ in range(ANSWER_TOKENS):
                with torch.no_grad():
                    log_p = model(torch.tensor(tokens[-1])).log_softmax(-1).numpy()
                tokens.append(int(np.argmax(log_p + rng.gumbel(size=DIGITS))))
                logprobs.append(log_p[tokens[-1]])
            producer.requests.answer(
                request,
                score=np.mean(np.array(tokens[1:]) == tokens[0]),
                policy_version=version,
                tokens=tokens,
                logprobs=logprobs,
                loss_mask=[0] + [1] * ANSWER_TOKENS,
            )


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss; each token predicts the next."""
    picked = model(batch.tokens[:-1]).log_softmax(-1).gather(1, batch.tokens[1:, None])[:, 0]
    trained = batch.loss_mask.sum().float()
    dist.all_reduce(trained)
    return policy_loss(
        torch.nn.functional.pad(picked, (1, 0)),
        batch.logprobs,
        batch.advantages,
        batch.loss_mask,
        denominator=trained / WORLD_SIZE,
    ).loss


def train(bus: str, steps: int) -> None:
    """Train as a rank of torchrun."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
    model = fully_shard(policy(), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rng = np.random.default_rng(1)
    prompts = ({"prompt": rng.integers(DIGITS, size=1)} for _ in itertools.count())
    rewards = []
    with (
        WeightPublisher(bus, ModuleSource(model), rank=rank, world_size=WORLD_SIZE) as publisher,
        OnlineDataHandler(
            bus, groups_per_batch=GROUPS_PER_STEP // WORLD_SIZE, rank=rank, world_size=WORLD_SIZE
        ) as handler,
    ):
        publisher.publish(version=0)
        handler.offer(prompts, ahead=2, group_size=GROUP_SIZE)  # only rank 0 offers
        for step in range(1, steps + 1):
            batch = handler.next_batch(60.0)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            publisher.publish(version=step)
            handler.set_policy_version(step)
            handler.ack(batch)
            reward = batch.scores.mean() / WORLD_SIZE
            dist.all_reduce(reward)
            rewards.append(float(reward))
            if rank == 0:
                print(f"step {step}: reward {rewards[-1]:.2f}", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        print(f"reward {np.mean(rewards[:3]):.2f} -> {np.mean(rewards[-3:]):.2f}")


def main() -> int:
    """Start daemon, worker and ranks; return torchrun's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--role", choices=["worker", "rank"], help="used by the script itself")
    parser.add_argument("--bus", default=f"fsdp2-{os.getpid()}-{secrets.token_hex(3)}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role == "worker":
        work(options.bus)
    if options.role == "rank":
        train(options.bus, 12 if options.quick else 60)
        # FSDP keeps gloo's threads past destroy_process_group. A thread with a tensor in hand
        # aborts the process during Python's teardown (pytorch/pytorch#179291).
        sys.stdout.flush()
        os._exit(0)
    again = [__file__, "--bus", options.bus, *(["--quick"] if options.quick else [])]
    python = [sys.executable, "-m"]
    torchrun = [*python, "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}"]
    daemon = subprocess.Popen([*python, "shmbus", "serve", options.bus, "--capacity", "16MiB"])
    worker = subprocess.Popen([sys.executable, *again, "--role", "worker"])
    try:
        return subprocess.run([*torchrun, *again, "--role", "rank"]).returncode
    finally:
        worker.kill()
        worker.wait()
        daemon.terminate()
        daemon.wait()
        shmbus.unlink(options.bus)


if __name__ == "__main__":
    sys.exit(main())
