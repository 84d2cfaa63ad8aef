"""What publishing and loading weights costs: ``python -m bench.weights``, against memcpy.

With ``--device cuda:0`` the rows are those of `bench.weights_cuda`.

Method: one thread, a model of tensors of a transformer's sizes in memory that was touched before.
Each contender takes turns with memcpy of the same bytes, from memory to memory in one call, in the
same process; a figure is the best of its rounds over the best memcpy of the same rounds, since
whatever else runs on the machine only ever slows one of them down. The load of the machine is
printed: on a busy one both sides suffer, and not alike. There ``--cpu-time`` counts only the time
that the measuring thread had a processor; of what others do for it, as Ray's store, that is too
little.

``--part`` measures publishing and some of the rest, such as on a machine that is quiet for a minute
at a time.

Contenders write the same tensors: safetensors and torch.save into a new file on tmpfs, and
torch.multiprocessing into a shared tensor each. Loading them is not part of their figure. Ray puts
and gets them, as arrays and as tensors, where it is installed. Readers are processes that wait for
each version and look at its rows.

For patches a share of all elements changes before each round, outside of the figure. `made` is the
whole publication, the slot's own catching up included; `applied` is load_into of a subscriber that
has the version before, with the lease. `compare` is what bounds the making: two equal memories read
and compared by memcmp, and nothing written.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import command, machine, weights_cuda
from bench.failures import MeasurementError
from bench.fitness import MEMORY, TWO, Need, here, why_not
from bench.needs_torch import torch
from shmbus.pool import same_bytes
from trainer_adapter.weights import (
    DeviceMismatchError,
    ModuleSource,
    WeightPublisher,
    WeightSubscriber,
)
from trainer_adapter.weights.probe import checked_device

__all__ = ["main"]

#: Elements of a layer's matrices over the hidden size squared: q, k, v, o, gate, up, down.
LAYER: Final = (1.0, 0.25, 0.25, 1.0, 2.75, 2.75, 2.75)
TENSORS: Final = 340
ROUNDS: Final = 5
#: What is measured, in this order; publishing always.
PARTS: Final = ("load", "readers", "digests", "patches", "contenders")
#: Of weights, so that `TENSORS` of a transformer's shapes have an element each.
LEAST_BYTES: Final = 3_700_000
#: Times their bytes: in /dev/shm, both slots or Ray's store; in memory, that and the copies.
SHM: Final = 3
COPIES: Final = 7
#: In the environment while ``--cpu-time`` is asked for.
CPU_TIME: Final = "SHMBUS_BENCH_CPU_TIME"
#: In the environment of processes that share a device by CUDA's multi-process service.
MPS: Final = "CUDA_MPS_PIPE_DIRECTORY"
#: Targets, as shares of memcpy; attaching in milliseconds; readers as a factor of none.
PUBLISH_TARGET: Final = 0.85
LOAD_TARGET: Final = 0.85
DIGEST_TARGET: Final = 0.9
ATTACH_TARGET_MS: Final = 10.0
READERS_TARGET: Final = 1.1
SAFETENSORS_TARGET: Final = 5.0
TORCH_SAVE_TARGET: Final = 8.0
MULTIPROCESSING_TARGET: Final = 12.0
RAY_TARGETS: Final = {"arrays": 1.5, "tensors": 20.0}
#: Share of elements that change -> made and applied, of memcpy, and bytes, of the whole.
PATCH_TARGETS: Final = {0.001: (0.8, 3.0, 0.02), 0.01: (0.5, 3.0, 0.02)}

READER: Final = """
import sys
from trainer_adapter.weights import WeightSubscriber
with WeightSubscriber(sys.argv[1]) as reader:
    newest = reader.wait(timeout=60)
    print("ready", flush=True)
    while True:
        newest = reader.wait(newer_than=newest)
"""


def model_of(size: int) -> torch.nn.Module:
    """Make a model of so many bytes of bfloat16 in `TENSORS` tensors, every seventh one small."""
    layers = TENSORS // (len(LAYER) + 1)
    hidden = int((size / 2 / layers / sum(LAYER)) ** 0.5) // 64 * 64
    module = torch.nn.Module()
    for number in range(TENSORS):
        which = number % (len(LAYER) + 1)
        shape = (hidden,) if which == len(LAYER) else (int(hidden * LAYER[which]), hidden)
        value = torch.full(shape, float(number % 17), dtype=torch.bfloat16)
        module.register_parameter(f"layer{number}", torch.nn.Parameter(value))
    return module


def best_of(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Return the best seconds of each call; they take turns."""
    clock = time.thread_time if CPU_TIME in os.environ else time.perf_counter
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for number, call in enumerate(calls):
            began = clock()
            call()
            best[number] = min(best[number], clock() - began)
    return best


