"""Cost of new weights to a real vLLM server: ``python tests/peers/vllm/updates_table.py``.

An arm brings equal versions to a server with eight requests in flight; each answer is compared
with a fresh server's. ``--shape 0.6b`` and ``4b`` take Qwen3's shapes, ``--device cuda`` bfloat16
weights on the server's GPU, ``cuda:1`` on the next one (with SHMBUS_TEST_VLLM_GPUS=0). In
the arms of turns the server sleeps before each version: the pause is the wake.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import torch
import vllm_model as tiny
from serving import Server, fresh_outputs, serving

from bench import program
from bench.processes import MeasurementError
from bench.row import Row
from shmbus import Bus, Producer
from shmbus.engines import EngineFleet, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher, attach_model
from shmbus.weights.rounding import Rounding

PROGRAM = "tests/peers/vllm/updates_table.py"
IN_FLIGHT = 8
TOKENS = 32
#: Tokens of a block of vLLM's cache, on a CPU a multiple of 32; only whole blocks are cached.
BLOCK = 32
OPTIONS = ("--block-size", str(BLOCK), "--enable-prompt-tokens-details", "--enable-prefix-caching")
PROMPTS, PROBES = (
    [" ".join(f"w{(n * 7 + k) % 125}" for k in range(2 * BLOCK)) for n in range(first, first + 4)]
    for first in (0, 4)
)
RESTARTS = 3


class Load:
    def __init__(self, server: Server, salt: Callable[[], str]) -> None:
        self.server, self.salt = server, salt
        self.tokens = self.lost = 0
        self.done = False
        self.held = False
        self.under_way = 0

    async def ask(self, prompt: str, tokens: int = TOKENS) -> dict[str, Any]:
        body = {
            "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        if salt := self.salt():
            body["cache_salt"] = salt
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
            session.post(f"{self.server.url}/v1/completions", json=body) as response,
        ):
            answer: dict[str, Any] = await response.json()
            if response.status != 200 or answer["usage"]["completion_tokens"] != tokens:
                raise RuntimeError(f"{response.status}: {answer}")
            return answer

    async def run(self, number: int) -> None:
        while not self.done:
            while self.held:
                await asyncio.sleep(0.01)
            self.under_way += 1
            try:
                await self.ask(PROMPTS[number % len(PROMPTS)])
                self.tokens += TOKENS
            except (RuntimeError, aiohttp.ClientError, TimeoutError):
                self.lost += 1
                await asyncio.sleep(0.2)
            self.under_way -= 1
            number += 1

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Hold the requests: in bfloat16 a larger batch rounds to different tokens."""
        self.held = True
        while self.under_way:
            await asyncio.sleep(0.01)
        yield
        self.held = False

    async def stale(self) -> int:
        """Ask what was asked after the update before; how much of it is served from a cache."""
        found = 0
        for prompt in PROBES:
            usage = (await self.ask(prompt, 1))["usage"]
            found += bool((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        return found


class Arm:
    def __init__(self, name: str, title: str) -> None:
        self.name, self.title = name, title
        self.pauses: list[float] = []
        self.updates: list[float] = []
        self.stale = self.wrong = 0
        self.figures: dict[str, float] = {}

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Time from ready weights in the trainer to the resumed server."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.monotonic()
        yield
        self.updates.append(time.monotonic() - began)
        self.figures["update_p50_ms"] = 1e3 * statistics.median(self.updates)

    def row(self, load: Load, seconds: float) -> Row:
        ordered = sorted(self.pauses)
        figures = {
            "pause_p95_ms": 1e3 * ordered[int(0.95 * (len(ordered) - 1))],
            "tokens_a_second": load.tokens / seconds,
            "requests_lost": load.lost,
            "stale_prefix_hits": self.stale,
            "answers_unlike_a_fresh_server": self.wrong,
            **self.figures,
        }
        said = ", ".join(
            f"{key.replace('_', ' ')} {value:,.0f}" for key, value in figures.items() if value
        )
        print(f"{self.title}: pause {1e3 * statistics.median(ordered):.1f} ms, {said}", flush=True)
        values = tuple(1e3 * pause for pause in self.pauses)
        return Row(
            name=f"vllm-{self.name}", title=f"vLLM, {self.title}", unit="ms", values=values,
            figures=figures, note=said,
        )  # fmt: skip


async def measure_arm(
    arm: Arm,
    server: Server,
    bus: Bus,
    expected: dict[int, list[list[int]]],
    updates: int,
    bring: Callable[[int], Awaitable[float]],
    *,
    salted: bool,
) -> Row:
    with Producer(bus.name) as producer:
        load = Load(server, (lambda: producer.cache_salt) if salted else (lambda: ""))
        began = time.monotonic()
        workers = [asyncio.ensure_future(load.run(number)) for number in range(IN_FLIGHT)]
        await asyncio.sleep(2.0)
        for number in range(1, updates + 1):
            arm.pauses.append(await bring(number))
            arm.stale += await load.stale()
            async with load.quiet():
                arm.wrong += await server.greedy() != expected[1 + number % 2]
        load.done = True
        await asyncio.gather(*workers)
        return arm.row(load, time.monotonic() - began)


@contextlib.asynccontextmanager
async def begun(
    options: argparse.Namespace, folder: Path, memory: str | None = None, *more: str
) -> AsyncIterator[tuple[Path, Bus, Server]]:
    """Start a server of a model's folder, with a bus and a directory."""
    with (
        tempfile.TemporaryDirectory(dir=memory) as name,
        Bus.create(f"vllm-table-{secrets.token_hex(3)}", "4MiB") as bus,
    ):
        way = (*OPTIONS, *(each.replace("BUS", bus.name) for each in more))
        async with serving(folder, Path(name) / "log", options.tp, *way) as server:
            yield Path(name), bus, server


async def by_updates(
    arm: Arm,
    options: argparse.Namespace,
    folders: dict[int, Path],
    expected: Any,
    *,
    salted: bool = True,
    carrier: str = "auto",
    rounding: Rounding = "nearest",
) -> Row:
    """By a carrier; of "checkpoint" vLLM reads safetensors in tmpfs again.

    With stochastic rounding the trainer has float32.
    """
    files = carrier == "checkpoint"
    async with begun(options, folders[1], "/dev/shm" if files else None) as (folder, bus, server):
        models = {seed: build(options, seed) for seed in (1, 2)}
        model = build(options, 1)
        source = ModuleSource(model)
        if rounding == "stochastic":
            source = ModuleSource(model.float(), dtype=options.dtype, rounding=rounding)
        place = folder / "checkpoints"
        more: dict[str, Any] = {"directory": place} if files else {}
        if carrier == "cuda_vmm":
            more = {"device": options.device}
        with WeightPublisher(bus.name, source, carrier=carrier, **more) as publisher:
            async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=600) as fleet:

                async def bring(version: int) -> float:
                    model.load_state_dict(models[1 + version % 2].state_dict())
                    with arm.update():
                        if files:
                            publisher.publish(version=version)
                            report = await fleet.reload(place)
                        else:
                            report = await fleet.update(publisher, version)
                    return report.servers[0].paused_s

                return await measure_arm(
                    arm, server, bus, expected, options.updates, bring, salted=salted
                )


async def by_vllm(
    arm: Arm, options: argparse.Namespace, folders: dict[int, Path], expected: Any, *, backend: str
) -> Row:
    """By vLLM's own backends: a broadcast, or handles of CUDA memory, in a pause."""
    from vllm.distributed.weight_transfer import base, clients, ipc_engine, nccl_engine

    # Handles travel pickled, which vLLM takes on request.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    config = ["--weight-transfer-config", f'{{"backend": "{backend}"}}']
    async with begun(options, folders[1], None, *config) as (_, bus, server):
        models = {seed: build(options, seed) for seed in (1, 2)}
        model = build(options, 1)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        engine: Any = nccl_engine.NCCLTrainerWeightTransferEngine
        info: Any = nccl_engine.NCCLTrainerInitInfo(
            rank=0, master_address="127.0.0.1", master_port=port, world_size=1 + options.tp
        )
        if backend == "ipc":
            engine = ipc_engine.IPCTrainerWeightTransferEngine
            info = ipc_engine.IPCTrainerInitInfo(rank=0, packed=True)
        sender = engine.trainer_init(
            info,
            client=clients.HTTPVLLMWeightSyncClient(server.url),
            source=base.ModuleSource(model),
        )
        # vLLM skips the broadcasts without an error, where torch has an older NCCL than vLLM needs.
        if backend == "nccl" and sender.model_update_group.disabled:
            raise MeasurementError("vLLM has switched NCCL off, so no weights would travel")

        def send() -> None:
            if options.device.startswith("cuda:"):
                torch.cuda.set_device(options.device)
            sender.send_weights()

        async def bring(version: int) -> float:
            model.load_state_dict(models[1 + version % 2].state_dict())
            with arm.update():
                began = time.monotonic()
                await order(server, "pause?mode=keep")
                await asyncio.to_thread(send)
                await order(server, "resume")
            return time.monotonic() - began

        return await measure_arm(arm, server, bus, expected, options.updates, bring, salted=False)


async def by_steps(
    arm: Arm, options: argparse.Namespace, folders: dict[int, Path], expected: Any
) -> Row:
    """By steps in the server's own parameters, the only copy."""
    share = ["--additional-config", '{"shmbus_share": "BUS"}']
    async with begun(options, folders[1], None, *share) as (_, bus, server):
        models = {seed: build(options, seed) for seed in (1, 2)}
        model = build(options, 1)
        with attach_model(bus.name, model, writable=True) as shared:
            async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=600) as fleet:

                async def bring(version: int) -> float:
                    new = models[1 + version % 2].state_dict()
                    with arm.update():
                        await fleet.step(shared, lambda: model.load_state_dict(new), version)
                    return arm.updates[-1]

                return await measure_arm(
                    arm, server, bus, expected, options.updates, bring, salted=True
                )


