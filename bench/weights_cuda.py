"""Cost of weights on a GPU: ``python -m bench.weights --device cuda:0``, beside their bounds.

A publisher and a reader, two processes on the same device. A round is a version: published, loaded
into the reader's live parameters, and acknowledged over a pipe, after two warm-up rounds. Bounds
come from the same run and process: a copy of large tensors on the device, pinned copies over PCIe
each way, and the common way without shmbus: torch's own handle a tensor (`torch.multiprocessing`),
opened, copied, closed.
"""

import os
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch

from bench.processes import MeasurementError
from bench.row import Row
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

__all__ = ["measure"]

#: Small tensors, such as norms and biases.
SMALL_BYTES: Final = 16 << 10
SMALL_TENSORS: Final = 1000
#: Size of a bounding copy, pinned or on the device.
BOUND_BYTES: Final = 1 << 30
#: Seconds of a step beside a publication.
STEP_S: Final = 0.1
WARM_UP: Final = 2
#: Seconds of silence before a reader counts as failed.
PATIENCE_S: Final = 120.0

Shapes = list[tuple[int, ...]]


def tensors_of(shapes: Shapes, device: str) -> dict[str, torch.Tensor]:
    """Make tensors of bfloat16."""
    return {
        f"p{number}": torch.full(shape, number % 17, dtype=torch.bfloat16, device=device)
        for number, shape in enumerate(shapes)
    }


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Make a model around the tensors."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def timed(rounds: int, call: Callable[[], object], device: str) -> list[float]:
    """Return the seconds of a call, its work on the device included."""
    found = []
    for number in range(rounds + WARM_UP):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        if number >= WARM_UP:
            found.append(time.perf_counter() - began)
    return found


def handle_reader(pipe: Connection, shapes: Shapes, device: str) -> None:
    """Load from torch's handles, in a separate process."""
    live = tensors_of(shapes, device)
    pipe.send_bytes(b"ready")
    while (data := pipe.recv_bytes()) != b"end":
        found = ForkingPickler.loads(data)
        for name, tensor in found.items():
            live[name].copy_(tensor)
        torch.cuda.synchronize(device)
        del found, tensor
        pipe.send_bytes(b"loaded")


def bus_reader(pipe: Connection, bus: str, shapes: Shapes, device: str) -> None:
    """Load each published version, in a separate process; send the seconds."""
    live = tensors_of(shapes, device)
    with WeightSubscriber(bus, device=device) as subscriber:
        pipe.send_bytes(b"ready")
        newest: int | None = None
        while True:
            newest = subscriber.wait(newer_than=newest, timeout=PATIENCE_S)
            with subscriber.latest(timeout=PATIENCE_S) as weights:
                began = time.perf_counter()
                weights.load_into(live)
                torch.cuda.synchronize(device)
                took = time.perf_counter() - began
            pipe.send_bytes(repr(took).encode())


def answer(pipe: Connection) -> bytes:
    """Wait for a reader."""
    if not pipe.poll(PATIENCE_S):
        raise MeasurementError("a reader said nothing")
    return pipe.recv_bytes()


def by_handles(shapes: Shapes, rounds: int, device: str) -> list[float]:
    """Return the seconds of a version by torch's handle a tensor."""
    tensors = tensors_of(shapes, device)
    context = torch.multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=handle_reader, args=(other, shapes, device), daemon=True)
    child.start()
    answer(pipe)

    def hand_over() -> None:
        pipe.send_bytes(ForkingPickler.dumps(tensors))
        answer(pipe)

    found = timed(rounds, hand_over, device)
    pipe.send_bytes(b"end")
    child.join(PATIENCE_S)
    return found


def by_bus(shapes: Shapes, rounds: int, device: str, carrier: str) -> dict[str, list[float]]:
    """Return the seconds of a version: the whole, publishing, loading."""
    bus = f"bench-weights-{os.getpid()}-{secrets.token_hex(3)}"
    module = module_of(tensors_of(shapes, device))
    options: dict[str, Any] = {} if carrier == "shm" else {"device": device}
    context = torch.multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    found: dict[str, list[float]] = {"whole": [], "published": [], "loaded": []}
    made = WeightPublisher(bus, ModuleSource(module), carrier=carrier, **options)
    with closing(made) as publisher:
        arguments = (other, bus, shapes, device)
        child = context.Process(target=bus_reader, args=arguments, daemon=True)
        child.start()
        answer(pipe)
        for number in range(rounds + WARM_UP):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            publisher.publish(version=number + 1)
            published = time.perf_counter() - began
            loaded = float(answer(pipe))
            whole = time.perf_counter() - began
            if number >= WARM_UP:
                found["whole"].append(whole)
                found["published"].append(published)
                found["loaded"].append(loaded)
        child.terminate()
        child.join(PATIENCE_S)
    return found


