"""What a bound on how far workers are ahead does to staleness and to learning.

``python -m bench.lead --output FILE.json``: a trainer and two workers of the demo's task, once for
each bound. The workers sample whole groups as fast as they may, the trainer takes equal batches of
16 groups, equal in number for every bound, and drops what is more than 4 versions old. A step takes
at least so long as `--step-s` says, as that of a real trainer does; so the workers are the faster
ones, and the bus is what holds them.

Stale is the share of all samples that were dropped for their age, lag is that of the trained ones
in versions, the reward is that of held-out prompts after the last step.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

import shmbus
from bench import command
from bench.failures import MeasurementError
from bench.fitness import TWO, Need
from bench.needs_torch import torch
from bench.processes import Role, Started, start_role
from bench.sending import bus_bytes
from trainer_adapter import Batch, OnlineDataHandler
from trainer_adapter.demo.evaluate import evaluate
from trainer_adapter.demo.learner import Learner
from trainer_adapter.demo.policy import Policy
from trainer_adapter.demo.sampler import PolicyConfig, Sampler
from trainer_adapter.demo.task import SortTask, reward
from trainer_adapter.demo.weights import WeightsChannel

__all__ = ["BOUNDS", "Result", "main", "measure"]

CAPACITY: Final = "16MiB"
GROUPS_PER_BATCH: Final = 16
GROUP_SIZE: Final = 8
MAX_POLICY_LAG: Final = 4
WORKERS: Final = 2
#: Prompts that a worker samples at once.
PROMPTS_AT_ONCE: Final = 4
HELD_OUT_PROMPTS: Final = 256
#: Seconds until a batch must be there, on a busy machine too.
BATCH_S: Final = 120.0
#: Seconds of waiting for a batch after which the workers are looked at.
WORKERS_S: Final = 2.0
#: Seconds between two looks of a worker that may begin no group.
LOOK_S: Final = 0.002

#: The bounds by their names in the table, as arguments of ``Bus.create``.
BOUNDS: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "max_lead=32": {"max_lead": 32},
    "max_lead=8": {"max_lead": 8},
    "max_lead=2": {"max_lead": 2},
    "max_lead_versions=2": {"max_lead_versions": 2},
    "max_lead_versions=1": {"max_lead_versions": 1},
    "max_lead_versions=0": {"max_lead_versions": 0},
}


class Result(msgspec.Struct, frozen=True):
    """One run.

    Attributes
    ----------
    bound : str
        As the table names it.
    steps, committed, stale : int
        Steps of the trainer; samples that were put; those that were dropped for their age.
    stale_share, mean_lag, seconds, reward_start, reward_end : float
    """

    bound: str
    steps: int
    committed: int
    stale: int
    stale_share: float
    mean_lag: float
    seconds: float
    reward_start: float
    reward_end: float


def measure(bound: str, *, steps: int, step_s: float, seed: int) -> Result:
    """Train so many steps under one bound.

    Parameters
    ----------
    bound : str
        A key of `BOUNDS`.
    steps : int
    step_s : float
        Seconds that a step takes at least.
    seed : int

    Returns
    -------
    Result
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    name = f"lead-{os.getpid()}-{secrets.token_hex(3)}"
    shape = PolicyConfig()
    learner = Learner(Policy(shape, seed=seed))
    workers: list[Started] = []
    with shmbus.Bus.create(name, CAPACITY, max_producers=WORKERS + 2, **BOUNDS[bound]):
        channel = WeightsChannel(name, shape.num_parameters, create=True)
        channel.publish(learner.policy.export_weights(), 0)
        try:
            for number in range(WORKERS):
                workers.append(start_role(Role(_work, (name, seed, number))))
            return _train(name, bound, channel, learner, steps, step_s, workers)
        finally:
            for worker in workers:
                worker.end()
            channel.close()


