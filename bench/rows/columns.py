"""Groups a second that get a column from two annotators, beside batches that need none.

A group is eight trajectories of 256 tokens; its column is an array of float32, one a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

import shmbus
from bench.levels import Level
from bench.processes import STALL_S, Role, run_together
from bench.row import Row
from bench.sending import produce, temporary_bus
from bench.workload import GROUP_SIZE, Workload

__all__ = ["columns"]

ANNOTATORS: Final = 2
TOKENS: Final = 256
GROUPS_PER_BATCH: Final = 16
#: Seconds without a group after which an annotator has seen the last one.
IDLE_S: Final = 2.0
WRITES: Final = {"ref_logprobs": "float32"}


def columns(level: Level, capacity: str) -> Row:
    """Measure both by turns, with the processor time a group on each side."""
    groups = max(1, level.requests // 8 // GROUPS_PER_BATCH) * GROUPS_PER_BATCH
    workload = Workload(
        trajectories=groups * GROUP_SIZE, tokens=TOKENS, group_size=GROUP_SIZE, batch=GROUP_SIZE,
        capacity=capacity,
    )  # fmt: skip
    values: dict[int, list[float]] = {0: [], ANNOTATORS: []}
    trainer_us: dict[int, list[float]] = {0: [], ANNOTATORS: []}
    annotator_us = []
    for _ in range(level.repetitions):
        for count in values:
            with temporary_bus(capacity) as name:
                columns = f"{name}.columns.{'-'.join(WRITES)}"
                try:
                    roles = [Role(_annotate, (name,)) for _ in range(count)]
                    (rate, cpu_s), _, *others = run_together(
                        [
                            Role(_train, (name, groups, bool(count))),
                            Role(produce, (name, workload, 0)),
                            *roles,
                        ]
                    )
                finally:
                    if count:
                        shmbus.unlink(columns)
            values[count].append(rate)
            trainer_us[count].append(cpu_s / groups * 1e6)
            if others:
                annotator_us.append(sum(others) / groups * 1e6)
    return Row(
        name="columns",
        title=f"groups of {GROUP_SIZE} with a column from {ANNOTATORS} annotators",
        unit="groups/s",
        values=tuple(values[ANNOTATORS]),
        beside="without a column",
        beside_values=tuple(values[0]),
        figures={
            "annotators_cpu_us_a_group": annotator_us,
            "trainer_cpu_us_a_group": trainer_us[ANNOTATORS],
            "trainer_cpu_us_a_group_without": trainer_us[0],
        },
    )


def _annotate(start: Callable[[], None], name: str) -> float:
    """Write the column of each group until none comes; return the processor seconds."""
    with shmbus.Annotator(name, WRITES, wait=STALL_S) as annotator:
        start()
        began = time.process_time()
        timeout = STALL_S
        while (group := annotator.take(timeout)) is not None:
            group.write(ref_logprobs=[-one["tokens"].astype(np.float32) for one in group])
            timeout = IDLE_S
        return time.process_time() - began


def _train(
    start: Callable[[], None], name: str, groups: int, annotated: bool
) -> tuple[float, float]:
    """Take all batches; return groups a second, from the first batch on, and processor seconds."""
    from trainer_adapter import OnlineDataHandler

    made = shmbus.Columns(name, WRITES) if annotated else None
    with OnlineDataHandler(name, groups_per_batch=GROUPS_PER_BATCH, annotate_group=made) as handler:
        start()
        handler.ack(handler.next_batch(STALL_S))
        began, cpu = time.monotonic(), time.process_time()
        for _ in range(groups // GROUPS_PER_BATCH - 1):
            handler.ack(handler.next_batch(STALL_S))
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
    if made is not None:
        made.close()
    return (groups - GROUPS_PER_BATCH) / seconds, cpu_s
