"""A real vLLM server by checkpoints that the fleet reloads."""

import os
from pathlib import Path

import pytest
import vllm_model as tiny
from serving import SIZES, fresh_outputs, serving

from shmbus import Bus
from shmbus.engines import EngineFleet, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]

UPDATES = int(os.environ.get("SHMBUS_TEST_UPDATES", "4"))


@pytest.mark.timeout(900)
async def test_checkpoints_load_by_path(folders: dict[int, Path], bus: Bus, tmp_path: Path) -> None:
    size = SIZES[-1]
    expected = await fresh_outputs(folders, tmp_path, size)
    directory = tmp_path / "checkpoints"
    async with serving(folders[0], tmp_path / "server.log", size) as server:
        model = tiny.build(0)
        with WeightPublisher(
            bus.name, ModuleSource(model), carrier="checkpoint", directory=directory
        ) as publisher:
            async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
                for number in range(1, UPDATES + 1):
                    seed = 1 + number % 2
                    model.load_state_dict(tiny.build(seed).state_dict())
                    publisher.publish(number)
                    report = await fleet.reload(directory)
                    assert report.servers[0].version == number
                    assert await server.greedy() == expected[seed], f"reload {number}"
                    assert bus.policy_version == number
