"""New weights into an engine of two ranks: ``python -m bench.engines --device cuda``.

A trainer on the first device, and the two ranks of a tensor-parallel stand-in of an engine
(`bench.fused_engine`), one on each of two devices, or both on one. A row's value is the pause: from
the moment in which both ranks are told to load until the last one says that it has. Publishing, and
preparations of a rank in a thread while the engine generates, come before the pause; the JSON has
the time of each. *NCCL* is what others do: all of the model packed into buckets of 1 GiB
and broadcast while the engine is paused; on two devices it has the trainer and one rank, since NCCL
takes a device once. After the last version of each way the ranks' weights are compared, bit for
bit, with what the engine's loader makes of that version.

With ``--device cpu`` a small model goes through host memory and gloo: that shows that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from bench import program
from bench.fused_engine import FusedModel, Shape, checkpoint
from bench.processes import MeasurementError, context
from bench.row import Row, skipped
from shmbus.engines.rank_loader import PlannedLoader
from shmbus.errors import ShmbusError
from shmbus.weights import ModuleSource, WeightPublisher, Weights, WeightSubscriber

__all__ = ["main"]

#: Of the published configurations; the mixture has 16 of its 48 layers, which two devices hold.
MODELS: Final = {
    "qwen3-4b": Shape(
        layers=36, hidden=2560, heads=32, kv_heads=8, head=128, inner=9728, vocab=151936, tied=True
    ),
    "qwen3-30b-a3b": Shape(
        layers=16, hidden=2048, heads=32, kv_heads=4, head=128, inner=768, vocab=151936, experts=128
    ),
}
RANKS: Final = 2
#: Bytes of a bucket of those who broadcast.
BUCKET_BYTES: Final = 1 << 30
#: Seconds for a step of one process, the first of which may compile a kernel.
PATIENCE_S: Final = 240.0
#: Seconds after which a rank that is to die in an update does.
DIES_AFTER_S: Final = 0.005


def settle(device: str) -> None:
    """Wait for a device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def peak_beside(model: torch.nn.Module, device: str) -> int:
    """Return the most bytes that torch had on the device beside a model, since it was asked."""
    own = sum(each.nbytes for each in model.parameters())
    if device == "cpu":
        return 0
    most = int(torch.cuda.max_memory_allocated(device)) - own
    torch.cuda.reset_peak_memory_stats(device)
    return most


def join_group(address: str, rank: int, device: str) -> None:
    """Make the group that broadcasts."""
    if device != "cpu":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=address, rank=rank, world_size=2,
        timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip


def buckets(sizes: dict[str, int]) -> Iterator[tuple[list[str], int]]:
    """Pack tensors into buckets: names, and bytes."""
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        if names and held + size > BUCKET_BYTES:
            yield names, held
            names, held = [], 0
        names.append(name)
        held += size
    yield names, held


# -- the trainer's process -------------------------------------------------------------------------


