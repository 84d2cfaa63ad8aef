"""One-way latency: from the stamp before a send to the consumer having it, by CLOCK_MONOTONIC.

Probes are trajectories of a few tokens, each a group of its own, with random pauses between them.
The reader sleeps until one comes, or polls without a pause; under load another process sends
trajectories of 2,048 tokens all the while, so many a second, and the reader receives those too.
"""

from __future__ import annotations

import importlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.failures import MeasurementError
from bench.processes import STALL_S, Role, new_event, run_together
from bench.workload import Reader, Workload

__all__ = ["PERCENTS", "Latency", "measure"]

#: Tokens of a probe: its stamp, its mark, and that is all.
PROBE_TOKENS: Final = 16
#: The third token of a probe; no token of any other trajectory is negative.
MARK: Final = -1
#: Microseconds between two probes: long enough for the reader to be asleep again.
PAUSE_US: Final = (300.0, 1000.0)
#: Probes at the beginning that are not counted: first calls, first touches.
WARM_UP: Final = 100
LOAD_TOKENS: Final = 2048
#: The reader looks this often whether all is over, once it has all probes.
LOOK_S: Final = 0.05
SEED: Final = 20240229
#: Percentiles that stand for the distribution.
PERCENTS: Final = (*range(0, 100), 99.5, 99.9, 100)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Microseconds at each of `PERCENTS`, of so many probes."""

    probes: int
    us: tuple[float, ...]
    percents: tuple[float, ...] = PERCENTS

    def percentile(self, percent: float) -> float:
        """Microseconds at one of `PERCENTS`."""
        return self.us[PERCENTS.index(percent)]


def measure(module: str, probes: int, reader: Reader, load_per_s: float, capacity: str) -> Latency:
    """Send so many probes, under a load of so many trajectories a second (0 for none)."""
    contender = importlib.import_module(module)
    probing = Workload(
        trajectories=probes + WARM_UP,
        tokens=PROBE_TOKENS,
        group_size=1,
        reader=reader,
        capacity=capacity,
    )
    # The link is for the larger of both.
    link = Workload(
        trajectories=2,
        tokens=LOAD_TOKENS,
        producers=2,
        group_size=1,
        reader=reader,
        capacity=capacity,
    )
    over = new_event()
    gone = new_event()
    with contender.link(link) as address:
        roles = [
            Role(_read, (module, address, link, probing.trajectories, over, gone)),
            Role(_probe, (module, address, link, probing)),
        ]
        if load_per_s:
            roles.append(Role(_load, (module, address, link, load_per_s, over, gone)))
        else:
            gone.set()
        latencies = run_together(roles)[0]
    counted = np.array(latencies[WARM_UP:], np.float64) / 1000
    return Latency(
        probes=counted.size, us=tuple(float(us) for us in np.percentile(counted, PERCENTS))
    )


def _probe(
    start: Callable[[], None], module: str, address: Any, link: Workload, probing: Workload
) -> None:
    generator = random.Random(SEED)
    source = probing.source()
    stamp: NDArray[np.int64] = source[0].view(np.int64)
    source[0][2] = MARK
    contender = importlib.import_module(module)
    with contender.sender(address, link, 0) as sender:
        start()
        for number in range(probing.trajectories):
            time.sleep(generator.uniform(*PAUSE_US) / 1e6)
            instance_id = f"probe-{number}"
            stamp[0] = time.monotonic_ns()
            sender.send(instance_id, 0, source)
            sender.flush()


def _load(
    start: Callable[[], None],
    module: str,
    address: Any,
    link: Workload,
    per_s: float,
    over: Any,
    gone: Any,
) -> None:
    """Send at an even rate until the end; a late sample is sent immediately."""
    try:
        with importlib.import_module(module).sender(address, link, 1) as sender:
            source = link.source()
            start()
            began, number = time.monotonic(), 0
            while not over.is_set():
                due = began + number / per_s
                pause = due - time.monotonic()
                if pause > 0:
                    sender.flush()
                    time.sleep(pause)
                sender.send(f"load-{number}", 0, source)
                number += 1
            sender.flush()
    finally:
        gone.set()


def _read(
    start: Callable[[], None],
    module: str,
    address: Any,
    link: Workload,
    wanted: int,
    over: Any,
    gone: Any,
) -> list[int]:
    latencies: list[int] = []
    timeout_s = 0.0 if link.reader == "busy" else STALL_S
    with importlib.import_module(module).receiver(address, link) as receiver:
        start()
        heard = time.monotonic()
        while len(latencies) < wanted:
            received = receiver.receive(timeout_s)
            came = time.monotonic_ns()
            if received:
                heard = time.monotonic()
            elif time.monotonic() - heard > STALL_S:
                raise MeasurementError(f"nothing came within {STALL_S:g} s")
            for _, _, arrays in received:
                tokens = arrays[0]
                if tokens[2] == MARK:
                    # Made of whole bytes, since not every contender keeps arrays aligned.
                    latencies.append(came - int.from_bytes(tokens[:2].tobytes(), "little"))
            receiver.done()
        over.set()
        # Whoever sends the load may be waiting for space.
        while not gone.is_set():
            receiver.receive(LOOK_S)
            receiver.done()
    return latencies
