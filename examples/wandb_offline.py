"""Curves and a table of samples of a run in wandb, without its servers.

    pip install 'shmbus[train]' wandb
    WANDB_MODE=offline python examples/wandb_offline.py      # later: wandb sync wandb/offline-run-*

``handler.metrics()`` goes unchanged into ``run.log``; prefixes group the names. The script shows a
group of each batch as text, with rewards and samples: look at samples, not only at curves. In a
notebook the same code runs cell after cell.

No model here: a worker answers with random letters, and its scores rise by themselves.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import string
import sys
from pathlib import Path
from typing import Any

import numpy as np

import shmbus
from trainer_adapter import Batch, OnlineDataHandler

GROUP_SIZE, GROUPS_PER_BATCH = 8, 8
LETTERS = np.array(list(string.ascii_lowercase))


def work(bus: str) -> None:
    """Answer requests with random letters, until killed; a tenth of the samples is cut off."""
    rng = np.random.default_rng(0)
    with shmbus.Producer(bus, wait=60.0) as producer:
        while (request := producer.requests.next()) is not None:
            tokens = rng.integers(len(LETTERS), size=rng.integers(8, 32), dtype=np.int32)
            version = producer.policy_version
            producer.requests.answer(
                request,
                score=rng.normal(version / 10),
                policy_version=version,
                meta={"finish_reason": "length" if rng.random() < 0.1 else "stop"},
                tokens=tokens,
                logprobs=np.zeros(len(tokens), np.float32),
            )


def rows_of(batch: Batch) -> list[list[Any]]:
    """Return rows of a batch's first group: prompt, and reward and text of each sample."""
    group = batch.groups[0]
    return [
        [batch.step, group.instance_id, t.index, t.score, "".join(LETTERS[t["tokens"]])]
        for t in group
    ]


def train(bus: str, directory: str, steps: int) -> Path:
    """Take batches, and log the metrics of each; return the folder of the run."""
    import wandb

    shown: list[list[Any]] = []
    config = {"group_size": GROUP_SIZE, "groups_per_batch": GROUPS_PER_BATCH}
    with (
        wandb.init(project="shmbus", dir=directory, config=config) as run,
        OnlineDataHandler(bus, groups_per_batch=GROUPS_PER_BATCH) as handler,
    ):
        handler.offer([{}] * (steps * GROUPS_PER_BATCH), group_size=GROUP_SIZE)
        for batch in handler:
            # Place of the training step.
            shown += rows_of(batch)
            handler.set_policy_version(handler.step)
            handler.ack(batch)
            run.log(handler.metrics(), step=handler.step)
        columns = ["step", "prompt", "index", "reward", "text"]
        run.log({"samples": wandb.Table(columns=columns, data=shown)})
        print(f"{len(run.summary.keys())} curves, {len(shown)} samples")
        return Path(run.dir).parent


def main() -> int:
    """Run a worker's process and the trainer; return 0 for a written run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--directory", default=".", help="where wandb makes its folder")
    options = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "offline")
    bus = f"wandb-{os.getpid()}-{secrets.token_hex(3)}"
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(bus,), daemon=True)
    with shmbus.Bus.create(bus, "16MiB"):
        worker.start()
        try:
            written = train(bus, options.directory, 10 if options.quick else 100)
        finally:
            worker.kill()
            worker.join()
    size = sum(each.stat().st_size for each in written.glob("*.wandb"))
    print(f"run of {size} bytes in {written}")
    return 0 if size else 1


if __name__ == "__main__":
    sys.exit(main())