async def order(server: Server, path: str, body: dict[str, Any] | None = None) -> None:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
        session.post(f"{server.url}/{path}", json=body) as response,
    ):
        assert response.status == 200, await response.text()


async def by_turns(
    arm: Arm, options: argparse.Namespace, folders: dict[int, Path], expected: Any, *, level: int
) -> Row:
    """By a server that sleeps, and wakes with the version; at level 0 vLLM reads files."""
    before = torch.cuda.mem_get_info()[0]
    async with begun(options, folders[1]) as (_, bus, server):
        engine = before - torch.cuda.mem_get_info()[0]
        models = {seed: build(options, seed) for seed in (1, 2)}
        model = build(options, 1)
        sleeps, freed = [], []

        async def sleep(fleet: EngineFleet) -> None:
            awake, began = torch.cuda.mem_get_info()[0], time.monotonic()
            if level:
                await fleet.sleep(level)
            else:
                await order(server, "pause?mode=keep")
                await order(server, "sleep?level=2")
            sleeps.append(time.monotonic() - began)
            freed.append((torch.cuda.mem_get_info()[0] - awake) / engine)

        async def read(seed: int) -> None:
            await order(server, "wake_up?tags=weights")
            place = {"weights_path": str(folders[seed])}
            await order(server, "collective_rpc", {"method": "reload_weights", "kwargs": place})
            await order(server, "wake_up?tags=kv_cache")
            await order(server, "resume")

        with WeightPublisher(bus.name, ModuleSource(model)) as publisher:
            async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=600) as fleet:

                async def bring(version: int) -> float:
                    await sleep(fleet)
                    model.load_state_dict(models[1 + version % 2].state_dict())
                    publisher.publish(version=version)
                    began = time.monotonic()
                    await (fleet.wake(publisher, version) if level else read(1 + version % 2))
                    took = time.monotonic() - began
                    arm.figures = {
                        "sleep_p50_ms": 1e3 * statistics.median(sleeps),
                        "freed_percent_of_the_engine": 100 * statistics.median(freed),
                        "pinned_copy_ms": 1e3 * pinned_copy_s(model),
                    }
                    return took

                return await measure_arm(
                    arm, server, bus, expected, options.updates, bring, salted=True
                )


