"""What the core's part of a hop takes, a record at a time, with blocks of each transport's size.

Put, export, check, import and take with acknowledgement: all that copies or reads payload but for
the transport itself. Nothing of a relay's own work on heads is here.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any, Final

import shmbus
from bench.relay.bounds import RECORD, SIZE
from bench.relay.hop import put_groups, take_groups
from shmbus.relay.host import DIRECT_BLOCK_BYTES
from shmbus.relay.sink import BLOCK_BYTES
from shmbus_ext import _core

__all__ = ["parts"]

CAPACITY: Final = "128MiB"
#: Bytes of each part's blocks in all.
TOTAL: Final = 512 << 20
#: Rooms that a source uses by turns.
ROOMS: Final = 3
SIZES: Final = {"ray": BLOCK_BYTES, "direct": DIRECT_BLOCK_BYTES}
STEPS: Final = ("put", "export", "check", "import", "take")


def parts() -> dict[str, dict[str, float]]:
    """Return microseconds a record of each step, the median of many blocks; by transport."""
    return {transport: _parts(size) for transport, size in SIZES.items()}


def _parts(block_bytes: int) -> dict[str, float]:
    names = [f"bench-parts-{os.getpid()}.{each}" for each in ("from", "to")]
    buses = [shmbus.Bus.create(name, CAPACITY) for name in names]
    took_us: dict[str, list[float]] = {step: [] for step in STEPS}
    groups = block_bytes // (RECORD * SIZE)
    rooms = [bytearray(block_bytes + (1 << 20)) for _ in range(ROOMS)]
    try:
        with (
            shmbus.RecordReader(names[0]) as reader,
            shmbus.Consumer(names[1]) as consumer,
            shmbus.Producer(names[1]) as producer,
        ):
            for round_ in range(TOTAL // block_bytes):
                at = [time.perf_counter()]
                put_groups(names[0], f"{round_}.", groups)
                at.append(time.perf_counter())
                ids = [head.id for head in reader.poll(1 << 20)]
                found = _through(reader, producer, ids, rooms[round_ % ROOMS])
                before_take = time.perf_counter()
                take_groups(consumer, groups)
                spent = [at[1] - at[0], *found, time.perf_counter() - before_take]
                for step, each in zip(STEPS, spent, strict=True):
                    took_us[step].append(each / len(ids) * 1e6)
                reader.release(ids)
    finally:
        for bus in buses:
            bus.unlink()
    return {f"{step}_us": sorted(each)[len(each) // 2] for step, each in took_us.items()}


def _through(
    reader: shmbus.RecordReader, producer: Any, ids: list[tuple[int, int]], room: bytearray
) -> list[float]:
    """Export, check and import a block; return the seconds of each."""
    at = [time.perf_counter()]
    block = reader.export(ids, room)
    at.append(time.perf_counter())
    _core.check_block(block)
    at.append(time.perf_counter())
    count = _core.import_block(producer, block, 0, len(ids), 0.0)
    at.append(time.perf_counter())
    if count != len(ids):
        raise RuntimeError(f"expected {len(ids)} records to be put, got {count}")
    return [after - before for before, after in itertools.pairwise(at)]
