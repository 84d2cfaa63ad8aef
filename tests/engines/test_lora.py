"""Adapters alone: swapped under a name that carries the version, while requests are in flight."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import TEMPLATE
from safetensors.torch import load_file
from small_engine import Running
from small_lora import SmallLora
from trainers import SHORT_S, TIMEOUT_S

from shmbus import Bus
from shmbus.engines import LoraFleet, SglangServer, UpdateReport, UpdateRolledBackError, VllmServer
from shmbus.weights import (
    LoraFiles,
    LoraVersion,
    WeightsError,
    lora_state,
)

pytest_plugins = ["engine_fixtures"]
CONFIG = {"peft_type": "LORA", "r": 2, "target_modules": {"v_proj", "q_proj"}, "lora_alpha": 4}
PREFIX = "base_model.model.layers.0.q_proj"


class Peft(torch.nn.Module):
    """What PEFT makes of a layer: the base's weight, and an adapter's two by its name."""

    def __init__(self, adapter: str = "default") -> None:
        super().__init__()
        layer = torch.nn.Module()
        layer.base_layer = torch.nn.Linear(4, 4)
        layer.lora_A = torch.nn.ModuleDict({adapter: torch.nn.Linear(4, 2, bias=False)})
        layer.lora_B = torch.nn.ModuleDict({adapter: torch.nn.Linear(2, 4, bias=False)})
        inner = torch.nn.Module()
        inner.layers = torch.nn.ModuleList([torch.nn.Module()])
        inner.layers[0].q_proj = layer
        self.base_model = torch.nn.Module()
        self.base_model.model = inner

    def fill(self, value: float) -> Peft:
        with torch.no_grad():
            for name, tensor in self.named_parameters():
                if "lora_" in name:
                    tensor.fill_(value)
        return self


@pytest.fixture
def folder(bus_name: str) -> Iterator[Path]:
    path = Path(f"/dev/shm/{bus_name}-adapters")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def server_of(running: Running, kind: str) -> Any:
    return {"vllm": VllmServer, "sglang": SglangServer}[kind](running.url)


async def bring(bus: str, adapter: LoraVersion, *servers: Any, **options: Any) -> UpdateReport:
    async with LoraFleet(servers, bus=bus, **{"timeout": TIMEOUT_S, **options}) as fleet:
        return await fleet.update(adapter)


def test_an_adapters_tensors_have_pefts_names() -> None:
    state = lora_state(Peft().fill(3))
    assert sorted(state) == [f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"]
    assert all((tensor == 3).all() for tensor in state.values())
    with pytest.raises(WeightsError, match="there are: default"):
        lora_state(Peft(), adapter="other")


def test_the_files_are_pefts_and_old_ones_go(folder: Path) -> None:
    files = LoraFiles(folder, "run1", CONFIG, keep=2)
    model = Peft()
    for version in range(4):
        made = files.publish(lora_state(model.fill(version)), version)
    assert re.fullmatch("run1-v3-[0-9a-f]{16}", made.name)
    assert made == LoraVersion(name=made.name, path=f"{folder}/{made.name}", version=3, size=64)
    assert files.versions() == [2, 3]
    tensors = load_file(folder / made.name / "adapter_model.safetensors")
    assert set(tensors) == set(lora_state(model))
    config = json.loads((folder / made.name / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    with pytest.raises(WeightsError, match="there already"):
        files.publish(lora_state(model), 3)
    with pytest.raises(WeightsError, match="no tensors"):
        files.publish({}, 4)
    assert sorted(path.name[:7] for path in folder.iterdir()) == ["run1-v2", "run1-v3"]


def die_while_writing(folder: str) -> None:
    files = LoraFiles(folder, "run1", CONFIG)
    original = Path.rename

    def rename(self: Path, target: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return original(self, target)

    Path.rename = rename  # type: ignore[method-assign]
    files.publish(lora_state(Peft()), 1)


def test_a_trainer_that_dies_while_it_writes_leaves_no_version(folder: Path) -> None:
    process = TEMPLATE.Process(target=die_while_writing, args=(str(folder),))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name.startswith(".new-") for path in folder.iterdir()] == [True]
    assert LoraFiles(folder, "run1", CONFIG).versions() == [] and list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_requests_keep_their_adapter(kind: str, bus: Bus, servers: Any, folder: Path) -> None:
    running = [servers(1, SmallLora), servers(1, SmallLora)]
    files = LoraFiles(folder, "run1", CONFIG)
    model = Peft()

    names: list[str] = []

    async def answers(version: int, tokens: int) -> list[Any]:
        body = {"model": names[version], "max_tokens": tokens}
        found = await asyncio.gather(*(each.post("/v1/generate", body) for each in running))
        return [each.get("tokens") for each in found]

    flights = []
    for version in range(4):
        made = files.publish(lora_state(model.fill(version)), version)
        names.append(made.name)
        # Each trainer is new: only the servers know the loaded adapters.
        report = await bring(bus.name, made, *(server_of(each, kind) for each in running))
        assert report.previous == (version - 1 if version else None)
        assert [each.version for each in report.servers] == [version] * 2
        assert bus.policy_version == version
        flights.append(asyncio.ensure_future(answers(version, 60)))
        for each in running:  # until they have begun
            while len(await each.calls()) <= version:
                await asyncio.sleep(0.005)
    for version, flight in enumerate(flights):
        assert await flight == [[float(version)] * 60] * 2
    assert await answers(3, 1) == [[3.0]] * 2
    assert await answers(2, 1) == [[2.0]] * 2
    assert await answers(1, 1) == [None] * 2, "it is unloaded"


@pytest.mark.parametrize("fault", ["500", "lie"])
async def test_a_version_is_for_all_or_none(
    fault: str, bus: Bus, servers: Any, folder: Path
) -> None:
    running = [servers(1, SmallLora), servers(1, SmallLora)]
    files = LoraFiles(folder, "run1", CONFIG)
    both = [server_of(running[0], "vllm"), server_of(running[1], "sglang")]
    first = files.publish(lora_state(Peft().fill(1)), 1)
    await bring(bus.name, first, *both)
    await running[1].fault("load", fault)
    second = files.publish(lora_state(Peft().fill(2)), 2)
    with pytest.raises(UpdateRolledBackError, match="every server runs version 1 again"):
        await bring(bus.name, second, *both)
    assert bus.policy_version == 1
    for server in both:
        assert set(await server.adapters(TIMEOUT_S)) == {"base", first.name}
        await server.close()
    # A lost answer is no failure: the list shows the adapter.
    await running[0].fault("load", "close")
    report = await bring(bus.name, second, *both, quorum=1)
    assert [each.version for each in report.servers] == [2, 2]


async def test_a_cancelled_update_is_ended_first(bus: Bus, servers: Any, folder: Path) -> None:
    running = [servers(1, SmallLora), servers(1, SmallLora)]
    both = [server_of(each, "vllm") for each in running]
    await running[1].fault("load", "hang")
    made = LoraFiles(folder, "run1", CONFIG).publish(lora_state(Peft()), 1)
    task = asyncio.ensure_future(bring(bus.name, made, *both, timeout=SHORT_S))
    while made.name not in await both[0].adapters(TIMEOUT_S):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for server in both:
        assert set(await server.adapters(TIMEOUT_S)) == {"base"}


@pytest.mark.parametrize("verb", ["load_adapter", "adapters", "unload_adapter"])
async def test_a_users_error_fails_its_server(
    verb: str, bus: Bus, servers: Any, folder: Path
) -> None:
    class Broken(VllmServer):
        pass

    async def broken(self: Broken, *arguments: Any) -> Any:
        raise KeyError("their own code")

    setattr(Broken, verb, broken)
    running = [servers(1, SmallLora), servers(1, SmallLora)]
    both = [Broken(running[0].url), server_of(running[1], "vllm")]
    files = LoraFiles(folder, "run1", CONFIG)
    first = files.publish(lora_state(Peft()), 1)
    if verb != "unload_adapter":
        with pytest.raises(UpdateRolledBackError, match="KeyError: 'their own code'"):
            await bring(bus.name, first, *both)
        assert set(await both[1].adapters(TIMEOUT_S)) == {"base"}, "it is unloaded"
    report = await bring(bus.name, first, *both, quorum=1)
    assert report.servers[1].version == 1
    if verb == "unload_adapter":
        second = files.publish(lora_state(Peft()), 2)
        report = await bring(bus.name, second, *both, keep=1)
        assert "their own code" in report.servers[0].warning
        assert report.servers[1].warning == ""


async def test_old_versions_leave_all_servers_at_once(bus: Bus, servers: Any, folder: Path) -> None:
    asked: set[str] = set()
    both = asyncio.Event()

    class Waiting(VllmServer):
        async def unload_adapter(self, name: str, timeout: float) -> None:
            asked.add(self.address)
            if len(asked) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), timeout)
            await super().unload_adapter(name, timeout)

    running = [Waiting(servers(1, SmallLora).url) for _ in range(2)]
    files = LoraFiles(folder, "run1", CONFIG)
    for version in (1, 2):
        made = files.publish(lora_state(Peft()), version)
        report = await bring(bus.name, made, *running, keep=1, timeout=SHORT_S)
    assert [each.warning for each in report.servers] == ["", ""]


async def test_an_older_version_is_loaded_and_stays(bus: Bus, servers: Any, folder: Path) -> None:
    server = server_of(servers(1, SmallLora), "vllm")
    files = LoraFiles(folder, "run1", CONFIG, keep=2)
    names = {}
    for version in (7, 8, 9):
        made = files.publish(lora_state(Peft()), version)
        names[version] = made.name
        await bring(bus.name, made, server)
    for version, stay in ((4, [4, 9]), (5, [5, 9]), (6, [6, 9]), (10, [9, 10])):
        made = files.publish(lora_state(Peft()), version)
        assert files.versions() == stay and Path(made.path).is_dir()
        names[version] = made.name
        report = await bring(bus.name, made, server)
        assert report.previous == (9 if version in (4, 10) else version - 1)
        assert set(await server.adapters(TIMEOUT_S)) - {"base"} == {names[each] for each in stay}
        assert bus.policy_version == version


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("life", ["one trainer", "a restarted trainer", "another run"])
async def test_a_used_number(life: str, kind: str, bus: Bus, servers: Any, folder: Path) -> None:
    running = servers(1, SmallLora)
    server = server_of(running, kind)
    files = LoraFiles(folder, "run1", CONFIG)
    for version in (7, 8):
        made = files.publish(lora_state(Peft().fill(version)), version)
        await bring(bus.name, made, server)
    if life != "one trainer":
        files = LoraFiles(folder if "trainer" in life else folder / "b", "run1", CONFIG)
    made = files.publish(lora_state(Peft().fill(70)), 7)
    report = await bring(bus.name, made, server)
    (told,) = report.servers
    assert (told.version, told.error, told.warning) == (7, "", "") and report.life == made.name
    said = await running.post("/v1/generate", {"model": made.name, "max_tokens": 3})
    assert said["tokens"] == [70.0] * 3
    listed = list(await server.adapters(TIMEOUT_S))
    assert [name for name in listed if name.startswith("run1-v7-")][-1] == made.name


@pytest.mark.parametrize("case", ["name in use", "refused again"])
async def test_an_unloaded_adapter_is_undone(
    case: str, bus: Bus, servers: Any, folder: Path
) -> None:
    running = servers(1, SmallLora)
    server = server_of(running, "vllm")
    files = LoraFiles(folder, "run1", CONFIG)
    first = files.publish(lora_state(Peft().fill(1)), 1)
    await bring(bus.name, first, server)
    second = files.publish(lora_state(Peft().fill(2)), 2)
    if case == "name in use":
        await server.load_adapter(second.name, first.path, TIMEOUT_S)
    else:
        await bring(bus.name, second, server)
        bus.policy_version = 1
        await running.fault("load", "500")  # while the server lists the name with the path
    with pytest.raises(UpdateRolledBackError) as caught:
        await bring(bus.name, second, server)
    assert (caught.value.version, caught.value.in_force, bus.policy_version) == (2, 1, 1)
    said = await running.post("/v1/generate", {"model": first.name, "max_tokens": 2})
    assert said["tokens"] == [1.0] * 2
    if case == "name in use":  # the foreign adapter stays
        assert (await server.adapters(TIMEOUT_S))[second.name] == first.path


async def test_an_ended_server_is_gone(bus: Bus, servers: Any, folder: Path) -> None:
    running = [servers(1, SmallLora), servers(1, SmallLora)]
    running[1].kill()
    made = LoraFiles(folder, "run1", CONFIG).publish(lora_state(Peft()), 0)
    report = await bring(bus.name, made, *(server_of(each, "vllm") for each in running), quorum=1)
    assert [each.state for each in report.servers] == ["serving", "gone"]
