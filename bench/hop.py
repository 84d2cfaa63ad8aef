"""put to read-only views: what the hop itself costs, with nothing done to the trajectories."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import shmbus
from bench.processes import STALL_S, MeasurementError, Role, run_together
from bench.sending import Sent, check_ledger, produce, temporary_bus
from bench.workload import Timed, Workload

__all__ = ["measure", "timed"]


def measure(workload: Workload) -> Timed:
    """Move a workload over a bus of its own to a consumer that looks at every field."""
    with temporary_bus(workload.capacity) as name:
        consumer = Role(_consume, (name, workload))
        producers = [Role(produce, (name, workload, i)) for i in range(workload.producers)]
        (seconds, cpu_s), *sent = run_together([consumer, *producers])
    return timed(workload, seconds, cpu_s, sent)


def timed(workload: Workload, seconds: float, cpu_s: float, sent: list[Sent]) -> Timed:
    """Put together what the consumer and the producers of one run measured."""
    return Timed(
        trajectories=workload.trajectories,
        seconds=seconds,
        consumer_cpu_s=cpu_s,
        producer_cpu_s=sum(one.cpu_s for one in sent),
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
        # The last trajectory stands for all: what arrived is what was sent.
        for name_, view in (("tokens", tokens), ("loss_mask", loss_mask), ("logprobs", logprobs)):
            if not np.array_equal(view, workload.arrays()[name_]) or view.flags.writeable:
                raise MeasurementError(f"{name_}: the view is not what was sent, read-only")
        check_ledger(consumer.stats(), workload)
    return seconds, cpu_s
