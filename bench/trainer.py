"""The trainer's side on one core: packing against memcpy, and what the handler adds to a batch.

``python -m bench.trainer --output bench/results/NAME.json [--plot NAME.png]``.

- *Packing*: leased groups of 2,048-token records into batches of 65,536 tokens in reused memory;
  bytes of batch (25 a token) a second, against memcpy in the same process. Cold: more records than
  any cache holds. Warm: those of one batch again and again, as where the trainer keeps up with what
  was just written. The target is about the cold ones.
- *Routed experts*: the same with 48 layers of 8 experts a token as an extra field, 786 KB a record:
  bytes of all that the batch holds a second, against the rate of memcpy of the experts alone, from
  the ring into such memory, pass by pass in turns.
- *Overhead*: from the call of ``ack`` for one batch to the return of ``next_batch`` with the next.
  Of a handler with ``prefetch=1``, once the next batch is ready; of a plain one, less what the same
  call of `pack` takes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

import shmbus
from bench import command, machine
from bench.fitness import Need
from bench.needs_torch import torch
from bench.sending import bus_bytes
from bench.workload import GROUP_SIZE
from shmbus._arguments import parse_size
from trainer_adapter import OnlineDataHandler
from trainer_adapter.batches.memory import BatchMemory
from trainer_adapter.batches.pack import pack

__all__ = ["main"]

TOKENS: Final = 2048
BATCH_TOKENS: Final = 65_536
BYTES_PER_PACKED_TOKEN: Final = 25
MEMCPY_BYTES: Final = 256 << 20
PACKING_TARGET: Final = 1.5
#: Of cold packing: more than any cache holds, and what a ring takes for so many.
RECORDS: Final = 8000
LEAST_BYTES: Final = 192 << 20
#: Of the largest ring but `--capacity`'s.
ROWS_CAPACITY: Final = "384MiB"
EXPERTS: Final = (48, 8)
EXPERTS_TARGET: Final = 0.9
OVERHEAD_TARGET_US: Final = 100.0


@command.orderly("trainer")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.trainer", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--output", type=command.file, help="where the JSON goes")
    parser.add_argument("--plot", type=command.picture, help="where a picture goes")
    parser.add_argument(
        "--capacity", type=command.capacity, default="384MiB", help="of the ring (384MiB)"
    )
    options = parser.parse_args(argv)
    ring, rows = bus_bytes(options.capacity), bus_bytes(ROWS_CAPACITY)
    if (given := parse_size(options.capacity)) < LEAST_BYTES:
        parser.error(
            f"--capacity: expected {LEAST_BYTES >> 20} MiB or more, which hold {RECORDS:,} records "
            f"that no cache holds, got {given / 2**20:g}"
        )
    less = "--capacity" if ring > rows else ""
    if command.refused(Need(shm_bytes=max(ring, rows), less=less), "trainer"):
        return 1
    torch.set_num_threads(1)
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    before = _memcpy()
    packing, warm = _packing(options.capacity)
    after = _memcpy()
    experts, experts_memcpy = _experts()
    memcpy = (before + after) / 2
    ready_us = _overhead(prefetch=1)
    plain_us = _overhead(prefetch=0)
    result: dict[str, Any] = {
        "machine": facts,
        "memcpy_gb_per_s": [before / 1e9, after / 1e9],
        "packing_gb_per_s": packing / 1e9,
        "packing_of_memcpy": packing / memcpy,
        "packing_warm_gb_per_s": warm / 1e9,
        "packing_warm_of_memcpy": warm / memcpy,
        "packing_target": PACKING_TARGET,
        "experts_gb_per_s": experts / 1e9,
        "experts_memcpy_gb_per_s": experts_memcpy / 1e9,
        "experts_of_memcpy": experts / experts_memcpy,
        "experts_target": EXPERTS_TARGET,
        "overhead_us": {"ready": ready_us, "plain_less_pack": plain_us},
        "overhead_target_us": OVERHEAD_TARGET_US,
    }
    print(
        f"memcpy {before / 1e9:.1f} and {after / 1e9:.1f} GB/s\n"
        f"packing {packing / 1e9:.1f} GB/s of batch, {packing / memcpy:.2f} of memcpy "
        f"(target: at least {PACKING_TARGET}); of warm records {warm / memcpy:.2f}\n"
        f"with routed experts {experts / 1e9:.1f} GB/s, {experts / experts_memcpy:.2f} of memcpy's "
        f"{experts_memcpy / 1e9:.1f} (target: at least {EXPERTS_TARGET})\n"
        f"between two batches: {ready_us:.0f} us where the next is ready, {plain_us:.0f} us and "
        f"its packing where not (target: at most {OVERHEAD_TARGET_US:.0f})"
    )
    if status := command.keep(options.output, result, "trainer"):
        return status
    if options.plot:
        _plot(result, options.plot)
    met = packing / memcpy >= PACKING_TARGET and experts / experts_memcpy >= EXPERTS_TARGET
    return 0 if met and ready_us <= OVERHEAD_TARGET_US else 1


def _memcpy() -> float:
    source, target = np.ones(MEMCPY_BYTES, np.uint8), np.ones(MEMCPY_BYTES, np.uint8)
    seconds = []
    for _ in range(15):
        began = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, MEMCPY_BYTES)
        seconds.append(time.perf_counter() - began)
    return MEMCPY_BYTES / statistics.median(seconds)


@contextmanager
def _filled_bus(capacity: str, records: int, **more: Any) -> Iterator[str]:
    name = f"bench-trainer-{os.getpid()}-{secrets.token_hex(3)}"
    tokens = np.arange(TOKENS, dtype=np.int32)
    mask = np.ones(TOKENS, np.uint8)
    logprobs = np.full(TOKENS, -0.5, np.float32)
    with shmbus.Bus.create(name, capacity), shmbus.Producer(name) as producer:
        for number in range(records):
            producer.put(
                f"p{number // GROUP_SIZE}",
                group_size=GROUP_SIZE,
                index=number % GROUP_SIZE,
                score=float(number % 3),
                tokens=tokens,
                loss_mask=mask,
                logprobs=logprobs,
                timeout=10.0,
                **more,
            )
        yield name


def _packing(capacity: str) -> tuple[float, float]:
    """Return bytes of batch a second, from cold and from warm records."""
    per_batch = BATCH_TOKENS // TOKENS // GROUP_SIZE
    records = RECORDS
    memory = BatchMemory()
    with _filled_bus(capacity, records) as name, shmbus.Consumer(name) as consumer:
        groups: list[shmbus.Group] = []
        while len(groups) < records // GROUP_SIZE:
            groups += consumer.take(1024, 10.0)
        batches = [groups[at : at + per_batch] for at in range(0, len(groups), per_batch)]
        rates: dict[str, list[float]] = {"cold": [], "warm": []}
        for _ in range(10):
            for kind, chosen in (("cold", batches), ("warm", batches[:1] * len(batches))):
                began = time.perf_counter()
                for batch in chosen:
                    pack(batch, memory=memory)
                seconds = time.perf_counter() - began
                rates[kind].append(records * TOKENS * BYTES_PER_PACKED_TOKEN / seconds)
    return statistics.median(rates["cold"]), statistics.median(rates["warm"])


def _experts() -> tuple[float, float]:
    """Return bytes a second of batches with routed experts, and of memcpy of the experts."""
    per_batch = BATCH_TOKENS // TOKENS // GROUP_SIZE
    batches = 8
    records = batches * per_batch * GROUP_SIZE
    values = np.random.default_rng(0).integers(0, 128, (TOKENS, *EXPERTS), np.uint8)
    wanted: dict[str, Any] = {"routed_experts": "token"}
    memory, plain = BatchMemory(), BatchMemory()
    with (
        _filled_bus(ROWS_CAPACITY, records, routed_experts=values) as name,
        shmbus.Consumer(name) as consumer,
    ):
        groups: list[shmbus.Group] = []
        while len(groups) < records // GROUP_SIZE:
            groups += consumer.take(1024, 10.0)
        chosen = [groups[at : at + per_batch] for at in range(0, len(groups), per_batch)]
        sources = [
            [t["routed_experts"].ctypes.data for group in batch for t in group] for batch in chosen
        ]
        packed_s, copied_s = [], []
        for _ in range(15):
            began = time.perf_counter()
            for batch in chosen:
                pack(batch, memory=memory, extra_fields=wanted)
            between = time.perf_counter()
            for addresses in sources:
                to = plain.take(len(addresses) * values.nbytes).ctypes.data
                for number, address in enumerate(addresses):
                    ctypes.memmove(to + number * values.nbytes, address, values.nbytes)
            packed_s.append(between - began)
            copied_s.append(time.perf_counter() - between)
    nbytes = records * values.nbytes
    more = records * TOKENS * BYTES_PER_PACKED_TOKEN
    return (nbytes + more) / statistics.median(packed_s), nbytes / statistics.median(copied_s)


def _overhead(prefetch: int) -> float:
    """Return the microseconds from one batch to the next."""
    per_batch = BATCH_TOKENS // TOKENS // GROUP_SIZE
    count = 200
    overheads = []
    with (
        _filled_bus("256MiB", count * per_batch * GROUP_SIZE) as name,
        OnlineDataHandler(name, groups_per_batch=per_batch, prefetch=prefetch) as handler,
    ):
        memory = BatchMemory()
        batch = handler.next_batch(10)
        for _ in range(count - 2):
            if handler._prefetcher is not None:
                while not handler._prefetcher.ready:
                    time.sleep(1e-4)
            began = time.perf_counter()
            handler.ack(batch)
            batch = handler.next_batch(10)
            seconds = time.perf_counter() - began
            if not prefetch:
                began = time.perf_counter()
                pack(batch.groups, memory=memory)
                seconds -= time.perf_counter() - began
            overheads.append(seconds * 1e6)
        handler.ack(batch)
    return statistics.median(overheads)


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3))
    memcpy = statistics.mean(result["memcpy_gb_per_s"])
    rates = [memcpy, result["packing_gb_per_s"], result["packing_warm_gb_per_s"]]
    left.bar(["memcpy", "packing, cold", "warm"], rates, color=["0.6", "C0", "C0"])
    left.axhline(memcpy * PACKING_TARGET, color="C3", linestyle=":", label="target")
    left.set_ylabel("GB/s, one core")
    left.legend()
    names = ["next is ready", "plain, less packing"]
    values = list(result["overhead_us"].values())
    right.bar(names, values, color="C0")
    right.axhline(OVERHEAD_TARGET_US, color="C3", linestyle=":", label="target")
    right.set_ylabel("us between two batches")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
