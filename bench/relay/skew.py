"""Two sources, one four times as fast, each with half of every group; a small trainer's bus."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Final

import shmbus
import shmbus.relay
from bench.relay.bounds import RECORD, SIZE
from bench.relay.hop import sample_fields

__all__ = ["skew"]

GROUPS: Final = 2000
TRAINER: Final = "64MiB"
SOURCE: Final = "256MiB"
#: Seconds from one group to the next at the fast source; four times as many at the other.
PAUSE_S: Final = 0.0005
FASTER: Final = 4


def _put_halves(name: str, first: int, pause_s: float) -> None:
    fields = sample_fields()
    with shmbus.Producer(name) as producer:
        for group in range(GROUPS):
            for index in range(first, SIZE, 2):
                producer.put(
                    f"q{group}", group_size=SIZE, index=index, score=float(index), timeout=None,
                    **fields,
                )  # fmt: skip
            time.sleep(pause_s)


def skew(**options: Any) -> dict[str, Any]:
    """Measure how long nothing came at most, and how far the fast source was ahead."""
    names = [f"bench-skew-{os.getpid()}.{each}" for each in ("fast", "slow", "to")]
    sizes = (SOURCE, SOURCE, TRAINER)
    buses = [shmbus.Bus.create(name, size) for name, size in zip(names, sizes, strict=True)]
    try:
        relay = shmbus.relay.start(
            [f"{name}@left" for name in names[:2]], [f"{names[2]}@right"], **options
        )
        threads = [
            threading.Thread(target=_put_halves, args=(name, i, PAUSE_S * FASTER**i))
            for i, name in enumerate(names[:2])
        ]
        with shmbus.Consumer(names[2]) as consumer:
            for thread in threads:
                thread.start()
            longest_s, ahead, taken = 0.0, 0, 0
            began = moved = 0.0
            while taken < GROUPS:
                for group in consumer.take(timeout=1.0):
                    now = time.perf_counter()
                    began = began or now
                    longest_s = max(longest_s, now - (moved or now))
                    moved = now
                    group.ack()
                    taken += 1
                fast, slow, _ = (bus.stats().committed for bus in buses)
                ahead = max(ahead, fast - slow)
            took_s = time.perf_counter() - began
        for thread in threads:
            thread.join()
        relay.stop()
    finally:
        for bus in buses:
            bus.unlink()
    return {
        "groups": GROUPS,
        "groups_per_s": GROUPS / took_s,
        "longest_silence_s": longest_s,
        "most_ahead_mb": ahead * RECORD / 1e6,
    }
