"""Cost of publishing and loading weights: ``python -m bench.weights``, against memcpy.

``--device cuda:0`` selects the rows of `bench.weights_cuda`. Each row takes turns with memcpy of
the same bytes, by a thread of the same process. Safetensors and torch.save write the same tensors
into a new file on tmpfs, torch.multiprocessing into shared tensors, Ray puts and gets arrays. For
patches a share of the elements changes before each round.
"""

import argparse
import copy
import ctypes
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import torch

from bench import machine, program
from bench.processes import MeasurementError
from bench.row import Row, skipped
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

__all__ = ["main", "model_of"]

#: Elements of a layer's matrices over the hidden size squared: q, k, v, o, gate, up, down.
LAYER: Final = (1.0, 0.25, 0.25, 1.0, 2.75, 2.75, 2.75)
TENSORS: Final = 340
ROUNDS: Final = 5
#: Least bytes of weights: an element for each of `TENSORS` in a transformer's shapes.
LEAST_BYTES: Final = 3_700_000
#: Multiple of their bytes in /dev/shm: both slots, or Ray's store.
SHM: Final = 3
#: Shares of changed elements.
SHARES: Final = (0.001, 0.01)
READERS: Final = 64
#: Ray's smallest store.
RAY_LEAST_BYTES: Final = 80_000_000

READER: Final = """
import sys
from shmbus.weights import WeightSubscriber
with WeightSubscriber(sys.argv[1]) as reader:
    newest = reader.wait(timeout=60)
    print("ready", flush=True)
    while True:
        newest = reader.wait(newer_than=newest)
"""


def model_of(size: int) -> torch.nn.Module:
    """Make a model of so many bytes of bfloat16 in `TENSORS` tensors, every seventh small."""
    layers = TENSORS // (len(LAYER) + 1)
    hidden = int((size / 2 / layers / sum(LAYER)) ** 0.5) // 64 * 64
    module = torch.nn.Module()
    for number in range(TENSORS):
        which = number % (len(LAYER) + 1)
        shape = (hidden,) if which == len(LAYER) else (int(hidden * LAYER[which]), hidden)
        value = torch.full(shape, float(number % 17), dtype=torch.bfloat16)
        module.register_parameter(f"layer{number}", torch.nn.Parameter(value))
    return module


def change(model: torch.nn.Module, share: float, made: torch.Generator) -> None:
    """Change a share of the elements, by a unit in the last place."""
    for value in model.parameters():
        flat = value.detach().view(-1).view(torch.int16)
        at = torch.randint(flat.numel(), (int(flat.numel() * share),), generator=made)
        flat[at] += 1


@dataclass(frozen=True)
class Setup:
    """Common parts of the rows."""

    bus: str
    model: torch.nn.Module
    rounds: int
    nbytes: int
    memcpy: Callable[[], object]

    def row(self, name: str, title: str, call: Callable[[], object]) -> Row:
        """Measure a call that moves the whole weights, in turns with memcpy."""
        copied, took = turns(self.rounds, self.memcpy, call)
        return self.made(name, title, took, copied, "memcpy")

    def made(
        self, name: str, title: str, took: Sequence[float], other: Sequence[float], beside: str
    ) -> Row:
        """Make a row of seconds."""
        return Row(
            name=f"weights-{name}", title=title, unit="GB/s",
            values=tuple(self.nbytes / each / 1e9 for each in took),
            beside=beside, beside_values=tuple(self.nbytes / each / 1e9 for each in other),
        )  # fmt: skip


