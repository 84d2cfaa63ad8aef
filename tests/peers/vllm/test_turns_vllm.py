"""A real vLLM server sleeps and wakes with new weights; a CPU keeps the memory of both.

Source of the requests: `sleep` and `wake_up` of vllm/entrypoints/serve/dev/sleep/api_router.py, and
`EngineCore.sleep`, `.wake_up` and `.is_sleeping` of vllm/v1/engine/core.py, vLLM 0.32.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_model as tiny
from serving import PROMPTS, Server

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, VllmServer
from shmbus.engines.pause_note import paused_by
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]
CACHE_BYTES = 32 << 30
GPU = (
    "--dtype", "bfloat16", "--enable-sleep-mode", "--gpu-memory-utilization", "0.3",
    "--kv-cache-memory-bytes", str(CACHE_BYTES),
)  # fmt: skip


class Sleeping(VllmServer):
    async def check_sleep(self, level: int, timeout: float) -> None:
        """Take a server without sleep mode."""


class Cut(Sleeping):
    """A trainer's connection that ends before a request, or after its answer."""

    def __init__(self, url: str, step: str, after: bool) -> None:
        super().__init__(url)
        self._cut = step, after

    async def call(self, called: str, *arguments: Any, **options: Any) -> Any:
        if self._cut == (called, False):
            raise EngineError(self.address, called, None, "cut", "")
        answer = await super().call(called, *arguments, **options)
        if self._cut == (called, True):
            raise EngineError(self.address, called, None, "cut", "")
        return answer


CUTS = [
    (step, after)
    for step in ("sleep", "wake weights", "start", "update", "wake kv_cache", "resume")
    for after in (False, True)
]


async def turns(folders: dict[int, Path], bus: Bus, folder: Path, *options: str) -> None:
    expected: dict[int, Any] = {}
    for seed in (1, 2):
        fresh = Server(folders[seed], folder / f"fresh-{seed}.log", 1, *options)
        try:
            await fresh.started()
            expected[seed] = await fresh.greedy()
        finally:
            fresh.end()
    server, version = Server(folders[0], folder / "server.log", 1, *options), 0
    model = tiny.build(0)
    try:
        await server.started()
        with WeightPublisher(bus.name, ModuleSource(model)) as publisher:
            fleet = EngineFleet([Sleeping(server.url)], bus=bus.name, timeout=60)
            for level in (1, 2, 1, 2):
                version += 1
                model.load_state_dict(tiny.build(1 + version % 2).state_dict())
                kept = asyncio.create_task(server.complete(PROMPTS[0], 200, ignore_eos=True))
                await asyncio.sleep(0.5)
                await fleet.sleep(level)
                assert (await fleet.wake(publisher, version)).servers[0].state == "serving"
                assert len(await kept) == 200
                assert await server.greedy() == expected[1 + version % 2], (version, level)
            for step, after in CUTS:
                version += 1
                model.load_state_dict(tiny.build(1 + version % 2).state_dict())
                cut = EngineFleet([Cut(server.url, step, after)], bus=bus.name, timeout=5)
                with contextlib.suppress(EngineError):
                    await cut.sleep()
                    await cut.wake(publisher, version)
                await fleet.wake(publisher, version)
                assert await server.greedy() == expected[1 + version % 2], (step, after)
        assert paused_by(bus.name) is None
    finally:
        server.end()


@pytest.mark.timeout(900)
async def test_a_turn_cut_off_anywhere_ends_in_whole_weights(
    folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    await turns(folders, bus, tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(900)
async def test_turns_on_a_gpu(folders: dict[int, Path], bus: Bus, tmp_path: Path) -> None:
    await turns(folders, bus, tmp_path, *GPU)
    server = Server(folders[0], tmp_path / "memory.log", 1, *GPU)
    try:
        await server.started()
        free = [torch.cuda.mem_get_info()[0]]
        fleet = EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60)
        await fleet.sleep()
        free.append(torch.cuda.mem_get_info()[0])
        assert free[1] - free[0] > CACHE_BYTES
        with WeightPublisher(bus.name, ModuleSource(tiny.build(1))) as publisher:
            await fleet.wake(publisher, 1)
    finally:
        server.end()


@pytest.mark.timeout(600)
async def test_a_server_without_sleep_mode_is_refused(
    folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    server = Server(folders[1], tmp_path / "server.log", 1)
    try:
        await server.started()
        before = await server.greedy()
        with pytest.raises(EngineError) as caught:
            await EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60).sleep()
        assert "enable_sleep_mode" in caught.value.body
        assert await server.greedy() == before
    finally:
        server.end()
