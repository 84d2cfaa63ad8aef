"""Requests a second from one feeder to four workers: offered, taken, decoded.

Batched. The workers wait before the feeder begins, and complete nothing: the lane holds every
group. The clock runs from the first offer to the last sample in a worker's hands.
"""

import time
from collections.abc import Callable
from typing import Final

import numpy as np

import shmbus
from bench.levels import Level
from bench.processes import STALL_S, MeasurementError, Role, run_together
from bench.row import Row
from bench.sending import temporary_bus
from bench.workload import GROUP_SIZE
from bench.yardsticks import queue_us

__all__ = ["requests"]

WORKERS: Final = 4
#: Seconds without a request after which a worker ends.
IDLE_S: Final = 1.0
#: Tokens of a prompt.
PROMPT: Final = 64
#: Groups of an offering call, samples of a taking call.
OFFERED: Final = 16
TAKEN: Final = 32
#: Bytes of the lane a group: a row's share.
LANE_BYTES: Final = 2304


def requests(level: Level, capacity: str) -> Row:
    """Offer groups to four workers, beside dicts through Python's own queue on two cores."""
    rates = [_rate(level.requests) for _ in range(level.repetitions)]
    return Row(
        name="requests",
        title=f"requests, one feeder to {WORKERS} workers",
        unit="samples/s",
        values=tuple(rates),
        beside="queue.SimpleQueue, two cores",
        beside_values=(2 / queue_us() * 1e6,),
    )


def _rate(groups: int) -> float:
    lane = max(1 << 16, groups * LANE_BYTES)
    with temporary_bus("16MiB", request_capacity=lane) as name:
        workers = [Role(_work, (name,)) for _ in range(WORKERS)]
        began_s: float
        ends: list[tuple[int, float]]
        began_s, *ends = run_together([Role(_feed, (name, groups)), *workers])
    samples = sum(count for count, _ in ends)
    if samples != groups * GROUP_SIZE:
        raise MeasurementError(f"expected {groups * GROUP_SIZE} samples, got {samples}")
    return samples / (max(last_s for _, last_s in ends) - began_s)


def _feed(start: Callable[[], None], name: str, groups: int) -> float:
    prompt = np.arange(PROMPT, dtype=np.int32)
    with shmbus.Feeder(name) as feeder:
        start()
        time.sleep(0.2)  # until the workers sleep
        began_s = time.monotonic()
        for first in range(0, groups, OFFERED):
            feeder.request_many(
                [
                    {"instance_id": f"q{number}", "group_size": GROUP_SIZE, "prompt": prompt}
                    for number in range(first, min(groups, first + OFFERED))
                ],
                timeout=STALL_S,
            )
        return began_s


def _work(start: Callable[[], None], name: str) -> tuple[int, float]:
    taken, last_s = 0, 0.0
    with shmbus.Producer(name) as producer:
        start()
        while found := producer.requests.next_many(TAKEN, timeout=IDLE_S):
            for request in found:
                if request["prompt"].size != PROMPT:
                    raise MeasurementError(f"expected a prompt of {PROMPT}, got {request}")
            taken, last_s = taken + len(found), time.monotonic()
        time.sleep(2 * IDLE_S)  # every sibling ends first: returned requests find no taker
    return taken, last_s
