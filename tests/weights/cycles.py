"""Count leftovers of weight cycles, and exit with 1 at growth: ``cycles.py BUS CYCLES``."""

import os
import resource
import sys
from pathlib import Path

import torch
from weight_models import many, same, step

from shmbus.pool.pool_file import pool_path
from shmbus.weights import ManifestError, ModuleSource, WeightPublisher, WeightSubscriber

#: Cycles before the first count: caches and arenas fill.
WARM = 40  # a multiple of ten, as CYCLES should be: every tenth cycle removes the weights
#: KiB that a process may grow by the allocator's own rounding.
SPARE_KIB = 4096


def figures(bus: str) -> dict[str, int]:
    with Path("/proc/self/maps").open() as maps:
        mapped = sum("/dev/shm/shmbus" in line for line in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings of pools": mapped,
        "files": sum(bus in name for name in os.listdir("/dev/shm")),
        "memory, KiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def cycle(bus: str, number: int, made: torch.Generator) -> None:
    """Everything once; each publication with a patch where a base exists."""
    model, replica = many(12, number % 7), many(12, 99)
    publisher = WeightPublisher(
        bus, ModuleSource(model), patches=0.3, keep=number % 10 != 9, digests=number % 2 == 0
    )
    with publisher, WeightSubscriber(bus) as subscriber:
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
                raise AssertionError("a model that does not fit was loaded")


def main(bus: str, cycles: int) -> int:
    made = torch.Generator().manual_seed(1)
    torch.set_num_threads(1)
    before: dict[str, int] = {}
    try:
        for number in range(WARM + cycles):
            if number == WARM:
                before = figures(bus)
            cycle(bus, number, made)
        after = figures(bus)
    finally:
        Path(pool_path(bus, "weights")).unlink(missing_ok=True)
    grown = {
        name: (before[name], after[name])
        for name in before
        if after[name] > before[name] + (SPARE_KIB if "KiB" in name else 0)
    }
    print(f"{cycles} cycles: before {before}, after {after}, grown {grown}", flush=True)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
