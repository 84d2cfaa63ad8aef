"""What weights on a GPU cost: ``python -m bench.weights --device cuda:0``, beside their bounds.

Method: a publisher and a reader, two processes on one device. A round is one version: published,
loaded into the reader's live parameters, and acknowledged over a pipe; a figure is the best of its
rounds, after two that do not count. *Alone* is the same with no work of another process in between:
to change over from one process to another costs a device time too, which is measured as *turn*: a
tiny copy to its end, alone and just after another process has worked. The bounds are measured in
the same run by the same process: a copy of large tensors on the device, pinned copies over PCIe
each way, and the way that is common without shmbus: torch's own handle a tensor
(`torch.multiprocessing`), opened, copied, closed.
"""

from __future__ import annotations

import os
import secrets
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from bench.needs_torch import torch
from trainer_adapter.weights import ModuleSource, WeightPublisher, WeightSubscriber

__all__ = ["BOUNDS", "measure", "turn_s", "verdicts"]

#: Rows that bound the others, bytes a second.
BOUNDS: Final = ("device_copy", "pinned_to_host", "pinned_to_device")

WARM_UP: Final = 2
#: Loads, and publications, with no work of another process in between.
ALONE_ROUNDS: Final = 15
#: Small tensors as norms and biases are; and those that PCIe alone moves at a sixth of its rate.
SMALL_BYTES: Final = 16 << 10
HOST_TENSOR_BYTES: Final = 64 << 10
HOST_BYTES: Final = 256 << 20
#: Of a pinned or device copy that bounds the others.
BOUND_BYTES: Final = 1 << 30
#: A step beside which a version is published, seconds.
STEP_S: Final = 0.1
#: Targets: times per-tensor handles; shares of a bound; a step beside a publication.
SMALL_TARGET: Final = 10.0
MODEL_TARGET: Final = 3.0
DEVICE_TARGET: Final = 0.9
HOST_TARGET: Final = 0.95
STEP_TARGET: Final = 1.05
#: Publishing and loading, of half the copy rate, since together they copy twice.
BOTH_TARGET: Final = 0.75
#: The version after which a reader loads alone.
LAST: Final = 1 << 40
#: Seconds after which a reader that says nothing has failed.
PATIENCE_S: Final = 120.0

Shapes = list[tuple[int, ...]]


