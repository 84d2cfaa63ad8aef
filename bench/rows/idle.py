"""Cost of idleness: a waiting consumer, and a daemon between two attached ends.

Processor seconds a minute.
"""

import time
from collections.abc import Callable
from typing import Final

import shmbus
from bench.levels import Level
from bench.processes import processor_s, run_alone
from bench.row import Row
from bench.sending import serving, temporary_bus

__all__ = ["daemon_idle", "idle"]

UNIT: Final = "CPU s a minute"
#: Seconds before the count: a thread of OpenBLAS, within NumPy, spins for 8 ms at its start.
SETTLE_S: Final = 0.3


def idle(level: Level, capacity: str) -> Row:
    """Let a consumer sleep on an empty bus."""
    with temporary_bus(capacity) as name:
        values = [run_alone(_sleep, name, level.idle_s) for _ in range(level.repetitions)]
    title = "a consumer asleep"
    return Row(name="idle", title=title, unit=UNIT, values=tuple(values))


def daemon_idle(level: Level, capacity: str) -> Row:
    """Let a daemon sleep between an attached producer and an attached consumer."""
    values = []
    with (
        temporary_bus(capacity) as name,
        serving(name) as pid,
        shmbus.Producer(name),
        shmbus.Consumer(name) as consumer,
    ):
        consumer.take(timeout=0.0)
        for _ in range(level.repetitions):
            time.sleep(SETTLE_S)
            before = processor_s(pid)
            time.sleep(level.idle_s)
            values.append((processor_s(pid) - before) * 60 / level.idle_s)
    title = "a daemon asleep, both ends attached"
    return Row(name="daemon-idle", title=title, unit=UNIT, values=tuple(values))


def _sleep(start: Callable[[], None], name: str, seconds: float) -> float:
    with shmbus.Consumer(name) as consumer:
        consumer.take(timeout=0.0)
        start()
        time.sleep(SETTLE_S)
        began, began_cpu = time.monotonic(), time.process_time()
        consumer.take(timeout=seconds)
        return (time.process_time() - began_cpu) * 60 / (time.monotonic() - began)
