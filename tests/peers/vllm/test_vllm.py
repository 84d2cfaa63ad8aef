"""A real vLLM server takes weights from shared memory, under load, and answers as a fresh one.

``SHMBUS_TEST_UPDATES=100`` is the long form; ``SHMBUS_TEST_TP=1,2`` chooses tensor parallel sizes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import model as tiny
import pytest

from shmbus import Bus
from shmbus.pool import read_pool
from trainer_adapter.engines import EngineFleet, UpdateRolledBackError, VllmServer
from trainer_adapter.weights import ModuleSource, WeightPublisher

UPDATES = int(os.environ.get("SHMBUS_TEST_UPDATES", "6"))
SIZES = [int(size) for size in os.environ.get("SHMBUS_TEST_TP", "1").split(",")]
START_S = 240.0 * float(os.environ.get("SHMBUS_TEST_PATIENCE", "1"))
PROMPTS = ["w1 w2 w3", "w5", "w100 w7 w7 w9 w23"]
TOKENS = 24


class Server:
    def __init__(self, folder: Path, log: Path, tensor_parallel: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        environment = dict(
            os.environ,
            VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            # A core a rank; by itself vLLM wants a NUMA node for each.
            VLLM_CPU_OMP_THREADS_BIND="|".join(
                str(rank % (os.cpu_count() or 1)) for rank in range(tensor_parallel)
            ),
        )  # fmt: skip
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server",
                    "--model", str(folder), "--served-model-name", "m", "--host", "127.0.0.1",
                    "--port", str(port), "--dtype", "float32", "--enforce-eager",
                    "--max-model-len", "256", "--tensor-parallel-size", str(tensor_parallel),
                    "--weight-transfer-config", '{"backend": "shmbus"}',
                ],
                env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    async def started(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                    session.get(f"{self.url}/health") as response,
                ):
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-3000:])

    async def complete(self, prompt: str, tokens: int = TOKENS, **options: Any) -> str:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **options}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
            session.post(f"{self.url}/v1/completions", json=body) as response,
        ):
            answer = await response.json()
            assert response.status == 200, answer
            choice = answer["choices"][0]
            assert choice["finish_reason"] == "length"
            return str(choice["text"])

    async def greedy(self) -> list[str]:
        # No two requests share a prefix cache over an update: each asks with a salt of its own.
        return [
            await self.complete(prompt, ignore_eos=True, cache_salt=os.urandom(8).hex())
            for prompt in PROMPTS
        ]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def folders(tmp_path: Path) -> dict[int, Path]:
    found = {}
    for seed in (0, 1, 2):
        tiny.save(str(tmp_path / str(seed)), seed)
        found[seed] = tmp_path / str(seed)
    return found


@pytest.fixture
def bus() -> Iterator[Bus]:
    with Bus.create(f"test-vllm-{os.getpid()}", "1MiB", max_producers=4) as bus:
        yield bus


async def fresh_outputs(folder: Path, log: Path, size: int) -> list[str]:
    server = Server(folder, log, size)
    try:
        await server.started()
        return await server.greedy()
    finally:
        server.end()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
async def test_updates_under_load_lose_no_request_and_give_a_fresh_servers_outputs(
    size: int, folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    expected = {
        seed: await fresh_outputs(folders[seed], tmp_path / f"fresh-{seed}.log", size)
        for seed in (1, 2)
    }
    assert expected[1] != expected[2]
    server = Server(folders[0], tmp_path / "server.log", size)
    publishers = {}
    done = asyncio.Event()
    answered = 0

    async def load() -> None:
        nonlocal answered
        while not done.is_set():
            await server.complete("w3 w4", 48, ignore_eos=True)
            answered += 1

    try:
        await server.started()
        models = {seed: tiny.build(seed) for seed in (1, 2)}
        model = tiny.build(0)
        with WeightPublisher(bus.name, ModuleSource(model)) as publisher:
            publishers[0] = publisher
            async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
                workers = [asyncio.ensure_future(load()) for _ in range(4)]
                for version in range(UPDATES):
                    seed = 1 + version % 2
                    model.load_state_dict(models[seed].state_dict())
                    report = await fleet.update(publisher, version)
                    assert report.servers[0].version == version
                    assert report.servers[0].ranks == size
                    assert await server.greedy() == expected[seed], f"version {version}"
                done.set()
                await asyncio.gather(*workers)
        assert answered > UPDATES
        print(f"TP {size}: {UPDATES} updates, {answered} requests, none lost")
    finally:
        server.end()


@pytest.mark.timeout(900)
async def test_a_version_that_does_not_fit_leaves_the_last_whole_one_in_force(
    folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    size = SIZES[-1]
    expected = await fresh_outputs(folders[1], tmp_path / "fresh.log", size)
    server = Server(folders[0], tmp_path / "server.log", size)
    try:
        await server.started()
        model = tiny.build(1)
        async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
            with WeightPublisher(bus.name, ModuleSource(model), keep=True) as publisher:
                await fleet.update(publisher, 1)
                assert await server.greedy() == expected

                class Wrong:
                    """Publishes a model whose tensors have other shapes."""

                    def publish(self, version: int) -> None:
                        publisher.close()
                        other = tiny.build(2)
                        other.model.norm.weight.data = other.model.norm.weight.data[:64].clone()
                        self.publisher = WeightPublisher(bus.name, ModuleSource(other))
                        self.publisher.publish(version=version)

                wrong = Wrong()
                with pytest.raises(UpdateRolledBackError, match="version 1 again"):
                    await fleet.update(wrong, 2)
                assert await server.greedy() == expected
                rows = [
                    row
                    for row in read_pool(bus.name, "weights").readers
                    if row.state == "alive" and row.label.startswith(server.url)
                ]
                assert [row.applied_version for row in rows] == [1] * size
                wrong.publisher.close()
    finally:
        server.end()