def small_shapes(count: int) -> Shapes:
    """Return shapes of so many small tensors."""
    return [(SMALL_BYTES // 2,)] * count


def tensors_of(shapes: Shapes, device: str) -> dict[str, torch.Tensor]:
    """Make tensors of bfloat16."""
    return {
        f"p{number}": torch.full(shape, number % 17, dtype=torch.bfloat16, device=device)
        for number, shape in enumerate(shapes)
    }


def module_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Make a model of them."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def best(rounds: int, call: Callable[[], object], device: str) -> float:
    """Return the best seconds of a call with the work that it began on the device."""
    found = float("inf")
    for number in range(rounds + WARM_UP):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        if number >= WARM_UP:
            found = min(found, time.perf_counter() - began)
    return found


def handle_reader(pipe: Connection, shapes: Shapes, device: str) -> None:
    """Load what comes as torch's handles, a process of its own."""
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
    """Load each version that is published, a process of its own; says how long it took."""
    live = tensors_of(shapes, device)
    with WeightSubscriber(bus, device=device) as subscriber:
        pipe.send_bytes(b"ready")
        newest: int | None = None
        while True:
            newest = subscriber.wait(newer_than=newest, timeout=PATIENCE_S)
            took = load(subscriber, live, device)
            if newest == LAST:
                for _ in range(ALONE_ROUNDS):
                    took = min(took, load(subscriber, live, device))
            pipe.send_bytes(repr(took).encode())


def load(subscriber: WeightSubscriber, live: dict[str, torch.Tensor], device: str) -> float:
    """Load the newest version; returns seconds, from when it is leased."""
    with subscriber.latest(timeout=PATIENCE_S) as weights:
        began = time.perf_counter()
        weights.load_into(live)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began


def turn_s(rounds: int, device: str) -> dict[str, float]:
    """Return the median seconds of a tiny copy to its end: alone, and after another process."""
    context = torch.multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=copy_when_asked, args=(other, device), daemon=True)
    child.start()
    answer(pipe)
    one = torch.ones(1 << 12, dtype=torch.uint8, device=device)
    two = torch.empty_like(one)
    found: dict[str, list[float]] = {"alone": [], "after": []}
    for number in range(2 * (rounds + WARM_UP)):
        if number % 2:
            pipe.send_bytes(b"copy")
            answer(pipe)
        began = time.perf_counter()
        two.copy_(one)
        torch.cuda.synchronize(device)
        took = time.perf_counter() - began
        if number >= 2 * WARM_UP:
            found["after" if number % 2 else "alone"].append(took)
    child.terminate()
    child.join(PATIENCE_S)
    return {f"turn_{name}_s": statistics.median(each) for name, each in found.items()}


def copy_when_asked(pipe: Connection, device: str) -> None:
    """Make a tiny copy for each message, a process of its own."""
    one = torch.ones(1 << 12, dtype=torch.uint8, device=device)
    two = torch.empty_like(one)
    while True:
        two.copy_(one)
        torch.cuda.synchronize(device)
        pipe.send_bytes(b"copied")
        pipe.recv_bytes()


def answer(pipe: Connection) -> bytes:
    """Wait for a reader."""
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("a reader said nothing")
    return pipe.recv_bytes()


def by_handles(shapes: Shapes, rounds: int, device: str) -> float:
    """Return the best seconds of a version by torch's handle a tensor."""
    tensors = tensors_of(shapes, device)
    context = torch.multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=handle_reader, args=(other, shapes, device), daemon=True)
    child.start()
    answer(pipe)
    found = float("inf")
    for number in range(rounds + WARM_UP):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        pipe.send_bytes(ForkingPickler.dumps(tensors))
        answer(pipe)
        if number >= WARM_UP:
            found = min(found, time.perf_counter() - began)
    pipe.send_bytes(b"end")
    child.join(PATIENCE_S)
    return found


def by_bus(shapes: Shapes, rounds: int, device: str, carrier: str) -> dict[str, float]:
    """Return the best seconds of a version: all of it, published, loaded; these two alone too."""
    bus = f"bench-weights-{os.getpid()}-{secrets.token_hex(3)}"
    module = module_of(tensors_of(shapes, device))
    options: dict[str, Any] = {} if carrier == "shm" else {"device": device}
    context = torch.multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    found = {"whole": float("inf"), "published": float("inf"), "loaded": float("inf")}
    with WeightPublisher(bus, ModuleSource(module), carrier=carrier, **options) as publisher:  # type: ignore[arg-type]
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
                times = {"whole": whole, "published": published, "loaded": loaded}
                found = {name: min(found[name], took) for name, took in times.items()}
        publisher.publish(version=LAST)
        found["loaded_alone"] = float(answer(pipe))
        child.terminate()
        child.join(PATIENCE_S)
        alone = []
        for number in range(ALONE_ROUNDS):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            publisher.publish(version=LAST + 1 + number)
            alone.append(time.perf_counter() - began)
        found["published_alone"] = min(alone)
    return found


def beside_a_step(shapes: Shapes, rounds: int, device: str) -> float:
    """Return a step's time beside a publication, over that of one alone."""
    bus = f"bench-weights-{os.getpid()}-{secrets.token_hex(3)}"
    module = module_of(tensors_of(shapes, device))
    size = 8192
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    once = best(3, lambda: left @ left, device)
    count = max(1, int(STEP_S / once))

    def step() -> None:
        for _ in range(count):
            left @ left

    version = 0
    with WeightPublisher(
        bus, ModuleSource(module), carrier="cuda_vmm", device=device, when_held="wait"
    ) as publisher:
        publisher.publish(version=0)

        def both() -> None:
            nonlocal version
            version += 1
            publication = publisher.publish_async(version=version)
            publication.wait_copied(PATIENCE_S)
            step()
            publication.wait(PATIENCE_S)

        return best(rounds, both, device) / best(rounds, step, device)


