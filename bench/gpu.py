"""What the GPU path gives: ``python -m bench.gpu --output bench/results/NAME.json``, on a GPU.

Two parts. *Transfer*: records that lie in the ring become packed batches on the device, by each
transport, against the pinned host-to-device rate of the same run. *Attention*: `varlen_attention`
by SDPA against the native kernel, forward and backward, time and peak memory.

Method: rates are of wall-clock time over many batches, two under way at a time, and count what
crosses to the device (9 bytes a token for "gather", 25 for the others, whose rate in records is
given too). A batch is there when its memory is; its tensors are views that are made when they are
asked for, and `views_us` is what all of them take. CPU time is that of the whole process, of groups
that lie ready under lease: what the bus takes to deliver and acknowledge them has a row of its own.
So have advantages and masks, which the gather's own launch makes: beside them stands what launches
of their own take on the device and of the host. So has a trainer's pace: a batch now and then,
where the first figures are of one batch behind the other. `begin_us` and `finish_us` are the
packing thread's share of it, a batch. The attention backends take turns; a time is that of a step
alone, which waits for the host to begin, and `device_ms` that of one whose launches are queued
already, as those of a model's layers are. A figure is the median of its repetitions.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import shmbus
from bench import command, gpu_plot, machine
from bench.needs_torch import torch
from bench.workload import BYTES_PER_TOKEN, GROUP_SIZE
from trainer_adapter.attention import attention_backend, varlen_attention
from trainer_adapter.batches.batch import IN_BLOCK, Batch
from trainer_adapter.batches.pack import pack
from trainer_adapter.gpu.memory import Staging
from trainer_adapter.gpu.packer import GpuPacker, Pending, begin_gather

__all__ = ["main"]

#: Tokens of a record: 18 KB.
TOKENS: Final = 2048
#: Groups of a batch: 64k, 256k and 1M tokens. Another size is a quarter of all there are: what a
#: rank of a big job has.
SMALL_BATCHES: Final = (4, 16, 64)
#: Batches of a run at least, the same ones again where there are fewer: while the first is planned
#: the device has nothing to do, which tells of a start and not of what follows.
LEAST_BATCHES: Final = 40
#: A trainer's pace, beyond what any single machine trains: seconds from batch to batch, of so many
#: groups (a million tokens), and how many of them.
PACE_S: Final = 0.05
PACED_GROUPS: Final = 64
PACED_BATCHES: Final = 40
#: Clock cycles that a device sleeps while the host plans: some 15 ms.
AHEAD_CYCLES: Final = 30_000_000
#: Steps before those that count.
WARM_UP: Final = 3
#: Turns of each attention backend, times the repetitions.
TURNS: Final = 2
#: Bytes of one pinned copy: far beyond all that a launch costs.
PINNED_BYTES: Final = 256 << 20
#: Heads and their size in the attention rows.
HEADS, HEAD_DIM = 16, 128
#: Targets: share of the pinned rate, less where a batch has so few tokens; SDPA's time and memory
#: over the native kernel's.
TRANSFER_TARGET: Final = 0.9
TRANSFER_TARGETS: Final = {65_536: 0.3, 262_144: 0.7}
TIME_TARGET: Final = 1.1
TIME_TARGET_SHORT: Final = 1.2
MEMORY_TARGET: Final = 1.15


@command.orderly("gpu")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the JSON; exit status 1 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=command.file, help="where the JSON goes")
    parser.add_argument("--plot", type=command.picture, help="where a picture goes")
    parser.add_argument(
        "--capacity", type=command.capacity, default="512MiB", help="of the ring (512MiB)"
    )
    parser.add_argument("--repetitions", type=command.at_least_one, default=20)
    parser.add_argument("--only", choices=["transfer", "attention"])
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        lacks = f"torch {torch.__version__} sees none; nvidia-smi says whether the machine has one"
        sys.exit(f"gpu: cannot be measured here: needs a CUDA device, {lacks}")
    facts = {**machine.describe(), **_gpu_facts()}
    result: dict[str, Any] = {"machine": facts, "transfer": [], "attention": []}
    print(f"{facts['gpu']}, torch {facts['torch']}, CUDA {facts['cuda']}", flush=True)
    if options.only != "attention":
        result["transfer"] = _transfer(options.capacity, options.repetitions)
    if options.only != "transfer":
        result["attention"] = _attention(options.repetitions)
    for row in (*result["transfer"], *result["attention"]):
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
    if status := command.keep(options.output, result, "gpu"):
        return status
    if options.plot:
        gpu_plot.plot(result, options.plot, TRANSFER_TARGET)
    return 0


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _gpu_facts() -> dict[str, Any]:
    try:
        import triton
    except ImportError:
        version = None
    else:
        version = triton.__version__
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "cuda": torch.version.cuda,
        "triton": version,
    }


# --- from the ring to the device


def _transfer(capacity: str, repetitions: int) -> list[dict[str, Any]]:
    name = f"bench-gpu-{os.getpid()}-{secrets.token_hex(3)}"
    with shmbus.Bus.create(name, capacity) as bus:
        room = bus.capacity * 8 // 10 // (TOKENS * BYTES_PER_TOKEN + 256)
        count = room // (2 * GROUP_SIZE) * (2 * GROUP_SIZE)
        _fill(name, count)
        with shmbus.Consumer(name) as consumer:
            groups: list[shmbus.Group] = []
            began_cpu = time.thread_time()
            while len(groups) < count // GROUP_SIZE:
                groups += consumer.take(1024, 10.0)
            bus_cpu = time.thread_time() - began_cpu
            rows = [_pinned_copy(repetitions)]
            for transport in ("gather", "pinned", "copy"):
                for per_batch in (*SMALL_BATCHES, len(groups) // 4):
                    rows.append(_one_transport(groups, transport, per_batch, repetitions))
            paced = [_paced(groups, transport) for transport in ("gather", "pinned", "copy")]
            fused = _fused(groups, repetitions)
            rows.append(_pinned_copy(repetitions))
            began_cpu = time.thread_time()
            consumer.ack(groups)
            bus_cpu += time.thread_time() - began_cpu
    pinned = statistics.mean([rows[0]["gb_per_s"], rows[-1]["gb_per_s"]])
    for row in rows:
        row["of_pinned"] = row["gb_per_s"] / pinned
        if row["what"] == "gather":
            row["target"] = TRANSFER_TARGETS.get(row["tokens_per_batch"], TRANSFER_TARGET)
    of_bus = {"what": "the bus: take and acknowledge", "cpu_us_per_record": bus_cpu / count * 1e6}
    return [*rows, *paced, fused, of_bus]


def _fill(name: str, count: int) -> None:
    """Put records that all differ, so that a wrong batch would show."""
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


def _pinned_copy(repetitions: int) -> dict[str, Any]:
    host = torch.ones(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda")
    seconds = _device_seconds(lambda: device.copy_(host, non_blocking=True), repetitions)
    return {"what": "pinned host-to-device copy", "gb_per_s": PINNED_BYTES / seconds / 1e9}


def _one_transport(
    groups: list[shmbus.Group], transport: Any, per_batch: int, repetitions: int
) -> dict[str, Any]:
    cuts = range(0, len(groups) - per_batch + 1, per_batch)
    batches = [groups[at : at + per_batch] for at in cuts]
    packer = GpuPacker("cuda", transport=transport)
    try:
        first = packer.pack(batches[-1])
        want = pack(batches[-1])
        for name in ("tokens", "position_ids", "loss_mask", "logprobs", "advantages"):
            assert torch.equal(getattr(first, name).cpu(), getattr(want, name)), name
        runs = [_run(packer, batches) for _ in range(max(3, repetitions // 2))]
        runs.sort()
        seconds, cpu_s = runs[len(runs) // 2]
        begin_s, finish_s = _shares(packer, batches)
        alone = [_wall_seconds(lambda: packer.pack(batches[0])) for _ in range(repetitions)]
        kernel = _kernel_seconds(packer, batches[0], repetitions) if transport == "gather" else None
        views = [_views_seconds(packer.pack(batches[0])) for _ in range(repetitions)]
    finally:
        packer.close()
    tokens = len(batches) * per_batch * GROUP_SIZE * TOKENS
    width = BYTES_PER_TOKEN if transport == "gather" else 25
    row: dict[str, Any] = {
        "what": transport,
        "tokens_per_batch": per_batch * GROUP_SIZE * TOKENS,
        "gb_per_s": tokens * width / seconds / 1e9,
        "records_per_s": tokens / TOKENS / seconds,
        "cpu_s_per_s": cpu_s / seconds,
        "cpu_us_per_record": cpu_s / (tokens / TOKENS) * 1e6,
        "cpu_us_per_batch": cpu_s / len(batches) * 1e6,
        "begin_us": begin_s / len(batches) * 1e6,
        "finish_us": finish_s / len(batches) * 1e6,
        "one_batch_ms": statistics.median(alone) * 1e3,
    }
    if kernel is not None:
        batch_bytes = per_batch * GROUP_SIZE * TOKENS * width
        row["views_us"] = statistics.median(views) * 1e6
        row["device_ms"] = kernel * 1e3
        row["device_gb_per_s"] = batch_bytes / kernel / 1e9
    return row


def _paced(groups: list[shmbus.Group], transport: Any) -> dict[str, Any]:
    """Bring a batch every `PACE_S`; its processor time is all time of the process."""
    per_batch = min(PACED_GROUPS, len(groups))
    cuts = range(0, len(groups) - per_batch + 1, per_batch)
    batches = itertools.cycle([groups[at : at + per_batch] for at in cuts])
    packer = GpuPacker("cuda", transport=transport)
    try:
        for _ in range(WARM_UP):
            packer.pack(next(batches))
        began, began_cpu = time.perf_counter(), time.process_time()
        for number, batch in zip(range(PACED_BATCHES), batches, strict=False):
            time.sleep(max(0.0, began + number * PACE_S - time.perf_counter()))
            packer.pack(batch)
        cpu_s, seconds = time.process_time() - began_cpu, time.perf_counter() - began
    finally:
        packer.close()
    tokens = per_batch * GROUP_SIZE * TOKENS
    return {
        "what": f"{transport}, at a trainer's pace",
        "tokens_per_batch": tokens,
        "tokens_per_s": tokens * PACED_BATCHES / seconds,
        "cpu_s_per_s": cpu_s / seconds,
        "cpu_us_per_batch": cpu_s / PACED_BATCHES * 1e6,
    }


def _spread(lengths: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Write one number a sequence to each of its tokens that count."""
    scores = torch.ones(len(lengths), device=lengths.device)
    return torch.repeat_interleave(scores, lengths, output_size=len(mask)).mul_(mask)