class Trainer:
    """A model in checkpoint form on one device."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.device = device
        self.model = torch.nn.Module()
        self.tensors: dict[str, torch.Tensor] = {}
        generator = torch.Generator(device).manual_seed(0)
        for number, (name, sizes) in enumerate(checkpoint(shape).items()):
            made = torch.empty(sizes, dtype=shape.dtype, device=device)
            made.normal_(generator=generator)
            self.tensors[name] = made
            self.model.register_parameter(
                f"p{number}", torch.nn.Parameter(made, requires_grad=False)
            )
        self.names = {f"p{number}": name for number, name in enumerate(self.tensors)}
        self.publisher: WeightPublisher | None = None
        self.version = 0

    def open(self, bus: str, carrier: str) -> None:
        """Make the publisher."""
        device = self.device if carrier.startswith("cuda") else "cpu"
        source = ModuleSource(self.model, rename=self.names.__getitem__)
        self.publisher = WeightPublisher(bus, source, carrier=carrier, device=device)

    def publish(self) -> tuple[int, float]:
        """Change all elements, and publish; the version, and what publishing took."""
        assert self.publisher is not None
        for each in self.tensors.values():
            each.neg_().add_(0.125)
        settle(self.device)
        began = time.perf_counter()
        self.version += 1
        self.publisher.publish(version=self.version)
        return self.version, time.perf_counter() - began

    def close(self) -> None:
        """Take the weights away."""
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def join(self, address: str) -> None:
        """Join the group, as the one who sends."""
        join_group(address, 0, self.device)

    def broadcast(self) -> float:
        """Send all of the model."""
        began = time.perf_counter()
        for names, size in buckets({name: each.nbytes for name, each in self.tensors.items()}):
            parts = [self.tensors[name].view(torch.uint8).view(-1) for name in names]
            packed = torch.cat(parts)
            assert packed.numel() == size
            torch.distributed.broadcast(packed, 0)
        settle(self.device)
        return time.perf_counter() - began

    def peak(self) -> int:
        """Bytes beside the model."""
        return peak_beside(self.model, self.device)


# -- a rank's process ------------------------------------------------------------------------------


class Rank:
    """One rank of an engine."""

    def __init__(self, shape: Shape, rank: int, device: str) -> None:
        self.shape, self.rank, self.device = shape, rank, device
        self.model = FusedModel(shape, rank, RANKS, device)
        self.subscriber: WeightSubscriber | None = None
        self.loader: PlannedLoader | None = None
        self.newest: int | None = None

    def attach(self, bus: str) -> None:
        """Read the weights of a bus, as an engine's rank that has just started."""
        self.subscriber = WeightSubscriber(bus, device=self.device, label=f"bench rank {self.rank}")
        self.loader = PlannedLoader(
            self.model, torch.device(self.device), lambda given, _: self.model.load_weights(given)
        )

    def leave(self) -> None:
        """Let go of the weights."""
        if self.subscriber is not None:
            self.subscriber.close()
        self.subscriber = self.loader = None

    def leased(self) -> Weights:
        """Lease the newest version."""
        assert self.subscriber is not None
        return self.subscriber.latest(timeout=PATIENCE_S)

    def prepare(self) -> None:
        """Do what an engine's rank does before it pauses."""
        assert self.loader is not None
        self.loader.prepare_aside(self.leased())
        self.loader.await_prepared()

    def load(self) -> tuple[str, float, int]:
        """Load the newest version: how, in which time, and how many bytes of it."""
        assert self.loader is not None
        began = time.perf_counter()
        with self.leased() as weights:
            how = self.loader.load(weights)
        settle(self.device)
        return how, time.perf_counter() - began, self.loader.nbytes

    def check(self) -> str:
        """Compare with what the engine's loader makes of the newest version; what differs."""
        fresh = FusedModel(self.shape, self.rank, RANKS, self.device)
        with self.leased() as weights:
            fresh.load_weights((name, weights[name].to(self.device)) for name in weights)
            settle(self.device)
        for (name, ours), theirs in zip(
            self.model.named_parameters(), fresh.parameters(), strict=True
        ):
            if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
                return name
        return ""

    def die_in_load(self) -> None:
        """Begin to load, and be killed in it."""
        threading.Thread(target=self.load, daemon=True).start()
        time.sleep(DIES_AFTER_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def pinned(self, size: int) -> float:
        """Return the seconds of a pinned copy to the device, of so many bytes."""
        part = min(size, 256 << 20)
        there = torch.empty(part, dtype=torch.uint8, device=self.device)
        here = torch.empty(part, dtype=torch.uint8, pin_memory=self.device != "cpu")
        for turn in range(2):
            began = time.perf_counter()
            for _ in range(max(1, size // part)):
                there.copy_(here, non_blocking=True)
            settle(self.device)
            took = time.perf_counter() - began
            del turn
        return took * size / (max(1, size // part) * part)

    def join(self, address: str) -> None:
        """Join the group, as the one who receives."""
        join_group(address, 1, self.device)

    def receive(self) -> tuple[str, float, int]:
        """Receive all of the model, and take what this rank needs of it."""
        shapes = checkpoint(self.shape)
        width = self.shape.dtype.itemsize
        sizes = {name: torch.Size(size).numel() * width for name, size in shapes.items()}
        began = time.perf_counter()
        for names, size in buckets(sizes):
            packed = torch.empty(size, dtype=torch.uint8, device=self.device)
            torch.distributed.broadcast(packed, 0)
            cut = torch.split(packed, [sizes[name] for name in names])
            parts = zip(names, cut, strict=True)
            self.model.load_weights(
                (name, part.view(self.shape.dtype).view(shapes[name])) for name, part in parts
            )
        settle(self.device)
        return "broadcast", time.perf_counter() - began, sum(sizes.values())

    def peak(self) -> int:
        """Bytes beside the model."""
        return peak_beside(self.model, self.device)


def serve(pipe: Connection, make: Callable[..., Any], *arguments: Any) -> None:
    """Do what is asked for, a process of its own."""
    try:
        party = make(*arguments)
        pipe.send((True, None))
        while True:
            verb, given = pipe.recv()
            pipe.send((True, getattr(party, verb)(*given)))
    except EOFError:
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send((False, f"{type(error).__name__}: {error}"))
        raise


class Party:
    """A process that does what it is asked for."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self.name = make.__name__
        self.pipe, there = context().Pipe()
        self.process = context().Process(target=serve, args=(there, make, *arguments), daemon=True)
        self.process.start()
        there.close()

    def ask(self, verb: str, *arguments: Any) -> None:
        """Ask it for something, and go on."""
        self.pipe.send((verb, arguments))

    def answer(self) -> Any:
        """Wait for what it answers."""
        if not self.pipe.poll(PATIENCE_S):
            raise MeasurementError(f"{self.name} said nothing in {PATIENCE_S:g} s")
        try:
            done, result = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise MeasurementError(f"{self.name} died") from None
        if not done:
            raise MeasurementError(f"{self.name}: {result}")
        return result

    def do(self, verb: str, *arguments: Any) -> Any:
        """Ask it, and wait."""
        self.ask(verb, *arguments)
        return self.answer()

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


# -- what is measured ------------------------------------------------------------------------------


class Bench:
    """The rows of one model."""

    def __init__(self, name: str, shape: Shape, device: str, rounds: int) -> None:
        self.name, self.shape, self.rounds, self.device = name, shape, rounds, device
        count = 0 if device == "cpu" else torch.cuda.device_count()
        self.devices = ["cpu"] * RANKS if not count else [f"cuda:{n % count}" for n in range(RANKS)]
        self.trainer = Party(Trainer, shape, self.devices[0])
        self.ranks = [Party(Rank, shape, rank, self.devices[rank]) for rank in range(RANKS)]
        for party in (self.trainer, *self.ranks):
            party.answer()
        width = shape.dtype.itemsize
        self.size = sum(torch.Size(each).numel() for each in checkpoint(shape).values()) * width
        self.rows: list[Row] = []

    def end(self) -> None:
        """End every process."""
        for party in (self.trainer, *self.ranks):
            party.end()

    def both(self, verb: str, *arguments: Any) -> list[Any]:
        """Ask both ranks at once."""
        for rank in self.ranks:
            rank.ask(verb, *arguments)
        return [rank.answer() for rank in self.ranks]

    def update(self) -> dict[str, Any]:
        """Bring one version to both ranks."""
        _, published = self.trainer.do("publish")
        began = time.perf_counter()
        self.both("prepare")
        prepared = time.perf_counter() - began
        began = time.perf_counter()
        loads = self.both("load")
        return {
            "pause_s": time.perf_counter() - began,
            "prepare_s": prepared,
            "publish_s": published,
            "how": [how for how, _, _ in loads],
            "load_s": [took for _, took, _ in loads],
            "bytes_a_rank": [size for _, _, size in loads],
        }

    def add(
        self, way: str, title: str, updates: Sequence[dict[str, Any]], **beside: Any
    ) -> list[float]:
        """Add a row of pauses."""
        values = [each["pause_s"] for each in updates]
        last = updates[-1]
        figures = {
            "bytes_a_rank": last["bytes_a_rank"],
            "how": last["how"],
            "publish_s": [each.get("publish_s") for each in updates],
            "prepare_s": [each.get("prepare_s") for each in updates],
            "load_s": [each["load_s"] for each in updates],
            "peak_bytes_beside_the_model": [
                party.do("peak") for party in (self.trainer, *self.ranks)
            ],
        }
        self.rows.append(
            Row(
                name=f"engines-{self.name}-{way}", title=f"{self.name}, {title}", unit="ms",
                values=tuple(1e3 * value for value in values), figures=figures, **beside,
            )
        )  # fmt: skip
        print(f"{self.name}: {title}: {1e3 * statistics.median(values):.1f} ms", flush=True)
        return values

    @contextlib.contextmanager
    def weights(self, carrier: str) -> Iterator[str]:
        """Have the trainer publish, and the ranks read; at the end they are compared."""
        bus = f"bench-engines-{os.getpid()}-{secrets.token_hex(3)}"
        self.trainer.do("open", bus, carrier)
        self.trainer.do("publish")
        self.both("attach", bus)
        self.both("peak")  # from here on: what came before is not this way's
        yield bus
        wrong = [each for each in self.both("check") if each]
        self.both("leave")
        self.trainer.do("close")
        if wrong:
            raise MeasurementError(
                f"{carrier}: {wrong} is not what the engine's loader makes of it"
            )

    def measure(self) -> list[Row]:
        """Measure all ways."""
        nccl = self.guarded("nccl", "packed broadcast, buckets of 1 GiB", self.broadcast)
        self.guarded("shm", "through /dev/shm, its slices", lambda: self.by_shm(nccl))
        self.guarded("device", "through device memory", lambda: self.by_device(nccl))
        self.guarded("killed", "a rank killed in its update, the other", self.killed)
        return self.rows

    def guarded(self, way: str, title: str, run: Callable[[], list[float]]) -> list[float]:
        """Measure a way; where it cannot be, say why, and go on with the others."""
        try:
            return run()
        except (MeasurementError, ShmbusError, OSError) as error:
            print(f"{self.name}: {title}: {error}", file=sys.stderr, flush=True)
            self.rows.append(
                skipped(f"engines-{self.name}-{way}", f"{self.name}, {title}", str(error))
            )
            if any(not party.process.is_alive() for party in (self.trainer, *self.ranks)):
                self.end()
                rows = self.rows
                self.__init__(self.name, self.shape, self.device, self.rounds)  # type: ignore[misc]
                self.rows = rows
            return []

    def by_shm(self, nccl: Sequence[float]) -> list[float]:
        """Measure a rank's slices of registered memory."""
        with self.weights("shm"):
            for _ in range(3):  # the engine's loader once, then each slot once
                self.update()
            loads = [self.update() for _ in range(self.rounds)]
            beside = _beside(nccl)
            found = self.add("shm", "through /dev/shm, its slices", loads, **beside)
            size = min(loads[-1]["bytes_a_rank"])
            pinned = [max(self.both("pinned", size)) for _ in range(self.rounds)]
            self.rows.append(
                Row(
                    name=f"engines-{self.name}-rate",
                    title=f"{self.name}, a rank's slices through /dev/shm", unit="GB/s",
                    values=tuple(size / max(each["load_s"]) / 1e9 for each in loads),
                    beside="a pinned copy", beside_values=tuple(size / s / 1e9 for s in pinned),
                )
            )  # fmt: skip
        return found

    def by_device(self, nccl: Sequence[float]) -> list[float]:
        """Measure a rank's slices of the memory of the trainer's device."""
        with self.weights("memfd" if self.device == "cpu" else "cuda_vmm"):
            for _ in range(3):
                self.update()
            loads = [self.update() for _ in range(self.rounds)]
            return self.add("device", "through device memory, its slices", loads, **_beside(nccl))

    def killed(self) -> list[float]:
        """Have a rank die while both load."""
        bus = f"bench-engines-{os.getpid()}-{secrets.token_hex(3)}"
        self.trainer.do("open", bus, "shm")
        self.trainer.do("publish")
        self.both("attach", bus)
        for _ in range(3):
            self.update()
        self.trainer.do("publish")
        began = time.perf_counter()
        self.ranks[1].ask("die_in_load")
        self.ranks[0].do("load")
        took = time.perf_counter() - began
        published = self.trainer.do("publish")[1]
        self.rows.append(
            Row(
                name=f"engines-{self.name}-killed", unit="s", values=(took,),
                title=f"{self.name}, a rank killed in its update: until the other has it",
                figures={"the next publication_s": published},
            )
        )  # fmt: skip
        wrong = self.ranks[0].do("check") if self.ranks[0].do("load") else ""
        if wrong:
            raise MeasurementError(f"{wrong} of the rank that lived is wrong")
        self.ranks[0].do("leave")
        self.trainer.do("close")
        self.ranks[1].end()
        self.ranks[1] = Party(Rank, self.shape, 1, self.devices[1])
        self.ranks[1].answer()
        return [took]

    def group(self) -> None:
        """Have the trainer and the second rank make a group."""
        if self.device != "cpu" and self.devices[0] == self.devices[1]:
            raise MeasurementError("NCCL takes a device once, and there is one")
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{chosen.getsockname()[1]}"
        self.trainer.ask("join", address)
        self.ranks[1].do("join", address)
        self.trainer.answer()

    def broadcast(self) -> list[float]:
        """Broadcast all of the model."""
        self.group()
        loads = []
        for turn in range(self.rounds + 1):
            began = time.perf_counter()
            self.trainer.ask("broadcast")
            how, took, size = self.ranks[1].do("receive")
            self.trainer.answer()
            if turn:
                pause = time.perf_counter() - began
                loads.append(
                    {"pause_s": pause, "how": [how], "load_s": [took], "bytes_a_rank": [size]}
                )
        return self.add("nccl", "packed broadcast, buckets of 1 GiB", loads)


def _beside(nccl: Sequence[float]) -> dict[str, Any]:
    return (
        {"beside": "broadcast", "beside_values": (1e3 * statistics.median(nccl),)} if nccl else {}
    )


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure the models that were asked for."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rounds = options.repetitions or (2 if options.tiny else 5)
    if options.device != "cpu" and not torch.cuda.is_available():
        return [skipped("engines", "weights into engines", "torch sees no CUDA device")]
    small = options.tiny or options.device == "cpu"
    rows: list[Row] = []
    for name in options.models.split(","):
        shape = MODELS[name]
        if small:
            experts = 8 if shape.experts else 0
            shape = Shape(tied=shape.tied, experts=experts)
        bench = Bench(name, shape, options.device, rounds)
        try:
            rows += bench.measure()
        finally:
            bench.end()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = program.parser_of("engines", __doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--models", default=",".join(MODELS), help="by commas (default: %(default)s)"
    )
    return program.run("engines", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
