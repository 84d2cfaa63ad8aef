"""Opens and closes everything many times, as a program: prints what is left as one JSON line.

Usage: ``python tests/process/leaks.py NAME CYCLES``. Descriptors, mappings, files in /dev/shm and
Python objects are counted after a warm-up and at the end.
"""

import contextlib
import gc
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np

import shmbus

WARM_UP = 50
DATA = np.arange(500, dtype=np.int32)


def cycle(name: str, number: int) -> None:
    """Create, attach, put in every way, take, hold views over a close, acknowledge, remove."""
    with shmbus.Bus.create(name, "256KiB", max_producers=2):
        consumer = shmbus.Consumer(name)
        with shmbus.Producer(name) as producer:
            producer.put("a", group_size=1, index=0, data=DATA, meta={"n": number})
            with producer.reserve(
                "b", group_size=1, index=0, fields={"data": ("int32", (5, 7))}
            ) as slot:
                slot["data"][:] = number
                kept = slot["data"][1:]
            producer.put_many([{"instance_id": "c", "group_size": 1, "index": 0, "data": DATA}])
            producer.reserve("d", group_size=1, index=0, fields={"data": ("u1", 9)}).abort()
            with contextlib.suppress(ValueError):
                producer.put("e", group_size=0, index=0, data=DATA)
        groups = consumer.take(8, timeout=1)
        views = [group[0]["data"] for group in groups]
        assert len(groups) == 3 and groups[0][0].meta == {"n": number}
        groups[0].ack()
        groups[1].give_back()
        consumer.close()
        assert int(views[0].sum()) == int(DATA.sum()) and kept.shape == (4, 7)


def counts(name: str) -> dict[str, int]:
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().splitlines()
    if any("libasan" in line for line in mappings):
        # Its shadow and its heap grow by mappings of their own.
        mappings = [line for line in mappings if "/" in line]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(mappings),
        "segments": len(list(Path("/dev/shm").glob(f"shmbus.{name}*"))),
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
    }


def main() -> None:
    name, cycles = sys.argv[1], int(sys.argv[2])
    for number in range(WARM_UP):
        cycle(name, number)
    found = [counts(name)]
    for number in range(cycles):
        cycle(name, number)
        if number in (cycles // 3, 2 * cycles // 3, cycles - 1):
            found.append(counts(name))
    report = {"cycles": cycles} | {key: found[-1][key] - found[0][key] for key in found[0]}
    # The C library keeps stacks and heaps of threads that have ended, and more of them when threads
    # overlap for the first time: what leaks grows in each third.
    report["mappings"] = min(b["mappings"] - a["mappings"] for a, b in itertools.pairwise(found))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
