"""A trainer steps in the parameters of a real vLLM server: one copy, and no transfer."""

import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import pytest
import torch
import vllm_model as tiny
from serving import PROMPTS, SERVER_OPTIONS, Server, fresh_outputs, serving
from updates_table import order

from shmbus import Bus, DamagedError
from shmbus.engines import EngineError, EngineFleet, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher, attach_bridge, attach_model

pytest_plugins = ["vllm_fixtures"]
pytestmark = pytest.mark.timeout(900)
STEPS = int(os.environ.get("SHMBUS_TEST_UPDATES", "6"))
SHAPE = os.environ.get("SHMBUS_TEST_SHAPE", "tiny")
DEVICE = "cuda" if SERVER_OPTIONS else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def sharing(bus: str) -> tuple[str, str]:
    return "--additional-config", json.dumps({"shmbus_share": bus})


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM packs weights for its kernels, by oneDNN: servers without it."""
    metadata = tmp_path / "unpacked-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: unpacked\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nunpacked = unpacked:do\n")
    off = "def do():\n    import vllm._custom_ops as ops\n    ops._supports_onednn = False\n"
    (tmp_path / "unpacked.py").write_text(off)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.usefixtures("unpacked")
async def test_an_optimizers_steps_are_the_servers_at_once(bus: Bus, tmp_path: Path) -> None:
    first, trained = tmp_path / "first", tmp_path / "trained"
    tiny.save(str(first), 1, SHAPE, DTYPE)
    async with serving(first, tmp_path / "log", 1, *sharing(bus.name)) as server:
        before, paused = await server.greedy(), []
        model = tiny.build(0, SHAPE, DTYPE)
        async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
            with attach_model(bus.name, model, writable=True) as shared:
                model.to(DEVICE)  # buffers, beside the server's parameters
                optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
                for version in range(1, STEPS):
                    kept = asyncio.create_task(server.complete(PROMPTS[0], 100, ignore_eos=True))
                    ids = torch.randint(128, (4, 64), device=DEVICE)
                    model(input_ids=ids, labels=ids).loss.backward()
                    began = time.monotonic()
                    await fleet.step(shared, optimizer.step, version)
                    paused.append(time.monotonic() - began)
                    optimizer.zero_grad()
                    assert len(await kept) == 100
                model.save_pretrained(trained)
                found = await server.greedy()
                with pytest.raises(DamagedError, match="stay paused"):
                    await fleet.step(shared, lambda: 1 / 0, STEPS)
            # The successor of a trainer that failed in a step.
            model = tiny.build(0, SHAPE, DTYPE)
            with attach_model(bus.name, model, writable=True) as shared:
                await fleet.step(shared, lambda: None, STEPS, heal=True)
                assert await server.greedy() == found != before
            with (
                WeightPublisher(bus.name, ModuleSource(model)) as publisher,
                pytest.raises(EngineError, match="shares its parameters"),
            ):
                await fleet.update(publisher, STEPS + 1)
    print(f"{len(paused)} steps, median {1e3 * statistics.median(paused):.1f} ms with the pause")
    if DEVICE == "cuda":
        print(f"{torch.cuda.max_memory_allocated() >> 20} MiB of the trainer's own at most")
    tiny.tokenizer().save_pretrained(trained)
    assert found == (await fresh_outputs({3: trained}, tmp_path, 1, seeds=(3,)))[3]


@pytest.mark.skipif(DEVICE == "cpu", reason="the handles are those of CUDA")
async def test_a_trainer_steps_by_the_bridge_file_of_a_stock_server(tmp_path: Path) -> None:
    first, trained = tmp_path / "first", tmp_path / "trained"
    tiny.save(str(first), 1, SHAPE, DTYPE)
    options = "--additional-config", json.dumps({"shmbus_bridge": str(tmp_path)})
    async with serving(first, tmp_path / "log", 1, *options) as server:
        before = await server.greedy()
        for _ in range(2):  # the second trainer opens the handles of the first again
            model = tiny.build(0, SHAPE, DTYPE)
            attach_bridge(model, tmp_path / "vllm_bridge_config.json")
            model.to(DEVICE)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
            for _ in range(STEPS):
                ids = torch.randint(128, (4, 64), device=DEVICE)
                model(input_ids=ids, labels=ids).loss.backward()
                await order(server, "pause?mode=keep")
                optimizer.step()
                torch.cuda.synchronize()
                await order(server, "resume")
                optimizer.zero_grad()
        model.save_pretrained(trained)
        found = await server.greedy()
    tiny.tokenizer().save_pretrained(trained)
    assert found == (await fresh_outputs({3: trained}, tmp_path, 1, seeds=(3,)))[3] != before


@pytest.mark.skipif(DEVICE != "cpu", reason="vLLM packs no weights there")
async def test_parameters_that_vllm_packs_are_named(
    folders: dict[int, Path], bus: Bus, tmp_path: Path
) -> None:
    server = Server(folders[1], tmp_path / "log", 1, *sharing(bus.name))
    try:
        with pytest.raises(AssertionError, match="vLLM repacks model"):
            await server.started()
    finally:
        server.end()
