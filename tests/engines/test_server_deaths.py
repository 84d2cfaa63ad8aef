"""A server ends, or stops, at each request of an update: the rest goes on, the error names it."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from test_trainer_deaths import kill_trainer
from trainers import KINDS, SHORT_S, Scene, Trainer, assert_serving, fleet_of

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, UpdateRolledBackError
from shmbus.engines.pause_note import PauseNote, PauseNotice, paused_by
from shmbus.engines.resume import resume

pytest_plugins = ["engine_fixtures"]

STEPS = [
    *(("vllm", step) for step in ("init", "pause", "start", "update", "finish", "resume")),
    *(("sglang", step) for step in ("pause", "begin", "update", "end", "resume")),
]


@pytest.mark.parametrize(("kind", "step"), STEPS)
async def test_a_killed_server_is_gone_alone(kind: str, step: str, scene: Scene) -> None:
    running = [scene.servers(1, kind), scene.servers(2, kind)]
    async with scene.fleet_at_1(*running, quorum=1, timeout=SHORT_S) as fleet:
        await running[1].fault(step, "die")
        report = await fleet.update(scene.trainer, 2)
        assert report.servers[0].version == 2 and report.servers[0].state == "serving"
        assert report.servers[1].version != 2 or step == "resume"
        assert report.servers[1].error and running[1].url in report.servers[1].error
        assert report.servers[1].paused_s >= 0
        assert await running[0].tokens(2) == [2.0, 2.0]
        report = await fleet.update(scene.trainer, 3)
        assert report.servers[1].state == "gone" and report.torn == []
    assert paused_by(scene.bus.name) is None
    assert await running[0].tokens(1) == [3.0]


@pytest.mark.parametrize(("kind", "step"), [("vllm", "update"), ("sglang", "update")])
async def test_a_stopped_server_costs_its_deadline(kind: str, step: str, scene: Scene) -> None:
    running = [scene.servers(1, kind), scene.servers(1, kind)]
    async with scene.fleet_at_1(*running, quorum=1, timeout=SHORT_S) as fleet:
        await running[1].fault(step, "stop")
        report = await fleet.update(scene.trainer, 2)
        assert report.servers[0].version == 2
        assert report.torn == [running[1].url] and report.servers[1].paused_s == 0
        assert paused_by(scene.bus.name) is not None
        running[1].signal(signal.SIGCONT)
    async with scene.fleet(*running, timeout=5.0) as fleet:
        await fleet.update(scene.trainer, 3)
    await assert_serving(3.0, *running)
    assert paused_by(scene.bus.name) is None


@pytest.mark.parametrize("kind", KINDS)
async def test_it_is_paused_again_before_healing(kind: str, bus: Bus, servers: Any) -> None:
    running = [servers(1, kind), servers(2, kind)]
    await kill_trainer(bus.name, kind, running, "update")
    running[0].start_anew()
    request = asyncio.ensure_future(running[0].complete(500))
    await asyncio.sleep(0.02)
    async with fleet_of(bus.name, *running) as fleet:
        report = await fleet.recover()
    assert report is not None and [each.version for each in report.servers] == [2, 2]
    assert report.torn == [] and paused_by(bus.name) is None and report.total_s > 0
    answer = (await request)["tokens"]
    assert "torn" not in answer and answer[-1] == 2.0
    await assert_serving(2.0, *running)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_recovery_is_ended_first(kind: str, bus: Bus, servers: Any) -> None:
    running = [servers(1, kind), servers(1, kind)]
    await kill_trainer(bus.name, kind, running, "update")
    async with fleet_of(bus.name, *running) as fleet:
        task = asyncio.ensure_future(fleet.recover())
        await asyncio.sleep(0.01)
        assert task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert paused_by(bus.name) is None
    await assert_serving(2.0, *running)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_checkpoint_waits(kind: str, bus: Bus, servers: Any, tmp_path: Path) -> None:
    running = servers(1, kind)
    Trainer(bus.name, carrier="checkpoint", directory=tmp_path).publish(7)
    with PauseNote(bus.name) as note:
        note.write(PauseNotice(1, [(kind, running.url)], 7, None, directory=str(tmp_path)))
    report = await resume(bus.name, timeout=SHORT_S)
    assert report is not None and report.servers[0].version == 7 and report.torn == []
    await assert_serving(7.0, running)


@pytest.mark.parametrize("kind", KINDS)
async def test_it_is_paused_again_before_what_ran_before_is_loaded(kind: str, scene: Scene) -> None:
    running = [scene.servers(1, kind), scene.servers(1, kind)]
    server = KINDS[kind]

    class StartedAnew(server):  # type: ignore[misc, valid-type]
        """A server ends in an update, and exists again by the time of the way back."""

        async def load(self, version: int, *arguments: Any) -> None:
            if version == 2:
                await asyncio.to_thread(running[0].start_anew)
                raise EngineError(self.address, "update", None, "injected: it has ended", "")
            await super().load(version, *arguments)

    both = [StartedAnew(running[0].url), server(running[1].url)]
    async with EngineFleet(both, bus=scene.bus.name, timeout=SHORT_S) as fleet:
        await fleet.update(scene.trainer, 1)
        await running[1].fault("update", "500")
        with pytest.raises(UpdateRolledBackError, match="runs version 1 again"):
            await fleet.update(scene.trainer, 2)
    await assert_serving(1.0, *running)
    assert paused_by(scene.bus.name) is None


@pytest.mark.parametrize("others", [0, 1])
async def test_what_has_gone_is_not_said_to_run_anything(others: int, scene: Scene) -> None:
    running = [scene.servers(1) for _ in range(1 + others)]
    async with scene.fleet_at_1(*running, timeout=SHORT_S) as fleet:
        await running[0].fault("update", "die")
        left = "every server that is left runs version 1 again" if others else "no server is left"
        with pytest.raises(UpdateRolledBackError, match=f"2 were not taken, and {left}: ") as said:
            await fleet.update(scene.trainer, 2)
        assert str(said.value).count(f"{running[0].url}: ") == 1
