"""A draft trainer's weights reach a real vLLM's speculative decoding."""

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest
import vllm_model as tiny
from serving import PROMPTS, Server

from shmbus import Bus
from shmbus.engines import EngineFleet, VllmDraft
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]
pytestmark = pytest.mark.timeout(600)
PROPOSED = 3


async def accepted(server: Server) -> float:
    """Return the share of proposed tokens that the target took since the start."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
        text = await answer.text()

    def count(what: str) -> float:
        found = re.search(rf"^vllm:spec_decode_num_{what}_tokens_total\S* (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0

    return count("accepted") / count("draft")


def speculating(folder: Path) -> tuple[str, str]:
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": PROPOSED}
    return "--speculative-config", json.dumps(config)


async def test_new_draft_weights_are_taken_while_the_server_generates(
    folders: dict[int, Path], tmp_path: Path
) -> None:
    server = Server(folders[1], tmp_path / "log", 1, *speculating(folders[2]))
    try:
        await server.started()
        with Bus.create("vllm-draft", "4MiB") as bus:
            expected = await server.greedy()
            before = await accepted(server)
            draft = tiny.build(2)
            with WeightPublisher(bus.name, ModuleSource(draft)) as publisher:
                async with EngineFleet([VllmDraft(server.url)], bus=bus.name) as fleet:
                    draft.load_state_dict(tiny.build(1).state_dict())
                    kept = asyncio.create_task(server.complete(PROMPTS[0], 200, ignore_eos=True))
                    await asyncio.sleep(0.5)
                    report = await fleet.update(publisher, 1)
                    assert report.servers[0].state == "serving", report
                    assert len(await kept) == 200
            assert before < 0.1
            drafted = await accepted(server)
            # Equal weights: the target takes what its draft proposes from now on.
            for _ in range(8):
                assert await server.greedy() == expected
            assert await accepted(server) > drafted
    finally:
        server.end()
