"""A server that was started anew generates, whatever was said of the one before it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from small_engine import Running
from small_sglang import SmallSglang
from small_vllm import SmallVllm
from test_trainer_deaths import fleet_of, is_paused, start_trainer
from trainers import KINDS, SHORT_S, Trainer

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, UpdateRolledBackError
from shmbus.engines.pause_note import PauseNote, PauseNotice, paused_by
from shmbus.engines.resume import resume

pytest_plugins = ["engine_fixtures"]

MAKE: dict[str, Any] = {"vllm": SmallVllm, "sglang": SmallSglang}


async def tokens(running: Running) -> list[Any]:
    found: list[Any] = (await running.complete(2))["tokens"]
    return found


@pytest.mark.parametrize("kind", MAKE)
async def test_it_is_paused_again_before_what_a_dead_trainer_left_is_loaded(
    kind: str, bus: Bus, servers: Any
) -> None:
    running = [servers(1, MAKE[kind]), servers(2, MAKE[kind])]
    process = start_trainer(bus.name, kind, running, "update", False, signal.SIGKILL)
    await asyncio.to_thread(process.join, 60)
    assert process.exitcode == -signal.SIGKILL
    running[0].start_anew()
    request = asyncio.ensure_future(running[0].complete(500))
    await asyncio.sleep(0.02)
    async with fleet_of(bus.name, kind, running) as fleet:
        report = await fleet.recover()
    assert report is not None and [each.version for each in report.servers] == [2, 2]
    assert report.torn == [] and paused_by(bus.name) is None
    answer = (await request)["tokens"]
    assert "torn" not in answer and answer[-1] == 2.0
    for each in running:
        assert not await is_paused(kind, each) and await tokens(each) == [2.0] * 2


@pytest.mark.parametrize("kind", MAKE)
async def test_it_is_paused_again_before_it_reads_a_checkpoint(
    kind: str, bus: Bus, servers: Any, tmp_path: Path
) -> None:
    running = servers(1, MAKE[kind])
    Trainer(bus.name, carrier="checkpoint", directory=tmp_path).publish(7)
    with PauseNote(bus.name) as note:
        note.write(PauseNotice(1, [(kind, running.url)], 7, None, directory=str(tmp_path)))
    report = await resume(bus.name, timeout=SHORT_S)
    assert report is not None and report.servers[0].version == 7 and report.torn == []
    assert not await is_paused(kind, running) and await tokens(running) == [7.0] * 2


@pytest.mark.parametrize("kind", MAKE)
async def test_it_is_paused_again_before_what_ran_before_is_loaded(
    kind: str, bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = [servers(1, MAKE[kind]), servers(1, MAKE[kind])]
    server = KINDS[kind]

    class StartedAnew(server):  # type: ignore[misc, valid-type]
        """It ends in an update, and by the time that all are to go back it is there again."""

        async def load(self, version: int, *arguments: Any) -> None:
            if version == 2:
                await asyncio.to_thread(running[0].start_anew)
                raise EngineError(self.address, "update", None, "injected: it has ended", "")
            await super().load(version, *arguments)

    both = [StartedAnew(running[0].url), server(running[1].url)]
    async with EngineFleet(both, bus=bus.name, timeout=SHORT_S) as fleet:
        await fleet.update(trainer, 1)
        await running[1].fault("update", "500")
        with pytest.raises(UpdateRolledBackError, match="runs version 1 again"):
            await fleet.update(trainer, 2)
    for each in running:
        assert not await is_paused(kind, each) and await tokens(each) == [1.0] * 2
    assert paused_by(bus.name) is None
