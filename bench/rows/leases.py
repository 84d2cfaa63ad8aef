"""Groups leased through the daemon and acknowledged by a client, hundreds at a time."""

import time
from collections.abc import Callable
from typing import Final

import shmbus
from bench.levels import Level
from bench.processes import STALL_S, Role, processor_s, run_together
from bench.row import Row
from bench.sending import check_ledger, produce, serving, temporary_bus
from bench.workload import Workload

__all__ = ["daemon_leases"]

TOKENS: Final = 256
AT_ONCE: Final = 256


def daemon_leases(level: Level, capacity: str) -> Row:
    """Measure groups of one trajectory a second."""
    workload = Workload(
        trajectories=max(2, level.packed // 4 // AT_ONCE) * AT_ONCE,
        tokens=TOKENS,
        group_size=1,
        batch=AT_ONCE,
        capacity=capacity,
    )
    rates, cpu_us = [], []
    for _ in range(level.repetitions):
        with temporary_bus(capacity) as name, serving(name) as pid:
            before = processor_s(pid)
            rate, _ = run_together(
                [Role(_lease_all, (name, workload)), Role(produce, (name, workload, 0))]
            )
            rates.append(float(rate))
            cpu_us.append((processor_s(pid) - before) / workload.trajectories * 1e6)
    return Row(
        name="daemon-leases",
        title="groups leased through the daemon",
        unit="groups/s",
        values=tuple(rates),
        figures={"daemon_cpu_us_a_group": cpu_us},
    )


def _lease_all(start: Callable[[], None], name: str, workload: Workload) -> float:
    """Take and acknowledge every group; return groups a second, counted from the first."""
    with shmbus.Consumer(name) as consumer:
        start()
        groups = consumer.take(AT_ONCE, STALL_S)
        began, taken = time.monotonic(), 0
        while groups:
            taken += len(groups)
            consumer.ack(groups)
            left = workload.trajectories - taken
            groups = consumer.take(AT_ONCE, STALL_S) if left else []
        seconds = time.monotonic() - began
        check_ledger(consumer.stats(), workload)
    return taken / seconds
