"""Requests a second from one feeder to four workers: offered, taken, decoded.

Offered and taken several at a time, and one at a time beside it. The workers wait before the feeder
begins, and end nothing: the lane has room for all groups. The clock runs from the first offer to
the last sample that any worker took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

import shmbus
from bench.bounds import Beside, Bound
from bench.failures import MeasurementError
from bench.fitness import TWO
from bench.processes import STALL_S, Role, run_together
from bench.rows.row import Row
from bench.rows.targets import TARGETS
from bench.sending import temporary_bus
from bench.yardsticks import queue_us

__all__ = ["measure"]

WORKERS: Final = 4
GROUP_SIZE: Final = 8
#: Seconds without a request after which a worker has seen the last one.
IDLE_S: Final = 1.0
#: A feeder on one core and the workers on another, with Python's own queue between them.
QUEUE: Final = Bound(name="dicts through queue.SimpleQueue, on two cores", unit="samples/s")
#: Tokens of a prompt.
PROMPT: Final = 64
#: Groups that are offered by one call, and samples that are taken by one.
OFFERED: Final = 16
TAKEN: Final = 32
#: Bytes of the lane a group: a row's share of it.
LANE_BYTES: Final = 2304
#: Groups that the lane has rows for, whatever its bytes.
MOST_GROUPS: Final = 16_000


def measure(groups: int) -> Row:
    """Offer so many groups to four workers."""
    groups = min(groups, MOST_GROUPS)
    before = queue_us()
    several = _figures(groups, OFFERED, TAKEN)
    bounds = tuple(TWO / us * 1e6 for us in (before, queue_us()))
    single = _figures(groups, 1, 1)
    return Row(
        name="requests",
        title=f"requests, one feeder and {WORKERS} workers, groups of {GROUP_SIZE}, {OFFERED} "
        f"offered and up to {TAKEN} samples taken at a time",
        measured=f"{several['samples_s']:,.0f} samples/s; processor: {several['offer_us']:.1f} us "
        f"an offer of {GROUP_SIZE}, {several['worker_us']:.1f} us a sample taken; one at a time "
        f"{single['samples_s']:,.0f} samples/s, {single['offer_us']:.1f} and "
        f"{single['worker_us']:.1f} us",
        value=several["samples_s"],
        target=TARGETS["requests"],
        bound=Beside(bound=QUEUE, values=(several["samples_s"],), bounds=(bounds,)),
        figures={
            "groups": groups,
            **several,
            **{f"single_{name}": value for name, value in single.items()},
        },
    )


def _figures(groups: int, offered: int, taken: int) -> dict[str, float]:
    lane = max(1 << 16, groups * LANE_BYTES)
    with temporary_bus("16MiB", request_capacity=lane) as name:
        workers = [Role(_work, (name, taken)) for _ in range(WORKERS)]
        (began_s, fed_s, cpu_s), *ends = run_together(
            [Role(_feed, (name, groups, offered)), *workers]
        )
    samples = sum(count for count, _, _ in ends)
    if samples != groups * GROUP_SIZE:
        raise MeasurementError(f"expected {groups * GROUP_SIZE} samples, got {samples}")
    seconds = max(last_s for _, last_s, _ in ends) - began_s
    return {
        "samples_s": samples / seconds,
        "seconds": seconds,
        "offering_s": fed_s,
        "offer_us": cpu_s / groups * 1e6,
        "worker_us": sum(spent_s for _, _, spent_s in ends) / samples * 1e6,
    }


def _feed(
    start: Callable[[], None], name: str, groups: int, offered: int
) -> tuple[float, float, float]:
    prompt = np.arange(PROMPT, dtype=np.int32)
    with shmbus.Feeder(name) as feeder:
        start()
        time.sleep(0.2)  # until the workers sleep
        began_s, began_cpu = time.monotonic(), time.process_time()
        for first in range(0, groups, offered):
            feeder.request_many(
                [
                    {"instance_id": f"q{number}", "group_size": GROUP_SIZE, "prompt": prompt}
                    for number in range(first, min(groups, first + offered))
                ],
                timeout=STALL_S,
            )
        return began_s, time.monotonic() - began_s, time.process_time() - began_cpu


def _work(start: Callable[[], None], name: str, limit: int) -> tuple[int, float, float]:
    taken, last_s = 0, 0.0
    with shmbus.Producer(name) as producer:
        start()
        began_cpu = time.process_time()
        while found := producer.requests.next_many(limit, timeout=IDLE_S):
            for request in found:
                if request["prompt"].size != PROMPT:
                    raise MeasurementError(f"expected a prompt of {PROMPT}, got {request}")
            taken, last_s = taken + len(found), time.monotonic()
        spent_s = time.process_time() - began_cpu
        time.sleep(2 * IDLE_S)  # until the others have nothing to take what this gives back
        return taken, last_s, spent_s
