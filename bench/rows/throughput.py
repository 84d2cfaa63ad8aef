"""put to read-only views, and put to packed torch batches, embedded and through the daemon.

The span of a run goes from the first delivery in the consumer to its last acknowledgement. Every
run ends with a check: the ledger balances, and the last trajectory arrived as it was sent.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import shmbus
from bench.levels import Level
from bench.processes import STALL_S, MeasurementError, Role, run_together
from bench.row import Row
from bench.sending import check_ledger, produce, serving, temporary_bus
from bench.workload import BYTES_PER_TOKEN, Timed, Workload
from bench.yardsticks import memcpy

__all__ = ["PACKED_BYTES_PER_TOKEN", "TOKENS_PER_BATCH", "daemon_packed", "hop", "packed", "views"]

#: int64 token and position, bool mask, float32 logprob and advantage.
PACKED_BYTES_PER_TOKEN: Final = 8 + 8 + 1 + 4 + 4
TOKENS_PER_BATCH: Final = 65_536
MEMCPY_REPETITIONS: Final = 5


def hop(name: str, level: Level, capacity: str) -> Row:
    """Measure one of the rows to views, beside memcpy of as many bytes."""
    tokens = {"hop-2048": 2048, "hop-16384": 16_384, "hop-256": 256}[name.removesuffix("-cold")]
    workload = Workload(
        trajectories=getattr(level, f"hop_{tokens}"),
        tokens=tokens,
        batch=64 if tokens == 256 else 0,
        cold=name.endswith("-cold"),
        capacity=capacity,
    )
    how = "put_many of 64" if workload.batch else "put"
    cold = ", sources cold" if workload.cold else ""
    title = f"{how} to views, {tokens:,} tokens{cold}"
    return _beside_memcpy(name, title, level, workload, views, BYTES_PER_TOKEN)


def packed(name: str, level: Level, capacity: str) -> Row:
    """Measure put to packed batches, beside memcpy of as many bytes of batch."""
    workload = Workload(
        trajectories=level.packed, tokens=2048, cold=name.endswith("-cold"), capacity=capacity
    )
    cold = ", sources cold" if workload.cold else ""
    title = f"put to packed batches, 2,048 tokens{cold}"
    return _beside_memcpy(name, title, level, workload, to_batches, PACKED_BYTES_PER_TOKEN)


def daemon_packed(level: Level, capacity: str) -> Row:
    """Measure packed batches through the daemon, beside embedded, in turns."""
    workload = Workload(trajectories=level.packed, tokens=2048, capacity=capacity)
    turns = [
        (to_batches(workload).rate, to_batches(workload, daemon=True).rate)
        for _ in range(level.repetitions)
    ]
    return Row(
        name="daemon-packed",
        title="packed through the daemon, 2,048 tokens",
        unit="trajectories/s",
        values=tuple(served for _, served in turns),
        beside="embedded",
        beside_values=tuple(embedded for embedded, _ in turns),
    )


def _beside_memcpy(
    name: str,
    title: str,
    level: Level,
    workload: Workload,
    measure: Callable[[Workload], Timed],
    bytes_per_token: int,
) -> Row:
    """Measure runs, each between two copies; what memcpy came to is told in trajectories."""
    each = workload.tokens * bytes_per_token
    rates, copies = [], []
    before = memcpy(level.memcpy_bytes, MEMCPY_REPETITIONS)
    for _ in range(level.repetitions):
        rates.append(measure(workload).rate)
        after = memcpy(level.memcpy_bytes, MEMCPY_REPETITIONS)
        copies.append((before + after) / 2 / each)
        before = after
    return Row(
        name=name,
        title=title,
        unit="trajectories/s",
        values=tuple(rates),
        beside="memcpy",
        beside_values=tuple(copies),
        figures={"bytes_per_trajectory": each, "trajectories": workload.trajectories},
    )


def views(workload: Workload) -> Timed:
    """Move a workload over a new bus to a consumer that views every field."""
    with temporary_bus(workload.capacity) as name:
        return _run(name, workload, Role(_view_all, (name, workload)))


def to_batches(workload: Workload, *, daemon: bool = False) -> Timed:
    """Move a workload over a new bus into packed batches on the CPU."""
    # A batch that is not full would wait for more at the end of the run.
    assert workload.trajectories * workload.tokens % TOKENS_PER_BATCH == 0
    with temporary_bus(workload.capacity) as name:
        served: AbstractContextManager[object] = (
            serving(name) if daemon else contextlib.nullcontext()
        )
        with served:
            return _run(name, workload, Role(_pack_all, (name, workload)))


def _run(name: str, workload: Workload, consumer: Role) -> Timed:
    producers = [Role(produce, (name, workload, i)) for i in range(workload.producers)]
    seconds, *_ = run_together([consumer, *producers])
    return Timed(trajectories=workload.trajectories, seconds=seconds)


def _deliveries(consumer: shmbus.Consumer, wanted: int) -> Iterator[list[shmbus.Group]]:
    done = 0
    while done < wanted:
        groups = consumer.take(timeout=STALL_S)
        if not groups:
            raise MeasurementError(f"no group within {STALL_S:g} s: {consumer.stats()}")
        yield groups
        done += sum(map(len, groups))
        consumer.ack(groups)


def _view_all(start: Callable[[], None], name: str, workload: Workload) -> float:
    """Take groups, make all views, acknowledge; return seconds."""
    began = None
    with shmbus.Consumer(name) as consumer:
        start()
        for groups in _deliveries(consumer, workload.trajectories):
            began = began or time.perf_counter()
            for group in groups:
                for trajectory in group:
                    tokens = trajectory["tokens"]
                    loss_mask = trajectory["loss_mask"]
                    logprobs = trajectory["logprobs"]
        assert began is not None
        seconds = time.perf_counter() - began
        # The last trajectory differs from all before it, and stands for them.
        views: tuple[NDArray[Any], ...] = (tokens, loss_mask, logprobs)
        sources: tuple[NDArray[Any], ...] = workload.source(last=True)
        for view, sent in zip(views, sources, strict=True):
            if not np.array_equal(view, sent) or view.flags.writeable:
                raise MeasurementError(f"expected a read-only view of {sent}, got {view}")
        check_ledger(consumer.stats(), workload)
    return seconds


def _pack_all(start: Callable[[], None], name: str, workload: Workload) -> float:
    """Take batches and acknowledge each; return seconds."""
    # Only this process needs torch.
    import torch

    from trainer_adapter import OnlineDataHandler

    done, began = 0, None
    with OnlineDataHandler(name, tokens_per_batch=TOKENS_PER_BATCH) as handler:
        start()
        while done < workload.trajectories:
            batch = handler.next_batch(STALL_S)
            began = began or time.perf_counter()
            done += batch.num_sequences
            handler.ack(batch)
        assert began is not None
        seconds = time.perf_counter() - began
        tokens = torch.from_numpy(workload.source(last=True)[0]).long()
        if not torch.equal(batch.tokens[-workload.tokens :], tokens):
            raise MeasurementError(f"expected {tokens} at the end of a batch, got another")
        check_ledger(handler.stats(), workload)
    return seconds