class Versions:
    """Numbers of versions, one after the other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self) -> int:
        """Return the next one."""
        self._next += 1
        return self._next


class Setup(NamedTuple):
    """What all parts measure with."""

    bus: str
    model: torch.nn.Module
    rounds: int
    memcpy: Callable[[], None]


def measure(size: int, readers: int, rounds: int, parts: Sequence[str]) -> dict[str, Any]:
    """Measure the rows of some parts."""
    torch.set_num_threads(1)
    model = model_of(size)
    total = sum(value.numel() * value.element_size() for value in model.parameters())
    source = torch.ones(total, dtype=torch.uint8)
    target = torch.ones(total, dtype=torch.uint8)

    def memcpy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), total)

    bus = f"bench-weights-{os.getpid()}-{secrets.token_hex(3)}"
    setup = Setup(bus, model, rounds, memcpy)
    rows: dict[str, Any] = {"bytes": total, "tensors": TENSORS, "rounds": rounds}
    rows |= whole(setup, readers, parts)
    if "digests" in parts:
        rows |= digests(setup)
    if "patches" in parts:
        memcpy()
        copied, compared = best_of(
            rounds, memcpy, lambda: same_bytes(source.numpy(), target.numpy())
        )
        rows["compare_of_memcpy"] = copied / compared
        live = copy.deepcopy(model)
        for share in PATCH_TARGETS:
            rows |= patches(setup, share, live)
    if "contenders" in parts:
        rows |= contenders(setup, rows["publish_of_memcpy"])
    return rows


def whole(setup: Setup, readers: int, parts: Sequence[str]) -> dict[str, Any]:
    """Measure versions that go out whole: publishing, attaching, loading, beside readers."""
    version = Versions()
    rows: dict[str, Any] = {}
    total = sum(value.numel() * value.element_size() for value in setup.model.parameters())
    with WeightPublisher(setup.bus, ModuleSource(setup.model), label="bench") as publisher:

        def publish() -> None:
            publisher.publish(version())

        for _ in range(2):  # the first touch of each slot is not what a step pays
            publish()
        copied, published = best_of(setup.rounds, setup.memcpy, publish)
        rows |= {"memcpy_gb_per_s": total / copied / 1e9, "publish_of_memcpy": copied / published}
        if "load" in parts:
            with WeightSubscriber(setup.bus) as subscriber:
                rows["attach_ms"], rows["attach_views"] = attach(subscriber)
                rows["load_of_memcpy"] = loaded_of_memcpy(setup, subscriber)
        if "readers" in parts:
            rows |= with_readers(setup.bus, readers, setup.rounds, publish)
    return rows


def loaded_of_memcpy(setup: Setup, subscriber: WeightSubscriber) -> float:
    """Measure load_into of live parameters, as a share of memcpy."""
    live = copy.deepcopy(setup.model)

    def load() -> None:
        with subscriber.latest(timeout=5) as weights:
            weights.load_into(live)

    load()
    copied, loaded = best_of(setup.rounds, setup.memcpy, load)
    return copied / loaded


def change(model: torch.nn.Module, share: float, made: torch.Generator) -> None:
    """Change that share of all elements, by one unit in the last place."""
    for value in model.parameters():
        flat = value.detach().view(-1).view(torch.int16)
        at = torch.randint(flat.numel(), (int(flat.numel() * share),), generator=made)
        flat[at] += 1


def patches(setup: Setup, share: float, live: torch.nn.Module) -> dict[str, Any]:
    """Measure versions of which a share of the elements changed."""
    bus, model, rounds, memcpy = setup
    total = sum(value.numel() * value.element_size() for value in model.parameters())
    made = torch.Generator().manual_seed(7)
    best = [float("inf")] * 3
    size = 0
    with (
        WeightPublisher(bus, ModuleSource(model), patches=2 * share) as publisher,
        WeightSubscriber(bus, patches=True) as subscriber,
    ):

        def follow() -> None:
            with subscriber.latest(timeout=5) as weights:
                weights.load_into(live)
                assert weights.loaded == "patch" or version < 2, "the model was loaded whole"

        # Two versions until both slots have been written, and one patch to catch up with.
        for version in range(rounds + 3):
            change(model, share, made)
            steps = [memcpy, lambda: publisher.publish(version), follow]  # noqa: B023
            for number, step in enumerate(steps):
                (took,) = best_of(1, step)
                if version >= 3:
                    best[number] = min(best[number], took)
        with subscriber.latest(timeout=5) as weights:
            patch = weights._patch()
            assert patch is not None
            size = patch.size
    for one, other in zip(model.parameters(), live.parameters(), strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16)), "bits differ"
    return {
        f"patch_{share:g}_made_of_memcpy": best[0] / best[1],
        f"patch_{share:g}_applied_of_memcpy": best[0] / best[2],
        f"patch_{share:g}_size": size / total,
    }


def attach(subscriber: WeightSubscriber) -> tuple[float, int]:
    """Return milliseconds until every tensor of the newest version is a view, and how many."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        with subscriber.latest(timeout=5) as weights:
            views = [weights[name] for name in weights]
            best = min(best, time.perf_counter() - began)
            count = len(views)
            del views
    return best * 1e3, count


