"""A real vLLM under load compares its weights with the version in force, and loses no request."""

import asyncio
from pathlib import Path

import pytest
import vllm_model as tiny
from serving import SIZES, serving

from shmbus import Bus
from shmbus.engines import EngineFleet, VllmServer
from shmbus.engines.verify import ServerVerdict, verify
from shmbus.weights import ModuleSource, WeightPublisher

pytest_plugins = ["vllm_fixtures"]

EMBED = "model.embed_tokens.weight"
NORM = "model.layers.2.input_layernorm.weight"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", SIZES)
async def test_one_flipped_bit_in_one_rank_is_named_while_requests_are_answered(
    size: int, folders: dict[int, Path], bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    options = ("--worker-extension-cls", "flipping.Flipper")
    done, answered = asyncio.Event(), 0

    async def load() -> None:
        nonlocal answered
        while not done.is_set():
            await server.complete("w3 w4", 48, ignore_eos=True)
            answered += 1

    async def verdict() -> ServerVerdict:
        (told,) = await verify(bus.name, [], share=0.05, timeout=60)
        assert told.error == "" and told.share <= 0.05
        each = sum(rank.compared_bytes for rank in told.ranks)
        print(f"TP {size}: {each} bytes, {told.engine_s:.4f} of {told.total_s:.4f} s of the engine")
        return told

    async with serving(folders[0], tmp_path / "server.log", size, *options) as server:
        source = ModuleSource(tiny.build(1))
        with WeightPublisher(bus.name, source, digests=True) as publisher:
            async with EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
                workers = [asyncio.ensure_future(load()) for _ in range(4)]
                for version in (1, 2):
                    report = await fleet.update(publisher, version)
                    told = await verdict()
                    assert not told.failed and told.version == version
                    assert told.life == report.life
                    assert all(NORM not in each.not_comparable for each in told.ranks)
                # The embedding is repacked beside its plain copy, and comes first in the slot.
                ahead = (size - 1) * 128 // size * 128 * 4
                for name, offset in ((NORM, 20), (EMBED, ahead + 20)):
                    damage = {"method": "flip_bit", "args": [name, size - 1]}
                    await VllmServer(server.url).post("flip", "/collective_rpc", 60, damage)
                    *whole, damaged = (await verdict()).ranks
                    assert "differs" not in [each.state for each in whole]
                    found = damaged.state, damaged.tensor, damaged.offset
                    assert found == ("differs", name, offset)
                    assert damaged.slot_damaged is False
                await fleet.update(publisher, 3)
                assert not (await verdict()).failed
                done.set()
                await asyncio.gather(*workers)
        assert answered > 0
