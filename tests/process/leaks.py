"""Opens and closes everything many times, as a program: prints the growth as one JSON line.

Usage: ``python tests/process/leaks.py NAME CYCLES [weights]``, in tens of cycles. Descriptors,
mappings, files in /dev/shm, memory and Python objects are counted after a warm-up and at the end.
"""

import contextlib
import gc
import itertools
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import shmbus

#: Caches and arenas fill meanwhile.
WARM_UP = 50
DATA = np.arange(500, dtype=np.int32)


def bus_cycle(name: str, number: int) -> None:
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


def weight_cycle(name: str, number: int) -> None:
    """Publish, patch, load, refuse a misfit; every tenth publisher removes the weights."""
    import torch
    from weight_models import many, same, step

    from shmbus.weights import ManifestError, ModuleSource, WeightPublisher, WeightSubscriber

    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(number)
    model, replica = many(12, number % 7), many(12, 99)
    publisher = WeightPublisher(
        name, ModuleSource(model), patches=0.3, keep=number % 10 != 9, digests=number % 2 == 0
    )
    with publisher, WeightSubscriber(name) as subscriber:
        for version in range(3):
            step(model, made, 0.02)
            publisher.publish(version=version)
            with subscriber.latest(timeout=10) as weights:
                weights.load_into(replica)
                view = weights["p3"]
            assert same(model, replica) and view.numel()
            del view
        with subscriber.latest(timeout=10) as weights:
            try:
                weights.load_into({"other": torch.zeros(3)})
            except ManifestError:
                pass
            else:
                raise AssertionError("a misfit was loaded")


def counts(name: str) -> dict[str, int]:
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().splitlines()
    if any("libasan" in line for line in mappings):
        # Its shadow and its heap grow by mappings of their own.
        mappings = [line for line in mappings if "/" in line]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(mappings),
        "files": sum(name in path.name for path in Path("/dev/shm").iterdir()),
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "memory_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def growth(name: str, cycles: int, cycle: Callable[[str, int], None]) -> dict[str, int]:
    for number in range(WARM_UP):
        cycle(name, number)
        gc.collect()  # the peak of memory must not depend on the collector's turns
    found = [counts(name)]
    for number in range(cycles):
        cycle(name, number)
        gc.collect()
        if number in (cycles // 3, 2 * cycles // 3, cycles - 1):
            found.append(counts(name))
    report = {"cycles": cycles} | {key: found[-1][key] - found[0][key] for key in found[0]}
    # The C library keeps stacks and heaps of threads that have ended, and more of them when threads
    # overlap for the first time: what leaks grows in each third.
    report["mappings"] = min(b["mappings"] - a["mappings"] for a, b in itertools.pairwise(found))
    return report


if __name__ == "__main__":
    bus, count, *kind = sys.argv[1:]
    if kind:
        sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
    print(json.dumps(growth(bus, int(count), weight_cycle if kind else bus_cycle)))