def _fused(groups: list[shmbus.Group], repetitions: int) -> dict[str, Any]:
    """Say what advantages cost in the gather's launch, and with masks as launches of their own.

    The launch writes one number a sequence to each of its tokens, whichever rule made it; so what a
    rule costs there is the host's, and is told by a batch of the plain scores.
    """
    per_batch = min(PACED_GROUPS, len(groups))
    cuts = range(0, len(groups) - per_batch + 1, per_batch)
    batches = [groups[at : at + per_batch] for at in cuts]
    begin_us: dict[str, float] = {}
    for kind in ("none", "grpo"):
        packer = GpuPacker("cuda", transport="gather", advantages=kind)
        try:
            batch = packer.pack(batches[0])
            begin_us[kind] = _shares(packer, batches)[0] / len(batches) * 1e6
            spread = partial(_spread, batch.cu_seqlens.diff(), batch.loss_mask)
            device_s = _device_seconds(spread, repetitions, ahead=True)
            host_s = statistics.median(_wall_seconds(spread) for _ in range(repetitions))
            torch.cuda.synchronize()
            whole_s = _kernel_seconds(packer, batches[0], repetitions)
        finally:
            packer.close()
    return {
        "what": "advantages and masks, in the gather's launch",
        "tokens_per_batch": per_batch * GROUP_SIZE * TOKENS,
        "begin_us": begin_us["grpo"],
        "begin_us_of_plain_scores": begin_us["none"],
        "device_ms": whole_s * 1e3,
        "spread_device_ms": device_s * 1e3,
        "spread_host_us": host_s * 1e6,
    }


