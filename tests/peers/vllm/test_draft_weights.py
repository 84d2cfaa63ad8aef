"""A draft trainer's weights reach a real vLLM's speculative decoding."""

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
import vllm_model as tiny
from serving import PROMPTS, Server

from shmbus import Bus
from shmbus.engines import EngineFleet, VllmDraft, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]
pytestmark = pytest.mark.timeout(600)
PROPOSED = 3


async def accepted(server: Server) -> float:
    """Return the share of proposed tokens that the target took since the start."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    counts = {
        line.split("{")[0]: float(line.split()[-1])
        for line in lines
        if line.startswith("vllm:spec_decode_num_")
    }
    return (
        counts["vllm:spec_decode_num_accepted_tokens_total"]
        / counts["vllm:spec_decode_num_draft_tokens_total"]
    )


def speculating(folder: Path) -> tuple[str, str]:
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": PROPOSED}
    return "--speculative-config", json.dumps(config)


async def test_new_draft_weights_are_taken_while_the_server_generates(
    folders: dict[int, Path], tmp_path: Path
) -> None:
    server = Server(folders[1], tmp_path / "log", 1, *speculating(folders[2]))
    try:
        await server.started()
        with Bus.create("vllm-draft", "4MiB") as bus, Bus.create("vllm-target", "4MiB") as other:
            expected = await server.greedy()
            before = await accepted(server)
            draft = tiny.build(2)
            with WeightPublisher(bus.name, ModuleSource(draft)) as publisher:
                async with EngineFleet([VllmDraft(server.url)], bus=bus.name) as fleet:
                    for version, seed in ((1, 0), (2, 1)):
                        draft.load_state_dict(tiny.build(seed).state_dict())
                        kept = asyncio.create_task(
                            server.complete(PROMPTS[0], 200, ignore_eos=True)
                        )
                        await asyncio.sleep(0.5)
                        report = await fleet.update(publisher, version)
                        assert report.servers[0].state == "serving", report
                        assert len(await kept) == 200
                        assert await server.greedy() == expected
            assert before < 0.1
            drafted = await accepted(server)
            # Equal weights: the target takes what its draft proposes from now on.
            for _ in range(8):
                assert await server.greedy() == expected
            assert await accepted(server) > drafted
            target = tiny.build(2)
            with WeightPublisher(other.name, ModuleSource(target)) as publisher:
                async with EngineFleet([VllmServer(server.url)], bus=other.name) as fleet:
                    report = await fleet.update(publisher, 1)
            assert "VllmDraft" in report.servers[0].warning
            assert await server.greedy() != expected
    finally:
        server.end()