def _train(
    name: str,
    bound: str,
    channel: WeightsChannel,
    learner: Learner,
    steps: int,
    step_s: float,
    workers: Sequence[Started],
) -> Result:
    before = _held_out(learner)
    lags: list[float] = []
    with OnlineDataHandler(
        name, groups_per_batch=GROUPS_PER_BATCH, max_policy_lag=MAX_POLICY_LAG
    ) as handler:
        began_s = time.monotonic()
        for step in range(1, steps + 1):
            due_s = time.monotonic() + step_s
            batch = _next_batch(handler, workers)
            lags.append(step - 1 - float(batch.policy_versions.double().mean()))
            learner.step(batch)
            time.sleep(max(0.0, due_s - time.monotonic()))
            channel.publish(learner.policy.export_weights(), step)
            handler.set_policy_version(step)
            handler.ack(batch)
        seconds = time.monotonic() - began_s
        ledger = handler.stats()
    stale = ledger.dropped.get("stale", 0)
    return Result(
        bound=bound,
        steps=steps,
        committed=ledger.committed,
        stale=stale,
        stale_share=stale / ledger.committed,
        mean_lag=float(np.mean(lags)),
        seconds=seconds,
        reward_start=before,
        reward_end=_held_out(learner),
    )


def _next_batch(handler: OnlineDataHandler, workers: Sequence[Started]) -> Batch:
    """Wait for a batch as long as all workers run."""
    deadline = time.monotonic() + BATCH_S
    while True:
        try:
            return handler.next_batch(timeout=WORKERS_S)
        except TimeoutError:
            for number, worker in enumerate(workers):
                if how := worker.ended():
                    raise MeasurementError(f"worker {number} failed: {how}") from None
            if time.monotonic() > deadline:
                raise


def _held_out(learner: Learner) -> float:
    task, sampler = SortTask(), Sampler(PolicyConfig())
    sampler.load(learner.policy.export_weights())
    prompts = task.held_out_prompts(HELD_OUT_PROMPTS)
    return evaluate(sampler, task, prompts, np.random.default_rng(1)).mean_reward


def _work(name: str, seed: int, number: int) -> None:
    """Sample whole groups as fast as the bus lets them begin."""
    task, shape = SortTask(), PolicyConfig()
    sampler = Sampler(shape)
    rng = np.random.default_rng((seed, number))
    weights = WeightsChannel(name, shape.num_parameters)
    version, made = -1, 0
    with shmbus.Producer(name, label=f"worker {number}") as producer:
        while True:
            while producer.pressure() >= 1:
                time.sleep(LOOK_S)
            newest = producer.policy_version
            loaded = weights.read(newest) if newest != version else None
            if loaded is not None:
                sampler.load(loaded)
                version = newest
            if version < 0:
                continue
            prompts = [task.sample_prompt(rng) for _ in range(PROMPTS_AT_ONCE)]
            groups = sampler.sample(prompts, GROUP_SIZE, task.max_completion_len, rng)
            for prompt, group in zip(prompts, groups, strict=True):
                made += 1
                producer.put_group(
                    f"{number}-{made}",
                    [{"score": reward(prompt, s.completion), **s.fields()} for s in group],
                    policy_version=version,
                )


def table(results: Sequence[Result]) -> str:
    """Return the table of the documentation.

    Parameters
    ----------
    results : sequence of Result

    Returns
    -------
    str
        Markdown.
    """
    lines = ["| bound | stale | lag | reward | samples put |", "|---|---|---|---|---|"]
    lines += [
        f"| `{each.bound}` | {each.stale_share:.0%} | {each.mean_lag:.2f} | "
        f"{each.reward_end:.3f} | {each.committed:,} |"
        for each in results
    ]
    return "\n".join(lines)


@command.orderly("lead")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every bound, print the table, write what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.lead", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--steps", type=command.at_least_one, default=150, help="of the trainer (default 150)"
    )
    parser.add_argument(
        "--step-s",
        type=command.pause,
        default=0.25,
        help="seconds a step takes at least (default 0.25)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=list(BOUNDS), help="may be repeated")
    parser.add_argument("--output", type=command.file, help="where the JSON goes")
    arguments = parser.parse_args(argv)
    # Where the workers share the trainer's core, its steps hold them, and not the bus.
    if command.refused(Need(processors=TWO, shm_bytes=bus_bytes(CAPACITY)), "lead"):
        return 1
    results = []
    for bound in arguments.only or BOUNDS:
        results.append(
            measure(bound, steps=arguments.steps, step_s=arguments.step_s, seed=arguments.seed)
        )
        print(results[-1], file=sys.stderr, flush=True)
    print(table(results))
    found: dict[str, Any] = {
        "steps": arguments.steps,
        "step_s": arguments.step_s,
        "seed": arguments.seed,
        "runs": [msgspec.to_builtins(each) for each in results],
    }
    return command.keep(arguments.output, found, "lead")


if __name__ == "__main__":
    sys.exit(main())
