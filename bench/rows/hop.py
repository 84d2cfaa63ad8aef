"""put to read-only views: the cost of the hop alone, without work on the trajectories."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shmbus
from bench.failures import MeasurementError
from bench.processes import STALL_S, Role, run_together
from bench.sending import check_ledger, produce, temporary_bus
from bench.workload import Timed, Workload

__all__ = ["measure"]


def measure(workload: Workload) -> Timed:
    """Move a workload over a new bus to a consumer that views every field."""
    with temporary_bus(workload.capacity) as name:
        consumer = Role(_consume, (name, workload))
        producers = [Role(produce, (name, workload, i)) for i in range(workload.producers)]
        (seconds, cpu_s), *producers_cpu_s = run_together([consumer, *producers])
    return Timed(
        trajectories=workload.trajectories,
        seconds=seconds,
        consumer_cpu_s=cpu_s,
        producer_cpu_s=sum(producers_cpu_s),
    )


def _consume(start: Callable[[], None], name: str, workload: Workload) -> tuple[float, float]:
    """Take groups, make all views, acknowledge; return seconds and processor seconds."""
    wanted = workload.trajectories
    done = 0
    began = began_cpu = None
    with shmbus.Consumer(name) as consumer:
        start()
        while done < wanted:
            groups = consumer.take(timeout=STALL_S)
            if began is None:
                began, began_cpu = time.perf_counter(), time.process_time()
            if not groups:
                raise MeasurementError(f"no group within {STALL_S:g} s: {consumer.stats()}")
            for group in groups:
                for trajectory in group:
                    tokens = trajectory["tokens"]
                    loss_mask = trajectory["loss_mask"]
                    logprobs = trajectory["logprobs"]
                done += len(group)
            consumer.ack(groups)
        assert began is not None and began_cpu is not None
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        # The last trajectory differs from all before it, and stands for them.
        views: list[NDArray[Any]] = [tokens, loss_mask, logprobs]
        sources: list[NDArray[Any]] = [*workload.source(last=True)]
        for view, sent in zip(views, sources, strict=True):
            if not np.array_equal(view, sent) or view.flags.writeable:
                raise MeasurementError(f"expected a read-only view of {sent}, got {view}")
        check_ledger(consumer.stats(), workload)
    return seconds, cpu_s
