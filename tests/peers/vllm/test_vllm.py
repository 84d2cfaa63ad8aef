"""A real vLLM server takes weights under load (SHMBUS_TEST_UPDATES=100, SHMBUS_TEST_TP=1,2)."""

import asyncio
import os
from pathlib import Path

import pytest
import vllm_model as tiny
from serving import SIZES, fresh_outputs, serving

from shmbus import Bus
from shmbus.engines import EngineFleet, UpdateRolledBackError, VllmServer
from shmbus.pool import read_pool
from shmbus.weights import ModuleSource, WeightPublisher

UPDATES = int(os.environ.get("SHMBUS_TEST_UPDATES", "6"))
pytest_plugins = ["vllm_fixtures"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", SIZES)
async def test_updates_under_load_lose_no_request_and_give_a_fresh_servers_outputs(
    size: int, folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    expected = await fresh_outputs(folders, tmp_path, size)
    assert expected[1] != expected[2]
    done = asyncio.Event()
    answered = 0

    async def load() -> None:
        nonlocal answered
        while not done.is_set():
            await server.complete("w3 w4", 48, ignore_eos=True)
            answered += 1

    async with serving(folders[0], tmp_path / "server.log", size) as server:
        models = {seed: tiny.build(seed) for seed in (1, 2)}
        model = tiny.build(0)
        with WeightPublisher(bus.name, ModuleSource(model)) as publisher:
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


@pytest.mark.timeout(900)
async def test_two_api_processes_serve_one_version(
    folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    """A connection reaches one of the processes; each answer here has a connection of its own."""
    expected = await fresh_outputs(folders, tmp_path, 1)
    async with serving(folders[0], tmp_path / "server.log", 1, api_processes=2) as server:
        model = tiny.build(0)
        with WeightPublisher(bus.name, ModuleSource(model)) as publisher:
            async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
                for version in (1, 2):
                    model.load_state_dict(tiny.build(version).state_dict())
                    under_way = [server.complete("w3", 48, ignore_eos=True) for _ in range(8)]
                    waiting = asyncio.gather(*under_way)
                    report = await fleet.update(publisher, version)
                    await waiting
                    assert report.servers[0].version == version
                    found = await asyncio.gather(*(server.greedy() for _ in range(8)))
                    assert found == [expected[version]] * 8


@pytest.mark.timeout(900)
async def test_a_misfit_changes_nothing(folders: dict[int, Path], bus: Bus, tmp_path: Path) -> None:
    size = SIZES[-1]
    expected = (await fresh_outputs(folders, tmp_path, size, seeds=(1,)))[1]
    async with serving(folders[0], tmp_path / "server.log", size) as server:
        model = tiny.build(1)
        async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
            with WeightPublisher(bus.name, ModuleSource(model), keep=True) as publisher:
                await fleet.update(publisher, 1)
                assert await server.greedy() == expected

                class Wrong:
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
