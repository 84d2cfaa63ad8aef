"""A real vLLM server in each mode of pausing, and after a trainer that died in the middle."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_model as tiny
from serving import SIZES, fresh_outputs, serving

from shmbus import Bus
from shmbus.engines import EngineFleet, VllmServer
from shmbus.engines.pause_note import paused_by
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]
MODES: list[dict[str, Any]] = [
    {"mode": "keep", "clear_cache": True},
    {"mode": "wait"},
    {"mode": "abort"},
]
#: Requests that a trainer dies before: the first leaves the server paused with its old weights, the
#: others in the middle of the new ones.
STEPS = ["start", "update", "finish"]


def die_before(step: str, url: str, bus: str, version: int) -> None:
    """Bring a version of seed 1 to the server, and the next one, of seed 2, not to its end."""

    class Dying(VllmServer):
        async def call(self, called: str, *arguments: Any, **options: Any) -> Any:
            if called == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return await super().call(called, *arguments, **options)

    model = tiny.build(1)
    publisher = WeightPublisher(bus, ModuleSource(model), keep=True)
    EngineFleet([VllmServer(url)], bus=bus, timeout=60).update_sync(publisher, version)
    model.load_state_dict(tiny.build(2).state_dict())
    EngineFleet([Dying(url)], bus=bus, timeout=60).update_sync(publisher, version + 1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", SIZES)
async def test_each_mode_and_each_death_of_a_trainer_leave_a_server_with_whole_weights(
    size: int, folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    expected = await fresh_outputs(folders, tmp_path, size)
    async with serving(folders[0], tmp_path / "server.log", size) as server:
        model = tiny.build(0)
        version = 0
        with WeightPublisher(bus.name, ModuleSource(model), keep=True) as publisher:
            for version, options in enumerate(MODES, 1):
                seed = 1 + version % 2
                model.load_state_dict(tiny.build(seed).state_dict())
                fleet = EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60, **options)
                report = await fleet.update(publisher, version)
                assert report.servers[0].state == "serving", options
                assert await server.greedy() == expected[seed], options
        for step in STEPS:
            version += 2
            trainer = multiprocessing.get_context("spawn").Process(
                target=die_before, args=(step, server.url, bus.name, version)
            )
            trainer.start()
            await asyncio.to_thread(trainer.join)
            assert trainer.exitcode == -signal.SIGKILL
            assert paused_by(bus.name) is not None
            command = [sys.executable, "-m", "shmbus", "weights", bus.name, "--resume"]
            said = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=120
            )
            assert said.returncode == 0, (step, said.stdout, said.stderr)
            whole = version if step == "start" else version + 1
            assert f"serving, runs version {whole}" in said.stdout
            assert paused_by(bus.name) is None
            assert await server.greedy() == expected[1 if step == "start" else 2], step
