"""Rates of the GPU path: ``python -m bench.gpu``, on a machine with a CUDA device.

*Gather*: records of the ring become packed batches on the device, beside the pinned host-to-device
rate of the same run. Counted are the bytes on the wire, 9 a token for the gather and 25 for the
other transports. Rates are of wall-clock time over many batches, two under way at a time.
"""

import argparse
import os
import secrets
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

import shmbus
from bench import program
from bench.processes import MeasurementError
from bench.row import Row, skipped
from bench.workload import BYTES_PER_TOKEN, GROUP_SIZE
from trainer_adapter.batches.pack import pack
from trainer_adapter.gpu.gather import Pending
from trainer_adapter.gpu.packer import GpuPacker

__all__ = ["main"]

#: Tokens of a record: 18 KB.
TOKENS: Final = 2048
#: Groups of a batch by row name; "large": the whole ring by turns of four.
BATCHES: Final = {"64k": 4, "256k": 16, "1M": 64, "large": 0}
#: Least batches of a run, repeated if necessary: the device idles during the first plan, a cost of
#: the start alone.
LEAST_BATCHES: Final = 40
WARM_UP: Final = 3
REPETITIONS: Final = 20
#: Bytes of a pinned copy: far beyond the cost of a launch.
PINNED_BYTES: Final = 256 << 20


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure all transports."""
    if not torch.cuda.is_available():
        return [skipped("gpu", "the GPU path", "needs a CUDA device, torch sees none")]
    repetitions = options.repetitions or (3 if options.tiny else REPETITIONS)
    return _transfer(options.capacity, repetitions)


def _transfer(capacity: str, repetitions: int) -> list[Row]:
    name = f"bench-gpu-{os.getpid()}-{secrets.token_hex(3)}"
    rows = []
    with shmbus.Bus.create(name, capacity) as bus:
        room = bus.capacity * 8 // 10 // (TOKENS * BYTES_PER_TOKEN + 256)
        count = room // (2 * GROUP_SIZE) * (2 * GROUP_SIZE)
        _fill(name, count)
        with shmbus.Consumer(name) as consumer:
            groups: list[shmbus.Group] = []
            while len(groups) < count // GROUP_SIZE:
                groups += consumer.take(1024, 10.0)
            for transport in ("gather", "pinned", "copy"):
                for size, per_batch in BATCHES.items():
                    each = per_batch or len(groups) // 4
                    rows.append(_one_transport(groups, transport, size, each, repetitions))
            consumer.ack(groups)
    return rows


def _fill(name: str, count: int) -> None:
    """Put distinct records: a wrong batch shows."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 150_000, TOKENS, np.int32)
    mask = (rng.random(TOKENS) < 0.9).astype(np.uint8)
    logprobs = -rng.random(TOKENS, np.float32)
    with shmbus.Producer(name) as producer:
        for number in range(count):
            producer.put(
                f"p{number // GROUP_SIZE}",
                group_size=GROUP_SIZE,
                index=number % GROUP_SIZE,
                score=float(number % 5),
                tokens=tokens + np.int32(number),
                loss_mask=mask,
                logprobs=logprobs,
                timeout=10.0,
            )


def _pinned_gb_per_s(repetitions: int) -> float:
    host = torch.ones(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda")
    seconds = _device_seconds(lambda: device.copy_(host, non_blocking=True), repetitions)
    return PINNED_BYTES / statistics.median(seconds) / 1e9


def _one_transport(
    groups: list[shmbus.Group], transport: Any, size: str, per_batch: int, repetitions: int
) -> Row:
    cuts = range(0, len(groups) - per_batch + 1, per_batch)
    batches = [groups[at : at + per_batch] for at in cuts]
    width = BYTES_PER_TOKEN if transport == "gather" else 25
    moved = per_batch * GROUP_SIZE * TOKENS * width
    rates, cpu_us, pinned = [], [], [_pinned_gb_per_s(repetitions)]
    packer = GpuPacker("cuda", transport=transport)
    try:
        first, want = packer.pack(batches[-1]), pack(batches[-1])
        for name in ("tokens", "position_ids", "loss_mask", "logprobs", "advantages"):
            if not torch.equal(getattr(first, name).cpu(), getattr(want, name)):
                raise MeasurementError(f"{transport}: another {name} than packing by the processor")
        for _ in range(max(3, repetitions // 2)):
            count, seconds, cpu_s = _run(packer, batches)
            rates.append(count * moved / seconds / 1e9)
            cpu_us.append(cpu_s / count * 1e6)
        pinned.append(_pinned_gb_per_s(repetitions))
    finally:
        packer.close()
    tokens = per_batch * GROUP_SIZE * TOKENS
    return Row(
        name=f"gpu-{transport}-{size}",
        title=f"ring to device by {transport}, {tokens:,} tokens a batch",
        unit="GB/s", values=tuple(rates), beside="a pinned copy",
        beside_values=(statistics.mean(pinned),),
        note=f"{statistics.median(cpu_us):.0f} us of a processor a batch",
    )  # fmt: skip


def _run(packer: GpuPacker, batches: list[list[shmbus.Group]]) -> tuple[int, float, float]:
    """Transfer the batches, two under way; return their count, seconds and processor seconds."""
    rounds = -(-LEAST_BATCHES // len(batches))
    waiting: deque[Pending] = deque()
    torch.cuda.synchronize()
    began, began_cpu = time.perf_counter(), time.process_time()
    for batch in batches * rounds:
        waiting.append(packer.begin(batch))
        if len(waiting) > 1:
            waiting.popleft().finish()
    waiting.popleft().finish()
    return (
        len(batches) * rounds, time.perf_counter() - began, time.process_time() - began_cpu
    )  # fmt: skip


def _device_seconds(work: Callable[[], object], turns: int) -> list[float]:
    """Return the device seconds of each turn of the work, by events on the current stream."""
    seconds = []
    for _ in range(turns + WARM_UP):
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        events[0].record()
        work()
        events[1].record()
        torch.cuda.synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1e3)
    return seconds[WARM_UP:]


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    made = program.parser_of("gpu", __doc__)
    made.add_argument(
        "--capacity", type=program.capacity, default="512MiB", help="of the ring (512MiB)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("gpu", parser(), measure, argv)


if __name__ == "__main__":
    sys.exit(main())
