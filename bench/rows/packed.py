"""put to packed torch batches, with grouping: what a trainer gets from OnlineDataHandler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from bench.failures import MeasurementError
from bench.processes import STALL_S, Role, run_together
from bench.sending import check_ledger, produce, temporary_bus
from bench.workload import BYTES_PER_TOKEN, Timed, Workload

__all__ = [
    "MOVED_BYTES_PER_TOKEN",
    "PACKED_BYTES_PER_TOKEN",
    "PACKING_BYTES_PER_TOKEN",
    "TOKENS_PER_BATCH",
    "measure",
    "measure_over",
    "train",
]

#: int64 token and position, bool mask, float32 logprob and advantage.
PACKED_BYTES_PER_TOKEN: Final = 8 + 8 + 1 + 4 + 4
#: Read and written by the core that packs: the arrays in the ring, and the batch.
PACKING_BYTES_PER_TOKEN: Final = BYTES_PER_TOKEN + PACKED_BYTES_PER_TOKEN
#: Read and written on the way: the producer's arrays into the ring, and from there into a batch.
MOVED_BYTES_PER_TOKEN: Final = 3 * BYTES_PER_TOKEN + PACKED_BYTES_PER_TOKEN
TOKENS_PER_BATCH: Final = 65_536


def measure(workload: Workload) -> Timed:
    """Move a workload over a new bus into packed batches on the CPU."""
    with temporary_bus(workload.capacity) as name:
        return measure_over(name, workload)


def measure_over(name: str, workload: Workload) -> Timed:
    """Move a workload over an existing bus into packed batches on the CPU."""
    # A batch that is not full would wait for more at the end of the run.
    assert workload.trajectories * workload.tokens % TOKENS_PER_BATCH == 0
    trainer = Role(train, (name, workload))
    producers = [Role(produce, (name, workload, i)) for i in range(workload.producers)]
    (seconds, cpu_s), *producers_cpu_s = run_together([trainer, *producers])
    return Timed(
        trajectories=workload.trajectories,
        seconds=seconds,
        consumer_cpu_s=cpu_s,
        producer_cpu_s=sum(producers_cpu_s),
    )


def train(
    start: Callable[[], None],
    name: str,
    workload: Workload,
    tokens_per_batch: int = TOKENS_PER_BATCH,
) -> tuple[float, float]:
    """Take batches and acknowledge each; return seconds and processor seconds."""
    # Only this process needs torch.
    import torch

    from trainer_adapter import OnlineDataHandler

    done = 0
    began = began_cpu = None
    with OnlineDataHandler(name, tokens_per_batch=tokens_per_batch) as handler:
        start()
        while done < workload.trajectories:
            batch = handler.next_batch(STALL_S)
            if began is None:
                began, began_cpu = time.perf_counter(), time.process_time()
            done += batch.sequences
            handler.ack(batch)
        assert began is not None and began_cpu is not None
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        # The last trajectory differs from all before it, and stands for them.
        tokens = torch.from_numpy(workload.source(last=True)[0]).long()
        end = slice(-workload.tokens, None)
        if not torch.equal(batch.tokens[end], tokens) or not torch.equal(
            batch.position_ids[end], torch.arange(workload.tokens)
        ):
            raise MeasurementError(f"expected {tokens} at the end, got {batch.tokens[end]}")
        check_ledger(handler.stats(), workload)
    return seconds, cpu_s
