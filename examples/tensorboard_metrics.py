"""Curves of a run in TensorBoard, from ``handler.metrics()``.

    pip install 'shmbus[train]' tensorboard
    python examples/tensorboard_metrics.py --logdir runs     # then: tensorboard --logdir runs

``handler.metrics()`` is a flat dict of floats since the last call: rewards, lag, lengths, waiting
and packing times, drops by reason, and fill of the bus. wandb takes the same dict
(wandb_offline.py), as does mlflow, for instance with a file store:

    mlflow.log_metrics(handler.metrics(), step=batch.step)

No model here: a worker answers with random tokens, and its scores rise by themselves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import sys

import numpy as np

import shmbus
from trainer_adapter import OnlineDataHandler

GROUP_SIZE, GROUPS_PER_BATCH = 8, 8


def work(bus: str) -> None:
    """Answer requests with random tokens, until killed; a tenth of the samples is cut off."""
    rng = np.random.default_rng(0)
    with shmbus.Producer(bus, wait=60.0) as producer:
        while (request := producer.requests.next()) is not None:
            tokens = rng.integers(1000, size=rng.integers(8, 64), dtype=np.int32)
            version = producer.policy_version
            producer.requests.answer(
                request,
                score=rng.normal(version / 10),
                policy_version=version,
                meta={"finish_reason": "length" if rng.random() < 0.1 else "stop"},
                tokens=tokens,
                logprobs=np.zeros(len(tokens), np.float32),
            )


def train(bus: str, logdir: str, steps: int) -> None:
    """Take batches, and write the metrics of each."""
    from torch.utils.tensorboard import SummaryWriter

    with (
        SummaryWriter(logdir) as writer,
        OnlineDataHandler(bus, groups_per_batch=GROUPS_PER_BATCH) as handler,
    ):
        handler.offer([{}] * (steps * GROUPS_PER_BATCH), group_size=GROUP_SIZE)
        for batch in handler:
            # Place of the training step.
            handler.set_policy_version(handler.step)
            handler.ack(batch)
            for name, value in handler.metrics("rollout/").items():
                writer.add_scalar(name, value, handler.step)
        print(handler.progress.line)


def show(logdir: str) -> int:
    """Read the written curves; return their count."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logdir)
    events.Reload()
    curves = events.Tags()["scalars"]
    for name in sorted(curves):
        values = [event.value for event in events.Scalars(name)]
        print(f"{name:32} {len(values):4} points  {values[0]:12.4g} -> {values[-1]:.4g}")
    print(f"{len(curves)} curves in {logdir}")
    return len(curves)


def main() -> int:
    """Run a worker's process and the trainer; return 0 for at least a curve."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--logdir", default="runs", help="where to write")
    options = parser.parse_args()
    bus = f"metrics-{os.getpid()}-{secrets.token_hex(3)}"
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(bus,), daemon=True)
    with shmbus.Bus.create(bus, "16MiB"):
        worker.start()
        try:
            train(bus, options.logdir, 10 if options.quick else 100)
        finally:
            worker.kill()
            worker.join()
    return 0 if show(options.logdir) else 1


if __name__ == "__main__":
    sys.exit(main())
