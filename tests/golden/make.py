"""Make the golden bytes of the segment: places of shared fields, and results of puts.

`python tests/golden/make.py` writes layout-VERSION.json anew. A difference from the present file
means changed bytes, and they need a new SHMBUS_LAYOUT_VERSION (layout.h).
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shmbus
from shmbus.inspect.segment_file import SegmentFile
from shmbus_ext import _core

HERE = Path(__file__).parent
#: Of a record's header: the time of its commit, and the checksum over it.
VARYING = (slice(80, 88), slice(124, 128))
ROW = 16

PUTS: dict[str, Callable[[shmbus.Producer], Any]] = {
    "as LAYOUT.md has it": lambda producer: producer.put(
        "gsm8k-17", group_size=8, index=3, score=1.0, policy_version=12,
        tokens=np.array([1, 2, 3], np.int32),
    ),
    "a round, meta, two fields, one of two dimensions": lambda producer: producer.put(
        "a", group_size=2, index=1, score=-0.5, round=7, meta={"turns": [1, None, "x"]},
        tokens=np.arange(5, dtype=np.int64), logits=np.full((2, 3), 0.25, np.float16),
    ),
    "a failure": lambda producer: producer.fail("a", 0, "out of time"),
}  # fmt: skip


def record_of(name: str, put: Callable[[shmbus.Producer], Any], checksum: bool) -> list[str]:
    """Return the bytes of the first record of a new bus, without the varying fields."""
    with shmbus.Bus.create(name, "1MiB"), shmbus.Producer(name, checksum=checksum) as producer:
        put(producer)
        segment = SegmentFile(name)
        (run,) = (run for run in segment.runs() if run.used)
        record = bytearray(os.pread(segment.fd, run.used, segment.position(run.extent)))
    for part in VARYING:
        record[part] = bytes(part.stop - part.start)
    return [record[at : at + ROW].hex(" ") for at in range(0, len(record), ROW)]


def golden(name: str) -> dict[str, Any]:
    tables = {
        table: {
            "bytes": note["itemsize"],
            "fields": [
                f"{offset} {kind} {field}"
                for field, kind, offset in zip(
                    note["names"], note["formats"], note["offsets"], strict=True
                )
            ],
        }
        for table, note in _core.layout().items()
    }
    records = {
        f"{title}{', checksum' if checksum else ''}": record_of(name, put, checksum)
        for title, put in PUTS.items()
        for checksum in (False, True)
    }
    return {"layout_version": _core.LAYOUT_VERSION, "tables": tables, "records": records}


def path() -> Path:
    return HERE / f"layout-{_core.LAYOUT_VERSION}.json"


if __name__ == "__main__":
    path().write_text(json.dumps(golden(f"golden.{os.getpid()}"), indent=1) + "\n")
    sys.stdout.write(f"{path().name}\n")
