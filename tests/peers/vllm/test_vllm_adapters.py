"""A real vLLM server takes versions of an adapter from files, and nobody is paused."""

import asyncio
from pathlib import Path

import pytest
import torch
from serving import serving

from shmbus import Bus, Producer
from shmbus.engines import LoraFleet, UpdateRolledBackError, VllmServer
from shmbus.weights import LoraFiles, LoraVersion

pytest_plugins = ["vllm_fixtures"]

SHAPES = {"q_proj": (128, 128), "v_proj": (64, 128), "o_proj": (128, 128)}
RANK = 4
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "m",
    "r": RANK, "lora_alpha": 64, "target_modules": sorted(SHAPES),
}  # fmt: skip


def adapter(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer in range(4):
        for name, (rows, columns) in SHAPES.items():
            begins = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            state[f"{begins}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
            state[f"{begins}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    return state


@pytest.mark.timeout(900)
async def test_adapters_answer_by_name(folders: dict[int, Path], bus: Bus, tmp_path: Path) -> None:
    async with serving(
        folders[0], tmp_path / "server.log", 1, "--enable-lora", "--max-loras", "2"
    ) as server:
        files = LoraFiles(tmp_path / "adapters", "run1", CONFIG)

        async def answer(model: str) -> list[int]:
            return await server.complete("w1 w2 w3", 48, model=model, ignore_eos=True)

        base = await answer("m")
        async with LoraFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
            eight = files.publish(adapter(1), version=8)
            await fleet.update(eight)
            first = await answer(eight.name)
            assert first != base
            in_flight = [asyncio.ensure_future(answer(eight.name)) for _ in range(3)]
            await asyncio.sleep(0)  # they are sent
            nine = files.publish(adapter(2), version=9)
            report = await fleet.update(nine)
            assert report.previous == 8 and bus.policy_version == 9
            assert await asyncio.gather(*in_flight) == [first] * 3
            assert await answer(nine.name) not in (base, first)
            ten = files.publish(adapter(1), version=10)
            report = await fleet.update(ten)
            assert await answer(ten.name) == first and await answer("m") == base
            listed = await VllmServer(server.url).adapters(60)
            assert [name for name in listed if name != "m"] == [nine.name, ten.name]
            assert not report.servers[0].error and not report.servers[0].warning


@pytest.mark.timeout(900)
async def test_an_equal_number_is_new(folders: dict[int, Path], bus: Bus, tmp_path: Path) -> None:
    options = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "8", "--block-size", "32")
    prompt = " ".join(f"w{3 * k % 120}" for k in range(70))
    async with serving(folders[0], tmp_path / "server.log", 1, *options) as server:

        async def answer(made: LoraVersion) -> list[int]:
            with Producer(bus.name) as producer:
                salt = producer.cache_salt
            return await server.complete(
                prompt, 24, model=made.name, ignore_eos=True, cache_salt=salt
            )

        async with LoraFleet([VllmServer(server.url)], bus=bus.name, timeout=60) as fleet:
            alone = LoraFiles(tmp_path / "alone", "alone", CONFIG)
            expected = []
            for number, seed in enumerate((1, 2, 3)):
                made = alone.publish(adapter(seed), version=100 + number)
                await fleet.update(made)
                expected.append(await answer(made))
            assert len({*map(tuple, expected)}) == 3
            files = LoraFiles(tmp_path / "adapters", "run1", CONFIG)
            for version, seed in ((7, 1), (8, 2), (7, 3)):  # the last one: training went back
                made = files.publish(adapter(seed), version=version)
                report = await fleet.update(made)
                assert (report.servers[0].error, report.servers[0].warning) == ("", "")
                assert await answer(made) == expected[seed - 1]
            for folder, seed in (("adapters", 1), ("other", 2)):
                again = LoraFiles(tmp_path / folder, "run1", CONFIG)
                made = again.publish(adapter(seed), version=7)
                await fleet.update(made)
                assert await answer(made) == expected[seed - 1]
            taken = LoraVersion(name=made.name, path=str(tmp_path / "alone"), version=9, size=1)
            with pytest.raises(UpdateRolledBackError) as caught:
                await fleet.update(taken)
            assert caught.value.version == 9 and bus.policy_version == 7
            assert await answer(made) == expected[1]