def turns(rounds: int, *calls: Callable[[], object]) -> list[list[float]]:
    """Return the seconds of each call in each round; calls take turns."""
    took: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for number, call in enumerate(calls):
            began = time.perf_counter()
            call()
            took[number].append(time.perf_counter() - began)
    return took


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure the rows of the device."""
    size = 4_000_000 if options.tiny else int(options.size * 1e9)
    rounds = options.repetitions or (1 if options.tiny else ROUNDS)
    shapes = [tuple(value.shape) for value in model_of(size).parameters()]
    if options.device != "cpu":
        from bench import weights_cuda

        return weights_cuda.measure(rounds, options.device, shapes)
    if why := machine.lacks(shm_bytes=SHM * size):
        return [skipped("weights", "weights", why)]
    torch.set_num_threads(1)
    model = model_of(size)
    nbytes = sum(value.numel() * value.element_size() for value in model.parameters())
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    bus = f"bench-weights-{os.getpid()}-{secrets.token_hex(3)}"
    setup = Setup(
        bus, model, rounds, nbytes,
        lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes),
    )  # fmt: skip
    rows = list(_whole(setup, 2 if options.tiny else READERS))
    for share in SHARES:
        rows.append(_patches(setup, share))
    return rows


def _whole(setup: Setup, readers: int) -> Iterator[Row]:
    """Measure whole versions: publishing, attaching, loading, beside readers."""
    version = count(1)
    with closing(WeightPublisher(setup.bus, ModuleSource(setup.model), label="bench")) as publisher:

        def publish() -> None:
            publisher.publish(next(version))

        for _ in range(2):  # a step never pays for the first touch of a slot
            publish()
        yield setup.row("publish", "publish", publish)
        with WeightSubscriber(setup.bus) as subscriber:
            yield _attach(subscriber, setup.rounds)
            live = copy.deepcopy(setup.model)

            def load() -> None:
                with subscriber.latest(timeout=5) as weights:
                    weights.load_into(live)

            load()
            yield setup.row("load", "load into live parameters", load)
        (alone,) = turns(setup.rounds, publish)
        with _readers(setup.bus, readers):
            (beside,) = turns(setup.rounds, publish)
        yield Row(
            name="weights-beside-readers", title=f"publish beside {readers} readers that wait",
            unit="ms", values=tuple(1e3 * each for each in beside),
            beside="alone", beside_values=tuple(1e3 * each for each in alone),
        )  # fmt: skip
        for name, call in _others(setup):
            took, other = turns(max(1, setup.rounds // 2), publish, call)
            title = f"publish, against {name}"
            yield setup.made(f"against-{name.split(',')[0]}", title, took, other, name)


def _attach(subscriber: WeightSubscriber, rounds: int) -> Row:
    """Measure the time until every tensor of the newest version is a view."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        with subscriber.latest(timeout=5) as weights:
            views = [weights[name] for name in weights]
            took.append(1e3 * (time.perf_counter() - began))
            assert len(views) == TENSORS
            del views
    title = f"attach {TENSORS} tensors"
    return Row(name="weights-attach", title=title, unit="ms", values=tuple(took))


@contextmanager
def _readers(bus: str, number: int) -> Iterator[None]:
    """Run processes that wait for each version."""
    children: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as heard:
        try:
            for _ in range(number):
                argv = [sys.executable, "-c", READER, bus]
                child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=heard, text=True)
                children.append(child)
            for child in children:
                assert child.stdout is not None
                if not child.stdout.readline():
                    heard.seek(0)
                    last = heard.read().strip().rpartition("\n")[2]
                    raise MeasurementError(f"a reader has ended: {last}")
            yield
            if gone := sum(child.poll() is not None for child in children):
                raise MeasurementError(f"{gone} of {number} readers ended while it was measured")
        finally:
            for child in children:
                child.kill()
                child.communicate()


def _patches(setup: Setup, share: float) -> Row:
    """Measure publishing versions with a share of changed elements."""
    made = torch.Generator().manual_seed(7)
    took: list[list[float]] = [[], []]
    with closing(
        WeightPublisher(setup.bus, ModuleSource(setup.model), patches=2 * share)
    ) as publisher:

        def publish() -> None:
            told = publisher.publish(version)
            assert told.changed is not None or version < 3, "the version was published whole"

        # Two versions to write both slots, and a patch to catch up with.
        for version in range(setup.rounds + 3):
            change(setup.model, share, made)
            found = turns(1, setup.memcpy, publish)
            if version >= 3:
                for each, (seconds,) in zip(took, found, strict=True):
                    each.append(seconds)
    copied, published = took
    title = f"patch of {share:.1%} of the elements, made"
    return setup.made(f"patch-{share:g}-made", title, published, copied, "memcpy of all")


def _others(setup: Setup) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the installed alternatives for the same tensors."""
    from safetensors.torch import save_file

    state = {name: value.detach() for name, value in setup.model.state_dict().items()}
    with tempfile.TemporaryDirectory(prefix=f"{setup.bus}.", dir="/dev/shm") as directory:
        path = Path(directory, "model")

        def written(write: Callable[[], object]) -> None:
            path.unlink(missing_ok=True)
            write()

        yield "safetensors, to tmpfs", lambda: written(lambda: save_file(state, path))
        yield "torch.save, to tmpfs", lambda: written(lambda: torch.save(state, path))
    yield (
        "torch.multiprocessing",
        lambda: [value.clone().share_memory_() for value in state.values()],
    )
    try:
        import ray
    except ImportError:
        return
    arrays = {name: value.view(torch.int16).numpy() for name, value in state.items()}
    ray.init(
        "local", num_cpus=1, include_dashboard=False, log_to_driver=False,
        object_store_memory=max(3 * setup.nbytes, RAY_LEAST_BYTES),
    )  # fmt: skip
    try:
        yield "ray, put and get of arrays", lambda: ray.get(ray.put(arrays))
    finally:
        ray.shutdown()


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    made = program.parser_of("weights", __doc__)
    made.add_argument("--size", type=_size, default=2.0, help="GB of weights (2)")
    made.add_argument("--device", default="cpu", help="cpu, or a CUDA device such as cuda:0")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("weights", parser(), measure, argv)


def _size(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_BYTES <= value * 1e9 < float("inf"):
        raise argparse.ArgumentTypeError(f"expected {LEAST_BYTES / 1e9:g} or more, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