def bounds(rounds: int, device: str) -> dict[str, float]:
    """Return what bounds the others, bytes a second."""
    one = torch.ones(BOUND_BYTES, dtype=torch.uint8, device=device)
    two = torch.empty_like(one)
    pinned = torch.empty(BOUND_BYTES, dtype=torch.uint8, pin_memory=True)
    calls: tuple[Callable[[], object], ...] = (
        lambda: two.copy_(one),
        lambda: pinned.copy_(one, non_blocking=True),
        lambda: two.copy_(pinned, non_blocking=True),
    )
    rates = [BOUND_BYTES / best(rounds, call, device) for call in calls]
    return dict(zip(BOUNDS, rates, strict=True))


def measure(size: int, rounds: int, device: str, shapes: Shapes) -> dict[str, Any]:
    """Measure every row; `shapes` are those of a model of `size` bytes."""
    total = sum(2 * torch.Size(shape).numel() for shape in shapes)
    rows: dict[str, Any] = {"bytes": total, "asked_bytes": size, "rounds": rounds, "device": device}
    rows |= bounds(rounds, device) | turn_s(10 * rounds, device)
    torch.cuda.empty_cache()
    sets: dict[str, Shapes] = {
        "small_300": small_shapes(300),
        "small_1000": small_shapes(1000),
        "model": shapes,
    }
    for name, each in sets.items():
        rows[f"{name}_handles_s"] = by_handles(each, rounds, device)
        for carrier in ("cuda_vmm", "cuda_ipc"):
            rows[f"{name}_{carrier}"] = took = by_bus(each, rounds, device, carrier)
            rows[f"{name}_{carrier}_times"] = rows[f"{name}_handles_s"] / took["whole"]
    model = rows["model_cuda_vmm"]
    for what, key in (("load", "loaded"), ("publish", "published")):
        for how in ("", "_alone"):
            rows[f"{what}{how}_of_device_copy"] = total / model[key + how] / rows["device_copy"]
    rows["both_of_half_device_copy"] = total / model["whole"] / (rows["device_copy"] / 2)
    count = HOST_BYTES // HOST_TENSOR_BYTES
    host: dict[str, Shapes] = {"model": shapes, "64k": [(HOST_TENSOR_BYTES // 2,)] * count}
    for name, each in host.items():
        moved = sum(2 * torch.Size(shape).numel() for shape in each)
        took = by_bus(each, rounds, device, "shm")
        rows[f"host_{name}"] = took
        rows[f"host_{name}_publish_of_pinned"] = moved / took["published"] / rows["pinned_to_host"]
        rows[f"host_{name}_load_of_pinned"] = moved / took["loaded"] / rows["pinned_to_device"]
    rows["step_beside_publication"] = beside_a_step(shapes, rounds, device)
    return rows


def verdicts(rows: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Return each figure with its target, and whether it is met."""
    least = [
        ("300 small tensors, times per-tensor handles", "small_300_cuda_vmm_times", SMALL_TARGET),
        ("1,000 small tensors, the same", "small_1000_cuda_vmm_times", SMALL_TARGET),
        ("the model, the same", "model_cuda_vmm_times", MODEL_TARGET),
        ("1,000 small tensors by 64-byte handle", "small_1000_cuda_ipc_times", SMALL_TARGET),
        ("load on the device, of its copy rate", "load_of_device_copy", DEVICE_TARGET),
        ("the same, alone", "load_alone_of_device_copy", DEVICE_TARGET),
        ("publish on the device, of its copy rate", "publish_of_device_copy", DEVICE_TARGET),
        ("the same, alone", "publish_alone_of_device_copy", DEVICE_TARGET),
        ("both, of half the copy rate", "both_of_half_device_copy", BOTH_TARGET),
        ("publish to the host, of pinned", "host_model_publish_of_pinned", HOST_TARGET),
        ("load from the host, of pinned", "host_model_load_of_pinned", HOST_TARGET),
        ("64-KiB tensors to the host", "host_64k_publish_of_pinned", HOST_TARGET),
        ("64-KiB tensors from the host", "host_64k_load_of_pinned", HOST_TARGET),
    ]
    told = [(n, f"{rows[k]:.2f}", f">= {goal:g}", rows[k] >= goal) for n, k, goal in least]
    beside = rows["step_beside_publication"]
    met = beside <= STEP_TARGET
    return [*told, ("a step beside a publication", f"{beside:.3f}", f"<= {STEP_TARGET:g}", met)]
