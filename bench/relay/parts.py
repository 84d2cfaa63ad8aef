"""What the core's part of a hop takes, a record at a time: export, check and import of blocks."""

from __future__ import annotations

import os
import time
from typing import Any, Final

import shmbus
from bench.relay.bounds import BLOCK, RECORD, SIZE
from bench.relay.hop import put_groups
from shmbus_ext import _core

__all__ = ["parts"]

CAPACITY: Final = "128MiB"
ROUNDS: Final = 40


def parts() -> dict[str, Any]:
    """Return microseconds a record of each part, the median of many blocks of 16 MiB."""
    names = [f"bench-parts-{os.getpid()}.{each}" for each in ("from", "to")]
    buses = [shmbus.Bus.create(name, CAPACITY) for name in names]
    took_us: dict[str, list[float]] = {"export": [], "check": [], "import": []}
    groups = BLOCK // (RECORD * SIZE)
    room = bytearray(BLOCK + (1 << 20))
    try:
        with (
            shmbus.RecordReader(names[0]) as reader,
            shmbus.RecordReader(names[1]) as taker,
            shmbus.Producer(names[1]) as producer,
        ):
            for round_ in range(ROUNDS):
                put_groups(names[0], f"{round_}.", groups)
                ids = [head.id for head in reader.poll(1 << 20)]
                at = [time.perf_counter()]
                block = reader.export(ids, room)
                at.append(time.perf_counter())
                _core.check_block(block)
                at.append(time.perf_counter())
                count = _core.import_block(producer, block, 0, len(ids), 0.0)
                at.append(time.perf_counter())
                if count != len(ids):
                    raise RuntimeError(f"expected {len(ids)} records to be put, got {count}")
                for name, began, ended in zip(took_us, at, at[1:], strict=False):
                    took_us[name].append((ended - began) / count * 1e6)
                reader.release(ids)
                taker.release([head.id for head in taker.poll(1 << 20)])
    finally:
        for bus in buses:
            bus.unlink()
    return {f"{name}_us": sorted(each)[len(each) // 2] for name, each in took_us.items()}
