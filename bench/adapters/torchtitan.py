"""Processor time of the trainer for each sample: torchtitan's own way beside the bus, in one run.

    python -m bench.adapters.torchtitan [GROUPS] [TOKENS]

Own: the generator's completions come as pickled messages, as between Monarch's actors, and the
controller makes a TrainingSampleGroup of them by its TrainingSampleBuilder. A bus: another process
puts samples, and ShmbusBatches makes a TrainingSampleGroup of each group. What packs them is
torchtitan's batcher in both cases, and not counted.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torchtitan

import shmbus
from bench.adapters import (
    GROUP_SIZE,
    PROMPT_SHARE,
    numbers,
    put_group,
    report,
    sample_of,
)

CAPACITY = "24MiB"


def torchtitans() -> tuple[Any, Any, Any]:
    """Its builder, rollouts and types, without packages' ``__init__``, which import vLLM."""
    root = Path(str(torchtitan.__file__)).parent / "experiments" / "rl"
    for name in ("", ".components", ".rollout"):
        module = ModuleType(f"torchtitan.experiments.rl{name}")
        module.__path__ = [str(root / name.removeprefix("."))]
        sys.modules[module.__name__] = module
    renderers: Any = ModuleType("renderers")  # of messages, which none of this has
    renderers.Message = dict
    sys.modules.setdefault("renderers", renderers)
    rollouts = importlib.import_module("torchtitan.experiments.rl.rollout.types")
    package = sys.modules["torchtitan.experiments.rl.rollout"]
    for name in ("Rollout", "RolloutGroup"):
        setattr(package, name, getattr(rollouts, name))
    builder = importlib.import_module(
        "torchtitan.experiments.rl.components.training_sample_builder"
    )
    return builder, rollouts, importlib.import_module("torchtitan.experiments.rl.types")


def by_torchtitan(groups: int, tokens: int) -> float:
    """Return the microseconds of processor time of a sample."""
    module, rollouts, types = torchtitans()
    builder = module.TrainingSampleBuilder.Config().build()
    prompt = list(range(tokens // PROMPT_SHARE))
    sampled = tokens - len(prompt)
    message = pickle.dumps([
        types.Completion(
            min_policy_version=3, max_policy_version=3, request_id=f"r{index}",
            token_ids=list(range(sampled)), token_logprobs=[-0.25 - index] * sampled,
        )
        for index in range(GROUP_SIZE)
    ])  # fmt: skip
    began_s = time.process_time()
    for number in range(groups):
        made = []
        for index, completion in enumerate(pickle.loads(message)):
            turn = rollouts.RolloutTurn(
                rollout_id=types.RolloutTurnID(group_id=number, rollout_id=index, turn_id=0),
                prompt_token_ids=prompt, completion_token_ids=completion.token_ids,
                completion_logprobs=completion.token_logprobs,
                min_policy_version=completion.min_policy_version,
                max_policy_version=completion.max_policy_version,
            )  # fmt: skip
            made.append(
                rollouts.Rollout(
                    group_id=number, rollout_id=index, turns=[turn],
                    status=rollouts.RolloutStatus.COMPLETED, reward=float(index % 2),
                    advantage=index % 2 - 0.5,
                )
            )  # fmt: skip
        group = rollouts.RolloutGroup(group_id=number, rollouts=made)
        assert len(builder.build_from_group(rollout_group=group).training_samples) == GROUP_SIZE
    return (time.process_time() - began_s) / (groups * GROUP_SIZE) * 1e6


def put(bus: str, groups: int, tokens: int) -> None:
    fields = sample_of(tokens)
    with shmbus.Producer(bus) as producer:
        for number in range(groups):
            put_group(producer, f"g{number}", fields)


class EachGroup:
    """A batcher whose batches are the groups."""

    def add_training_samples(self, *, training_sample_group: Any) -> Any:
        return training_sample_group


def by_bus(groups: int, tokens: int) -> float:
    """The same over a bus."""
    from trainer_adapter.adapters.torchtitan import ShmbusBatches

    torchtitans()
    name = f"titan-cost-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    with shmbus.Bus.create(name, capacity=CAPACITY):
        batches = ShmbusBatches(name, EachGroup(), daemon=False)
        process = context.Process(target=put, args=(name, groups + 1, tokens))
        process.start()
        batches.next(timeout=120.0)  # the other process has started
        began_s = time.process_time()
        for _ in range(groups):
            assert len(batches.next(timeout=120.0).training_samples) == GROUP_SIZE
            batches.ack()
        spent_s = time.process_time() - began_s
        batches.close()
        process.join(30)
    return spent_s / (groups * GROUP_SIZE) * 1e6


def main() -> None:
    groups, tokens = numbers(300, 2048)
    report(lambda _: by_torchtitan(groups, tokens), lambda _: by_bus(groups, tokens))


if __name__ == "__main__":
    main()
