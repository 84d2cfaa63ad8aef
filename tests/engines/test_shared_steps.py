"""Steps of a trainer that has one copy of the model with servers in flight: paused, never mixed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from small_engine import Running
from small_shared import SmallShared
from trainers import TIMEOUT_S, fleet_of

from shmbus import Bus, DamagedError
from shmbus.engines import EngineError, EngineFleet, VllmServer
from shmbus.engines.pause_note import PauseNote, PauseNotice, paused_by
from shmbus.weights import share_model
from shmbus.weights.shared_model import SharedModel

pytest_plugins = ["engine_fixtures"]


def model_of(value: float) -> torch.nn.Module:
    model = torch.nn.Module()
    model.value = torch.nn.Parameter(torch.full((1000,), float(value)), requires_grad=False)
    return model


def break_off(model: Any) -> None:
    model.value[:500] = 2
    raise RuntimeError("the optimizer failed")


@contextlib.asynccontextmanager
async def sharing(
    bus: str, model: torch.nn.Module, *running: Running, version: int = 1, **options: Any
) -> AsyncIterator[tuple[SharedModel, EngineFleet]]:
    """Share a model with servers; yields it and their fleet."""
    with share_model(bus, model, version=version) as shared:
        for each in running:
            await each.post("/attach", {"bus": bus})
        async with fleet_of(bus, *running, **options) as fleet:
            yield shared, fleet


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_requests_meet_whole_versions_in_the_copy(mode: Any, bus: Bus, servers: Any) -> None:
    running = [servers(1, SmallShared), servers(1, SmallShared)]
    model = model_of(0)
    async with sharing(bus.name, model, *running, version=0, mode=mode) as (shared, fleet):
        requests = [asyncio.ensure_future(each.complete(100)) for each in running]
        await asyncio.sleep(0.02)
        for version in (1, 2, 3):
            await fleet.step(shared, lambda: model.value.add_(1), version)
        assert bus.policy_version == 3 and bus.paused is None and shared.version == 3
        for request in requests:
            answer = await request
            assert "torn" not in answer["tokens"]
            assert answer["tokens"] == sorted(answer["tokens"])
        assert await running[0].tokens(1) == [3.0]
    assert paused_by(bus.name) is None


async def test_a_failed_step_pauses_servers_until_healed(bus: Bus, servers: Any) -> None:
    running = servers(1, SmallShared)
    model = model_of(1)
    async with sharing(bus.name, model, running) as (shared, fleet):
        with pytest.raises(DamagedError, match="stay paused"):
            await fleet.step(shared, lambda: break_off(model), 2)
        assert paused_by(bus.name) is not None
        report = await fleet.recover()
        assert report is not None and report.torn == [running.url]
        with pytest.raises(DamagedError, match="stay paused"):
            await fleet.step(shared, lambda: model.value.fill_(2), 2)
        await fleet.step(shared, lambda: model.value.fill_(2), 2, heal=True)
        assert await running.tokens(2) == [2.0, 2.0]
    assert paused_by(bus.name) is None


@pytest.mark.parametrize("kind", ["500", "close"])
async def test_an_unpausable_server_keeps_the_model(kind: str, bus: Bus, servers: Any) -> None:
    running = [servers(1, SmallShared), servers(1, SmallShared)]
    model = model_of(1)
    async with sharing(bus.name, model, *running) as (shared, fleet):
        await running[1].fault("pause", kind)
        with pytest.raises(EngineError, match="nothing was changed"):
            await fleet.step(shared, lambda: model.value.fill_(2), 2)
        for each in running:
            assert await each.tokens(1) == [1.0]
    assert paused_by(bus.name) is None and shared.version == 1


async def test_a_pause_around_a_step_that_was_not_begun_is_ended(bus: Bus, servers: Any) -> None:
    running = servers(1, SmallShared)
    async with sharing(bus.name, model_of(1), running) as (_, fleet):
        with PauseNote(bus.name) as note:
            note.write(PauseNotice(1, [("vllm", running.url)], 2, 1, shared=True))
        server = VllmServer(running.url)
        await server.pause("keep", False, TIMEOUT_S)
        await server.close()
        report = await fleet.recover()
        assert report is not None and report.servers[0].version == 1
        assert await running.tokens(1) == [1.0]
    assert paused_by(bus.name) is None


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (
            {"action": None},
            TypeError,
            "expected a function .* such as optimizer.step, got NoneType",
        ),
        ({"action": asyncio.sleep}, TypeError, "expected a function that changes the parameters"),
        ({"shared": None}, TypeError, "expected what share_model returned, got NoneType"),
        ({"heal": "no"}, TypeError, "expected True or False, got str"),
        ({"version": True}, TypeError, "expected an int, got bool"),
    ],
)
async def test_what_makes_no_step_is_refused_before_anybody_is_paused(
    given: dict[str, Any], error: type[Exception], match: str, bus: Bus, servers: Any
) -> None:
    running = servers(1, SmallShared)
    async with sharing(bus.name, model_of(1), running) as (shared, fleet):
        whole = {"shared": shared, "action": dict, "version": 2, **given}
        with pytest.raises(error, match=match):
            await fleet.step(**whole)
        assert not shared.torn and shared.version == 1
    assert paused_by(bus.name) is None
    assert await running.tokens(1) == [1.0]


async def test_a_model_of_another_bus_is_refused(bus: Bus) -> None:
    with share_model(f"{bus.name}-b", model_of(1), version=1) as shared:
        fleet = EngineFleet([VllmServer("http://127.0.0.1:1")], bus=bus.name, timeout=TIMEOUT_S)
        with pytest.raises(ValueError, match=f"expected a model of bus '{bus.name}', got"):
            await fleet.step(shared, dict, 2)


async def test_a_step_encodes_images_anew_and_clears_caches(bus: Bus, servers: Any) -> None:
    running = servers(1, SmallShared)
    model = model_of(0)
    async with sharing(bus.name, model, running, version=0) as (shared, fleet):
        for version, clears in ((1, "false"), (2, "false"), (1, "true"), (2, "false")):
            await fleet.step(shared, lambda: model.value.add_(1), version)
            assert (await running.calls())[-1] == ["paused to clear", clears]
            said = await running.post("/encode", {"image": "a"})
            assert said["encoded"] == said["runs"]
