"""A real vLLM server by ways other than the fleet's: vLLM's own trainer side, and checkpoints."""

import asyncio
import os
from pathlib import Path

import pytest
import requests
import torch
import vllm_model as tiny
from serving import SIZES, Server, fresh_outputs, serving
from vllm.distributed.weight_transfer.base import ModuleSource as VllmModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, VllmServer
from shmbus.engines.vllm_trainer import ShmbusTrainerInitInfo
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]

UPDATES = int(os.environ.get("SHMBUS_TEST_UPDATES", "4"))


def control(server: Server, path: str) -> None:
    requests.post(f"{server.url}/{path}", timeout=60).raise_for_status()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [ModuleSource, VllmModuleSource])
@pytest.mark.parametrize("size", SIZES)
def test_weights_sent_by_vllms_interface_give_a_fresh_servers_outputs(
    size: int, kind: type, folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    expected = asyncio.run(fresh_outputs(folders, tmp_path, size))
    server = Server(folders[0], tmp_path / "server.log", size)
    try:
        asyncio.run(server.started())
        models = {seed: tiny.build(seed) for seed in (1, 2)}
        model = tiny.build(0)
        engine = WeightTransferTrainerFactory.trainer_init(
            ShmbusTrainerInitInfo(bus.name, rank=0),
            client=HTTPVLLMWeightSyncClient(server.url, timeout=60),
            source=kind(model),
        )
        try:
            for number in range(1, UPDATES + 1):
                seed = 1 + number % 2
                model.load_state_dict(models[seed].state_dict())
                control(server, "pause?mode=keep")
                engine.send_weights()
                control(server, "resume")
                assert bus.policy_version == number
                assert asyncio.run(server.greedy()) == expected[seed], f"update {number}"
        finally:
            engine.shutdown()
    finally:
        server.end()


@pytest.mark.timeout(900)
def test_an_unloadable_model_is_named(folders: dict[int, Path], bus: Bus, tmp_path: Path) -> None:
    server = Server(folders[1], tmp_path / "server.log", SIZES[0])
    try:
        asyncio.run(server.started())
        engine = WeightTransferTrainerFactory.trainer_init(
            ShmbusTrainerInitInfo(bus.name, rank=0, timeout=20),
            client=HTTPVLLMWeightSyncClient(server.url, timeout=60),
            source=ModuleSource(torch.nn.Linear(2, 2)),
        )
        control(server, "pause?mode=keep")
        with pytest.raises(EngineError, match=r"version 0 again.*its model is not whole"):
            engine.send_weights()
        assert bus.policy_version != 1
        engine.shutdown()
    finally:
        server.end()


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
