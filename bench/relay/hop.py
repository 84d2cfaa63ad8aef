"""The relay itself: from put on one node to acknowledgement on the other, and its latency."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Final

import numpy as np

import shmbus
import shmbus.relay
from bench.relay.bounds import RECORD, SIZE
from bench.relay.cluster import Account

__all__ = ["hop", "put_groups", "sample_fields", "take_groups"]

TOKENS: Final = 2048
CAPACITY: Final = "256MiB"
#: Until each page of both buses and of Ray's stores has been touched.
WARM_GROUPS: Final = 2200
GROUPS: Final = 20_000
LATENCY_GROUPS: Final = 150


def sample_fields() -> dict[str, Any]:
    """Make what a trajectory of 18 kB has."""
    return {
        "tokens": np.zeros(TOKENS, np.int32),
        "mask": np.ones(TOKENS, np.uint8),
        "logprobs": np.zeros(TOKENS, np.float32),
    }


def put_groups(name: str, prefix: str, groups: int) -> None:
    """Put groups as fast as the bus takes them."""
    fields = sample_fields()
    with shmbus.Producer(name) as producer:
        for group in range(groups):
            for index in range(SIZE):
                producer.put(
                    f"{prefix}{group}", group_size=SIZE, index=index, score=float(index),
                    timeout=None, **fields,
                )  # fmt: skip


def take_groups(consumer: shmbus.Consumer, groups: int) -> None:
    """Take and acknowledge so many."""
    taken = 0
    while taken < groups:
        for group in consumer.take(timeout=1.0):
            group.ack()
            taken += 1


def _through(source: str, consumer: shmbus.Consumer, prefix: str, groups: int) -> float:
    """Put groups at one end and take them at the other; return the seconds."""
    thread = threading.Thread(target=put_groups, args=(source, prefix, groups))
    began = time.perf_counter()
    thread.start()
    take_groups(consumer, groups)
    took_s = time.perf_counter() - began
    thread.join()
    return took_s


def _latencies_s(source: str, consumer: shmbus.Consumer) -> list[float]:
    found = []
    for group in range(LATENCY_GROUPS):
        put_groups(source, f"late{group}.", 1)
        began = time.perf_counter()
        take_groups(consumer, 1)
        found.append(time.perf_counter() - began)
        time.sleep(0.03)
    return found


def hop(made: Any, **options: Any) -> dict[str, Any]:
    """Measure a relay with these options: trajectories per second, processor time, latency."""
    names = [f"bench-relay-{os.getpid()}.{each}" for each in ("from", "to")]
    for name in names:
        shmbus.Bus.create(name, CAPACITY).close()
    try:
        relay = shmbus.relay.start(f"{names[0]}@left", [f"{names[1]}@right"], **options)
        with shmbus.Consumer(names[1]) as consumer:
            _through(names[0], consumer, "warm", WARM_GROUPS)
            workers = {each["pid"]: each["kind"] for each in relay.describe()}
            account = Account(made, {**workers, os.getpid(): "worker and trainer"})
            count = GROUPS * SIZE
            took_s, spent = account.over(
                count * RECORD, lambda: _through(names[0], consumer, "q", GROUPS)
            )
            latencies_s = _latencies_s(names[0], consumer)
        relay.stop()
    finally:
        for name in names:
            shmbus.unlink(name)
    return {
        "per_s": count / took_s,
        "gb_per_s": count * RECORD / took_s / 1e9,
        "cpu_s_per_gb": spent,
        "latency_p50_ms": float(np.percentile(latencies_s, 50)) * 1e3,
        "latency_p99_ms": float(np.percentile(latencies_s, 99)) * 1e3,
    }