def with_readers(
    bus: str, readers: int, rounds: int, publish: Callable[[], object]
) -> dict[str, Any]:
    """Measure publishing alone, then beside readers that wait for each version."""
    (alone,) = best_of(rounds, publish)
    children: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as heard:
        try:
            for _ in range(readers):
                argv = [sys.executable, "-c", READER, bus]
                child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=heard, text=True)
                children.append(child)
            for child in children:
                assert child.stdout is not None
                if not child.stdout.readline():
                    heard.seek(0)
                    last = heard.read().strip().rpartition("\n")[2]
                    raise MeasurementError(f"a reader has ended: {last}")
            (beside,) = best_of(rounds, publish)
            if gone := sum(child.poll() is not None for child in children):
                raise MeasurementError(f"{gone} of {readers} readers ended while it was measured")
        finally:
            for child in children:
                child.kill()
                child.communicate()
    return {"readers": readers, "publish_beside_readers": beside / alone}


def digests(setup: Setup) -> dict[str, Any]:
    """Measure comparing each block of a version with its digest."""
    bus, model, rounds, memcpy = setup
    with (
        WeightPublisher(bus, ModuleSource(model), digests=True) as publisher,
        WeightSubscriber(bus) as subscriber,
    ):
        publisher.publish(1)
        with subscriber.latest(timeout=5) as weights:
            carried = weights._open()
            carried.verify(sample=False)
            copied, checked = best_of(rounds, memcpy, lambda: carried.verify(sample=False))
    return {"digests_of_memcpy": copied / checked}