def _views_seconds(batch: Batch) -> float:
    """Time that it takes to ask a batch for each of its tensors."""
    return _wall_seconds(lambda: [getattr(batch, name) for name in IN_BLOCK])


def _wall_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _kernel_seconds(packer: GpuPacker, batch: list[shmbus.Group], repetitions: int) -> float:
    """Time that the device needs for a batch when it never waits for the host."""
    assert packer._ring is not None
    staging, shift = Staging(packer.device), packer._ring.device_shift
    stream = torch.cuda.current_stream()
    # One that nobody has is waited for.
    last: list[Pending] = []

    def work() -> None:
        last[:] = [
            begin_gather(batch, packer.device, stream=stream, device_shift=shift, staging=staging)
        ]

    return _device_seconds(work, repetitions, ahead=True)


def _run(packer: GpuPacker, batches: list[list[shmbus.Group]]) -> tuple[float, float]:
    """Bring all batches over, two under way; returns seconds and processor seconds of a round."""
    rounds = -(-LEAST_BATCHES // len(batches))
    waiting: deque[Pending] = deque()
    torch.cuda.synchronize()
    began, began_cpu = time.perf_counter(), time.process_time()
    for batch in batches * rounds:
        waiting.append(packer.begin(batch))
        if len(waiting) > 1:
            waiting.popleft().finish()
    waiting.popleft().finish()
    taken = time.perf_counter() - began, time.process_time() - began_cpu
    return taken[0] / rounds, taken[1] / rounds


def _shares(packer: GpuPacker, batches: list[list[shmbus.Group]]) -> tuple[float, float]:
    """Bring them over as `_run` does; returns processor seconds of a round's begins and finishes.

    To ask for this thread's time takes some of it.
    """
    rounds = -(-LEAST_BATCHES // len(batches))
    waiting: deque[Pending] = deque()
    of_begin = of_finish = 0.0
    for batch in [*batches * rounds, None]:
        at = time.thread_time()
        if batch is not None:
            waiting.append(packer.begin(batch))
        between = time.thread_time()
        while len(waiting) > (batch is not None):
            waiting.popleft().finish()
        of_begin += between - at
        of_finish += time.thread_time() - between
    return of_begin / rounds, of_finish / rounds


def _device_seconds(work: Callable[[], object], repetitions: int, *, ahead: bool = False) -> float:
    """Median time that the device needs for some work."""
    return float(
        statistics.median(_device_times(work, repetitions + WARM_UP, ahead=ahead)[WARM_UP:])
    )


def _device_times(work: Callable[[], object], turns: int, *, ahead: bool) -> list[float]:
    """Seconds that the device needs for some work, by events on the current stream.

    With `ahead`, the device is kept busy until the host has given it all of the work.
    """
    seconds = []
    for _ in range(turns):
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        if ahead:
            torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        events[0].record()
        work()
        events[1].record()
        torch.cuda.synchronize()
        seconds.append(events[0].elapsed_time(events[1]) / 1e3)
    return seconds


# --- attention


def _attention(repetitions: int) -> list[dict[str, Any]]:
    mixes = {
        "16 log-normal": (_log_normal(16, 27_120), TIME_TARGET),
        "64 log-normal": (_log_normal(64, 114_580), TIME_TARGET),
        "2,048 of 16 to 128": (
            np.random.default_rng(3).integers(16, 129, 2048),
            TIME_TARGET_SHORT,
        ),
    }
    rows: list[dict[str, Any]] = []
    for mix, (lengths, target) in mixes.items():
        operands = _operands(int(lengths.sum()))
        steps = {backend: _step(lengths, operands, backend) for backend in ("native", "sdpa")}
        of_mix: dict[str, dict[str, Any]] = {
            backend: {
                "what": f"attention, {mix}",
                "backend": backend,
                "tokens": int(lengths.sum()),
                "longest": int(lengths.max()),
                **({"skipped": step} if isinstance(step, str) else {"peak_gib": _peak(step)}),
            }
            for backend, step in steps.items()
        }
        runs = {backend: step for backend, step in steps.items() if not isinstance(step, str)}
        for figure, ahead in (("ms", False), ("device_ms", True)):
            _take_turns(runs, of_mix, figure, ahead, repetitions)
        native, sdpa = of_mix["native"], of_mix["sdpa"]
        if "ms" in native:
            sdpa["memory_of_native"] = sdpa["peak_gib"] / native["peak_gib"]
            sdpa["targets"] = [target, MEMORY_TARGET]
        rows += of_mix.values()
    return rows


def _take_turns(
    steps: dict[str, Callable[[], None]],
    rows: dict[str, dict[str, Any]],
    figure: str,
    ahead: bool,
    repetitions: int,
) -> None:
    """Time the steps in turn, and note medians; of SDPA, the ratio in the quarters too."""
    taken: dict[str, list[float]] = {backend: [] for backend in steps}
    for _ in range(TURNS * repetitions):
        for backend, step in steps.items():
            taken[backend] += _device_times(step, 1, ahead=ahead)
    for backend, seconds in taken.items():
        rows[backend][figure] = statistics.median(seconds) * 1e3
    if "native" in taken:
        ratios = [s / n for s, n in zip(taken["sdpa"], taken["native"], strict=True)]
        prefix = figure.removesuffix("ms")
        rows["sdpa"][f"{prefix}time_of_native"] = rows["sdpa"][figure] / rows["native"][figure]
        rows["sdpa"][f"{prefix}time_of_native_quartiles"] = statistics.quantiles(ratios, n=4)


def _log_normal(sequences: int, tokens: int) -> NDArray[np.int64]:
    """Lengths whose logarithms are normal with a deviation of 0.8, and that sum to `tokens`."""
    drawn = np.random.default_rng(2).lognormal(0, 0.8, sequences)
    lengths: NDArray[np.int64] = np.maximum(1, drawn / drawn.sum() * tokens).astype(np.int64)
    lengths[lengths.argmax()] += tokens - lengths.sum()
    return lengths


def _operands(tokens: int) -> list[torch.Tensor]:
    """Make queries, keys, values, and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(
            tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16, generator=generator
        ).requires_grad_(needs)
        for needs in (True, True, True, False)
    ]


def _step(
    lengths: NDArray[np.int64], operands: list[torch.Tensor], backend: Any
) -> Callable[[], None] | str:
    """Return a step forward and backward, or what keeps the backend from it."""
    longest = int(lengths.max())
    borders = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).int().cuda()
    q, k, v, upstream = operands
    try:
        attention_backend(q, k, longest, longest, window_size=(-1, 0), backend=backend)
    except ValueError as error:
        return str(error)

    def step() -> None:
        out = varlen_attention(
            q, k, v, borders, borders, longest, longest, window_size=(-1, 0), backend=backend
        )
        torch.autograd.grad(out, (q, k, v), upstream)

    return step


def _peak(step: Callable[[], None]) -> float:
    """GiB that a step takes at most beside what lay there before, operands included once."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


if __name__ == "__main__":
    sys.exit(main())
