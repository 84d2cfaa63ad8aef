"""Rate and latency of a contender, by the same loops of producer and consumer for everyone.

The consumer makes an array of each field, without a look at the contents. A probe of latency is a
trajectory of a few tokens, a group by itself, to a sleeping reader.
"""

import importlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.processes import STALL_S, MeasurementError, Role, run_together
from bench.workload import Timed, Workload

__all__ = ["latency_us", "measure"]

#: Tokens of a probe: only its stamp.
PROBE_TOKENS: Final = 16
#: Microseconds between two probes: long enough for the reader to fall asleep again.
PAUSE_US: Final = (300.0, 1000.0)
#: Uncounted first probes: first calls, first touches.
WARM_UP: Final = 50
SEED: Final = 20240229


def measure(module: str, workload: Workload) -> Timed:
    """Move a workload over a link of its own; the span begins with the first delivery."""
    contender = importlib.import_module(module)
    with contender.link(workload) as address:
        consumer = Role(_consume, (module, address, workload))
        producers = [
            Role(_produce, (module, address, workload, i)) for i in range(workload.producers)
        ]
        (counted, seconds), *_ = run_together([consumer, *producers])
    return Timed(trajectories=counted, seconds=seconds)


def latency_us(module: str, probes: int) -> float:
    """Return the median microseconds of so many probes, by CLOCK_MONOTONIC."""
    contender = importlib.import_module(module)
    probing = Workload(
        trajectories=probes + WARM_UP, tokens=PROBE_TOKENS, group_size=1, reader="sleeping"
    )
    with contender.link(probing) as address:
        ways: list[int]
        ways, _ = run_together(
            [Role(_read, (module, address, probing)), Role(_probe, (module, address, probing))]
        )
    return statistics.median(ways[WARM_UP:]) / 1e3


def _produce(
    start: Callable[[], None], module: str, address: Any, workload: Workload, number: int
) -> None:
    """Send a producer's share at the speed of the link."""
    items = workload.items(number)
    with importlib.import_module(module).sender(address, workload, number) as sender:
        send = sender.send
        start()
        for (instance_id, index), source in items:
            send(instance_id, index, source)
        sender.flush()


def _consume(
    start: Callable[[], None], module: str, address: Any, workload: Workload
) -> tuple[int, float]:
    """Receive everything; return the count after the first delivery, and its seconds."""
    wanted, done, first, different = workload.trajectories, 0, 0, 0
    contender = importlib.import_module(module)
    ordered = contender.CONTENDER.ordered
    began = None
    with contender.receiver(address, workload) as receiver:
        start()
        while done < wanted:
            received = receiver.receive(None)
            if not received:
                continue
            done += len(received)
            if began is None:
                began, first = time.perf_counter(), done
            for _, _, arrays in received:
                tokens, loss_mask, logprobs = arrays
                if not ordered:
                    different += int(tokens[0])
            if done < wanted:
                # An array keeps its bytes: drop the arrays here, for contenders that free late.
                received = arrays = tokens = loss_mask = logprobs = None
                receiver.done()
        if ordered:
            _check(workload, (tokens, loss_mask, logprobs))
        elif different != workload.producers:
            raise MeasurementError(f"expected {workload.producers} that differ, got {different}")
        received = arrays = tokens = loss_mask = logprobs = None
        receiver.done()
        assert began is not None
        if first == wanted:
            raise MeasurementError(f"all {wanted} came at once: there is nothing to time")
        return wanted - first, time.perf_counter() - began


def _check(workload: Workload, arrays: tuple[NDArray[Any], ...]) -> None:
    """Refuse a last trajectory (different from its predecessors) with wrong contents."""
    sources: tuple[NDArray[Any], ...] = workload.source(last=True)
    for array, sent in zip(arrays, sources, strict=True):
        if not np.array_equal(array, sent):
            raise MeasurementError(f"expected {sent} at the end, got {array}")


def _probe(start: Callable[[], None], module: str, address: Any, probing: Workload) -> None:
    generator = random.Random(SEED)
    source = probing.source()
    stamp: NDArray[np.int64] = source[0].view(np.int64)
    with importlib.import_module(module).sender(address, probing, 0) as sender:
        start()
        for number in range(probing.trajectories):
            time.sleep(generator.uniform(*PAUSE_US) / 1e6)
            stamp[0] = time.monotonic_ns()
            sender.send(f"probe-{number}", 0, source)
            sender.flush()


def _read(start: Callable[[], None], module: str, address: Any, probing: Workload) -> list[int]:
    ways: list[int] = []
    with importlib.import_module(module).receiver(address, probing) as receiver:
        start()
        heard = time.monotonic()
        while len(ways) < probing.trajectories:
            received = receiver.receive(STALL_S)
            came = time.monotonic_ns()
            if received:
                heard = time.monotonic()
            elif time.monotonic() - heard > STALL_S:
                raise MeasurementError(f"nothing came within {STALL_S:g} s")
            for _, _, (tokens, *_) in received:
                # Built from bytes: contenders may return unaligned arrays.
                ways.append(came - int.from_bytes(tokens[:2].tobytes(), "little"))
            received = tokens = None
            receiver.done()
    return ways
