"""Processor time of the trainer for each sample: TRL's own queue beside the bus, in one run.

    python -m bench.adapters.trl [SAMPLES] [TOKENS]

A process of its own puts samples; this one takes them as TRL's trainer does. Counted is this
process's processor time from the first sample to the last, with acknowledgements.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import numpy as np

import shmbus
from bench.adapters import GROUP_SIZE, numbers, report, sample_of

MICRO_BATCH = 16
#: As many samples of 2,048 tokens as TRL's queue holds by default: 1,024.
CAPACITY = "24MiB"


def put_on_bus(bus: str, samples: int, tokens: int) -> None:
    with shmbus.Producer(bus) as producer:
        given = sample_of(tokens)
        for number in range(samples):
            group, index = divmod(number, GROUP_SIZE)
            producer.put(f"g{group}", group_size=GROUP_SIZE, index=index, score=index % 2, **given)


def put_on_queue(queue: Any, samples: int, tokens: int) -> None:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    given = sample_of(tokens)
    for number in range(samples):
        queue.put(
            RolloutSample(
                prompt=[], completion=[], advantage=0.5, model_version=0, enqueued_at=time.time(),
                input_ids=given["tokens"].astype(np.int64),
                completion_mask=given["loss_mask"].astype(np.int64),
                old_log_probs=given["logprobs"], group_id=number // GROUP_SIZE,
                metrics={"reward": 1.0, "reward_std": 0.5},
            )
        )  # fmt: skip


def take(get: Any, samples: int, after_step: Any) -> float:
    """Take all; return the microseconds of processor time of one."""
    get(timeout=120.0)  # the other process has started
    taken = []
    began_s = time.process_time()
    for number in range(1, samples):
        taken.append(get(timeout=120.0))
        if number % MICRO_BATCH == 0:
            # As TRL's collator reads them.
            dict.fromkeys(key for sample in taken for key in sample.metrics)
            taken.clear()
        if number % (2 * MICRO_BATCH) == 0:
            after_step()
    return (time.process_time() - began_s) / (samples - 1) * 1e6


def by_queue(samples: int, tokens: int) -> float:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=1024)
    process = context.Process(target=put_on_queue, args=(queue, samples, tokens))
    process.start()
    try:
        return take(queue.get, samples, lambda: None)
    finally:
        process.join(30)


def by_bus(samples: int, tokens: int) -> float:
    from trainer_adapter.adapters.trl import ShmbusRolloutWorker

    name = f"trl-cost-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    with shmbus.Bus.create(name, capacity=CAPACITY):
        worker = ShmbusRolloutWorker(name, daemon=False)
        worker.start()
        process = context.Process(target=put_on_bus, args=(name, samples, tokens))
        process.start()
        # Without the trainer's callback: acknowledged by the versions that TRL tells.
        version = iter(range(1, 1 + samples))
        try:
            return take(
                worker.rollout_buffer.get,
                samples,
                lambda: worker.update_model_version(next(version)),
            )
        finally:
            worker.stop()
            process.kill()
            process.join()


def main() -> None:
    samples, tokens = numbers(8000, 2048)
    report(lambda _: by_queue(samples, tokens), lambda _: by_bus(samples, tokens))


if __name__ == "__main__":
    main()