def pinned_copy_s(model: torch.nn.Module) -> float:
    """Return the seconds of a copy of a model's bytes from pinned memory to the device."""
    source = torch.empty(256 << 20, dtype=torch.uint8, device="cpu", pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.monotonic()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return min(times) * sum(each.nbytes for each in model.parameters()) / source.nbytes


async def by_restarts(
    arm: Arm, options: argparse.Namespace, folders: dict[int, Path], expected: Any
) -> Row:
    """By a server that is started anew with each version."""
    async with begun(options, folders[1]) as (folder, bus, server):

        async def bring(version: int) -> float:
            began = time.monotonic()
            await asyncio.to_thread(server.end)
            new = Server(folders[1 + version % 2], folder / "log", options.tp, *OPTIONS)
            await new.started()
            server.process, server.url = new.process, new.url
            return time.monotonic() - began

        return await measure_arm(arm, server, bus, expected, RESTARTS, bring, salted=True)


def build(options: argparse.Namespace, seed: int) -> torch.nn.Module:
    return tiny.build(seed, options.shape, options.dtype)


ARMS: dict[str, tuple[str, Callable[..., Awaitable[Row]]]] = {
    "shm-salt": ("through shared memory, with salts", by_updates),
    "shm": ("through shared memory, without salts", partial(by_updates, salted=False)),
    "stochastic": ("float32, rounded stochastically", partial(by_updates, rounding="stochastic")),
    "cuda": ("through device memory", partial(by_updates, carrier="cuda_vmm")),
    "one-copy": ("in the server's own parameters", by_steps),
    "reload": ("reload_weights from tmpfs", partial(by_updates, carrier="checkpoint")),
    "nccl": ("by vLLM's NCCL backend", partial(by_vllm, backend="nccl")),
    "ipc": ("by vLLM's CUDA IPC backend", partial(by_vllm, backend="ipc")),
    "restart": ("stop and start", by_restarts),
    "turns-2": ("in turns, level 2", partial(by_turns, level=2)),
    "turns-1": ("in turns, level 1", partial(by_turns, level=1)),
    "turns-reload": ("in turns, level 2 and reload_weights", partial(by_turns, level=0)),
}


async def table(options: argparse.Namespace) -> list[Row]:
    torch.set_default_device(options.device)
    options.dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    if options.device.startswith("cuda:"):
        torch.cuda.set_device(options.device)
    with tempfile.TemporaryDirectory() as name:
        folders = {seed: Path(name) / str(seed) for seed in (1, 2)}
        for seed, folder in folders.items():
            tiny.save(str(folder), seed, options.shape, options.dtype)
        expected = await fresh_outputs(folders, Path(name), options.tp)
        assert expected[1] != expected[2]
        rows = []
        for arm in options.arms.split(","):
            title, run = ARMS[arm]
            rows.append(await run(Arm(arm, title), options, folders, expected))
        return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = program.parser_of(PROGRAM, __doc__)
    parser.add_argument("--shape", default="tiny", choices=tuple(tiny.SHAPES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "cuda:1", "cuda:2"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--arms", default="shm-salt,shm,reload,restart")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return program.run(PROGRAM, parser, lambda options: asyncio.run(table(options)), argv)


if __name__ == "__main__":
    sys.exit(main())