def contenders(setup: Setup, published: float) -> dict[str, Any]:
    """Measure writing the same tensors to tmpfs, and how many times publishing is faster."""
    from safetensors.torch import save_file

    bus, model, rounds, memcpy = setup
    state = {name: value.detach() for name, value in model.state_dict().items()}
    directory = Path("/dev/shm") / f"{bus}.files"
    directory.mkdir()
    try:

        def safetensors() -> None:
            (directory / "model").unlink(missing_ok=True)
            save_file(state, directory / "model")

        def torch_save() -> None:
            (directory / "model").unlink(missing_ok=True)
            torch.save(state, directory / "model")

        def shared() -> None:
            kept = [value.clone().share_memory_() for value in state.values()]
            del kept

        copied, safe, saved, each = best_of(
            max(2, rounds // 2), memcpy, safetensors, torch_save, shared
        )
    finally:
        shutil.rmtree(directory)
    return ray_rows(state, rounds, published, memcpy) | {
        "multiprocessing_of_memcpy": copied / each,
        "times_multiprocessing": published / (copied / each),
        "safetensors_of_memcpy": copied / safe,
        "torch_save_of_memcpy": copied / saved,
        "times_safetensors": published / (copied / safe),
        "times_torch_save": published / (copied / saved),
    }


def ray_rows(
    state: dict[str, torch.Tensor], rounds: int, published: float, memcpy: Callable[[], None]
) -> dict[str, Any]:
    """Measure Ray's object store with arrays and with tensors, if Ray is installed."""
    try:
        import ray
    except ImportError:
        return {}
    total = sum(value.numel() * value.element_size() for value in state.values())
    ray.init(
        "local",
        num_cpus=1,
        object_store_memory=3 * total,
        include_dashboard=False,
        log_to_driver=False,
    )
    found = {}
    try:
        arrays = {name: value.view(torch.int16).numpy() for name, value in state.items()}
        for what, values in (("arrays", arrays), ("tensors", state)):
            copied, took = best_of(max(2, rounds // 2), memcpy, lambda: ray.get(ray.put(values)))  # noqa: B023
            found[f"ray_{what}_of_memcpy"] = copied / took
            found[f"times_ray_{what}"] = published / (copied / took)
    finally:
        ray.shutdown()
    return found


def verdicts(rows: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Return each figure that was measured with its target, and whether it is met."""
    least = [
        ("publish, of memcpy", "publish_of_memcpy", PUBLISH_TARGET),
        ("load into live parameters, of memcpy", "load_of_memcpy", LOAD_TARGET),
        ("digests of a whole set, of memcpy", "digests_of_memcpy", DIGEST_TARGET),
        ("publish, times safetensors to tmpfs", "times_safetensors", SAFETENSORS_TARGET),
        ("publish, times torch.save to tmpfs", "times_torch_save", TORCH_SAVE_TARGET),
        ("publish, times torch.multiprocessing", "times_multiprocessing", MULTIPROCESSING_TARGET),
    ]
    least += [
        (f"publish, times Ray, {what}", f"times_ray_{what}", goal)
        for what, goal in RAY_TARGETS.items()
    ]
    views, readers = rows.get("attach_views", TENSORS), rows.get("readers", 0)
    most = [
        (f"attach {views} tensors, ms", "attach_ms", ATTACH_TARGET_MS),
        (f"publish beside {readers} readers", "publish_beside_readers", READERS_TARGET),
    ]
    for share, (made, applied, size) in PATCH_TARGETS.items():
        key, name = f"patch_{share:g}", f"patch of {share:.1%}"
        least.append((f"{name} made, of memcpy", f"{key}_made_of_memcpy", made))
        least.append((f"{name} applied, of memcpy", f"{key}_applied_of_memcpy", applied))
        most.append((f"{name}, size of the whole", f"{key}_size", size))
    least = [row for row in least if row[1] in rows]
    most = [row for row in most if row[1] in rows]
    told = [(n, f"{rows[k]:.2f}", f">= {goal:g}", rows[k] >= goal) for n, k, goal in least]
    return told + [(n, f"{rows[k]:.4g}", f"<= {goal:g}", rows[k] <= goal) for n, k, goal in most]


@command.orderly("weights")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the JSON; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.weights", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--size", type=command.positive, default=2.0, help="GB of weights (2)")
    parser.add_argument(
        "--readers", type=command.at_least_one, default=64, help="processes that wait (64)"
    )
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="publishing and this; all by default"
    )
    parser.add_argument(
        "--rounds", type=command.at_least_one, default=ROUNDS, help=f"of each figure ({ROUNDS})"
    )
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA device such as cuda:0")
    parser.add_argument("--output", type=command.file, help="where the JSON goes")
    parser.add_argument("--cpu-time", action="store_true", help="of this thread, on a busy machine")
    options = parser.parse_args(argv)
    if options.cpu_time:
        os.environ[CPU_TIME] = "1"
    size = int(options.size * 1e9)
    if size < LEAST_BYTES:
        parser.error(f"--size: expected {LEAST_BYTES / 1e9:g} or more, got {options.size:g}")
    try:
        device = str(checked_device(options.device))
    except (ValueError, DeviceMismatchError) as error:
        parser.error(f"--device: {error}")
    need = Need(shm_bytes=SHM * size, memory_bytes=MEMORY + COPIES * size, less="--size")
    if device == "cpu" and command.refused(need, "weights"):
        return 1
    parts = options.part or PARTS
    if "readers" in parts and (why := why_not(Need(processors=TWO), here())):
        print(f"publishing beside readers cannot be measured here: {why}")
        parts = [part for part in parts if part != "readers"]
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    if device == "cpu":
        rows = measure(size, options.readers, options.rounds, parts)
        print(f"{rows['bytes'] / 1e9:.3g} GB, memcpy {rows['memcpy_gb_per_s']:.1f} GB/s")
        told = verdicts(rows)
    else:
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["mps"] = MPS in os.environ
        shapes = [tuple(value.shape) for value in model_of(size).parameters()]
        rows = weights_cuda.measure(size, options.rounds, device, shapes)
        rates = {name: rows[name] / 1e9 for name in weights_cuda.BOUNDS}
        print(facts["gpu"], {name: f"{rate:.0f} GB/s" for name, rate in rates.items()})
        turns = (f"{rows[f'turn_{how}_s'] * 1e6:.0f} us" for how in ("alone", "after"))
        print("a tiny copy, alone and just after another process: " + ", ".join(turns))
        told = weights_cuda.verdicts(rows)
    for name, figure, target, met in told:
        print(f"  {name:44} {figure:>8}   target {target:8} {'' if met else 'MISSED'}")
    kept = {"machine": facts, "rows": rows, "verdicts": told}
    status = command.keep(options.output, kept, "weights")
    return status or int(not all(met for *_, met in told))


if __name__ == "__main__":
    sys.exit(main())