def beside_a_step(shapes: Shapes, rounds: int, device: str) -> tuple[list[float], list[float]]:
    """Return the seconds of a step beside a publication, and of a step alone."""
    bus = f"bench-weights-{os.getpid()}-{secrets.token_hex(3)}"
    module = module_of(tensors_of(shapes, device))
    size = 8192
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    once = min(timed(3, lambda: left @ left, device))
    count = max(1, int(STEP_S / once))

    def step() -> None:
        for _ in range(count):
            left @ left

    version = 0
    made = WeightPublisher(
        bus, ModuleSource(module), carrier="cuda_vmm", device=device, when_held="wait"
    )
    with closing(made) as publisher:
        publisher.publish(version=0)

        def both() -> None:
            nonlocal version
            version += 1
            publication = publisher.publish_async(version=version)
            publication.wait_copied(PATIENCE_S)
            step()
            publication.wait(PATIENCE_S)

        return timed(rounds, both, device), timed(rounds, step, device)


def bounds_s(rounds: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of a copy of `BOUND_BYTES` on the device, to the host, and back."""
    one = torch.ones(BOUND_BYTES, dtype=torch.uint8, device=device)
    two = torch.empty_like(one)
    pinned = torch.empty(BOUND_BYTES, dtype=torch.uint8, pin_memory=True)
    calls: dict[str, Callable[[], object]] = {
        "a copy on the device": lambda: two.copy_(one),
        "a pinned copy to the host": lambda: pinned.copy_(one, non_blocking=True),
        "a pinned copy from the host": lambda: two.copy_(pinned, non_blocking=True),
    }
    return {name: timed(rounds, call, device) for name, call in calls.items()}


def measure(rounds: int, device: str, shapes: Shapes) -> list[Row]:
    """Measure every row, with tensors in a model's `shapes`."""
    bounds = bounds_s(rounds, device)
    torch.cuda.empty_cache()
    total = sum(2 * torch.Size(shape).numel() for shape in shapes)
    rows = []
    sets: dict[str, tuple[str, Shapes]] = {
        f"{SMALL_TENSORS:,} small tensors": ("small", [(SMALL_BYTES // 2,)] * SMALL_TENSORS),
        f"a model of {total / 1e9:.1f} GB": ("model", shapes),
    }
    found: dict[str, list[float]] = {}
    for title, (name, each) in sets.items():
        found = by_bus(each, rounds, device, "cuda_vmm")
        handles = by_handles(each, rounds, device)
        rows.append(
            # Versions a second: more is better, as in every row of rates.
            Row(
                name=f"weights-cuda-{name}", title=f"versions of {title}, on the device",
                unit="a second", values=tuple(1 / s for s in found["whole"]),
                beside="torch's handles", beside_values=tuple(1 / s for s in handles),
            )
        )  # fmt: skip
    host = by_bus(shapes, rounds, device, "shm")
    parts = {
        "publish": ("publish on the device", found["published"], "a copy on the device"),
        "load": ("load on the device", found["loaded"], "a copy on the device"),
        "to-host": ("publish to the host", host["published"], "a pinned copy to the host"),
        "from-host": ("load from the host", host["loaded"], "a pinned copy from the host"),
    }
    for name, (title, seconds, bound) in parts.items():
        rows.append(
            Row(
                name=f"weights-cuda-{name}", title=title, unit="GB/s",
                values=tuple(total / s / 1e9 for s in seconds), beside=bound,
                beside_values=tuple(BOUND_BYTES / s / 1e9 for s in bounds[bound]),
            )
        )  # fmt: skip
    both, alone = beside_a_step(shapes, rounds, device)
    rows.append(
        Row(
            name="weights-cuda-step", title="a step beside a publication", unit="ms",
            values=tuple(1e3 * s for s in both), beside="alone",
            beside_values=tuple(1e3 * s for s in alone),
        )
    )  # fmt: skip
    return rows
