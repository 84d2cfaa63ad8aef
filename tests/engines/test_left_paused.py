"""What was left paused stays named until it was resumed with a whole model, whoever updates."""

import contextlib
import signal
from pathlib import Path
from typing import Any

import pytest
from small_shared import SmallShared
from test_shared_steps import break_off, model_of, sharing
from test_trainer_deaths import kill_trainer
from trainers import SHORT_S, TIMEOUT_S, Scene, Trainer, assert_serving, fleet_of, update

from shmbus import Bus, DamagedError, LayoutMismatchError
from shmbus.engines import EngineError
from shmbus.engines.pause_note import PauseNote, PauseNotice, paused_by
from shmbus.engines.resume import resume
from shmbus.segment.fleet_note import note_path
from shmbus.weights import WeightsError, share_model

pytest_plugins = ["engine_fixtures"]


def named(bus: str) -> list[str]:
    found = paused_by(bus)
    return [] if found is None else [address for _, address in found[0].servers]


@pytest.mark.parametrize("quorum", [1, 2])
async def test_a_torn_server_stays_paused_in_a_vain_update(quorum: int, scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(1)]
    await running[0].fault("update", "refuse")
    with pytest.raises(EngineError, match="stays paused"):
        await scene.update(1, *running)
    await running[0].fault("update", "refuse")  # it is not repaired
    await running[quorum - 1].fault("pause", "500")
    with contextlib.suppress(EngineError):
        await scene.update(2, *running, quorum=quorum)
    assert await running[0].paused() and named(scene.bus.name) == [running[0].url]
    assert not await running[1].paused()
    await scene.update(3, *running)
    await assert_serving(3.0, *running)
    assert named(scene.bus.name) == []


async def test_a_silent_server_stays_named_over_other_updates(scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(1)]
    async with scene.fleet_at_1(*running, quorum=1, timeout=SHORT_S / 2) as fleet:
        await running[1].fault("update", "stop")
        for version in (2, 3):
            report = await fleet.update(scene.trainer, version)
            assert report.servers[0].version == version
            assert report.torn == [running[1].url] == named(scene.bus.name)
    running[1].signal(signal.SIGCONT)
    left = await resume(scene.bus.name, timeout=TIMEOUT_S)
    assert left is not None and [each.version for each in left.servers] == [3]
    assert await running[1].tokens(1) == [3.0] and named(scene.bus.name) == []


async def test_other_fleets_servers_stay_in_the_note_until_known(bus: Bus, servers: Any) -> None:
    left, mine = servers(1), servers(1)
    await kill_trainer(bus.name, "vllm", [left], "update")
    async with fleet_of(bus.name, mine) as fleet:
        report = await fleet.recover()
        assert report is not None and report.torn == [left.url]
        assert "none of this fleet's" in report.servers[0].error
        trainer = Trainer(bus.name)
        await fleet.update(trainer, 3)
    assert await mine.tokens(1) == [3.0]
    assert await left.paused() and named(bus.name) == [left.url]
    report = await resume(bus.name, timeout=TIMEOUT_S)
    assert report is not None and report.torn == [] and named(bus.name) == []
    assert await left.tokens(1) == [3.0]
    trainer.publisher.close()


async def test_a_missing_checkpoint_bars_no_other_weights(tmp_path: Path, scene: Scene) -> None:
    running = scene.servers(1)
    with PauseNote(scene.bus.name) as note:
        gone = str(tmp_path / "gone")
        note.write(PauseNotice(1, [("vllm", running.url)], 7, None, directory=gone))
    async with scene.fleet(running) as fleet:
        report = await fleet.recover()
        assert report is not None and report.torn == [running.url]
        assert "publish first" in report.servers[0].error
        with pytest.raises(WeightsError, match="publish first"):
            await fleet.reload(gone)
        await fleet.update(scene.trainer, 8)
    assert await running.tokens(1) == [8.0] and named(scene.bus.name) == []


async def test_a_shared_step_resumes_no_torn_server(scene: Scene) -> None:
    running = scene.servers(1)
    await running.fault("update", "refuse")
    with pytest.raises(EngineError, match="stays paused"):
        await scene.update(1, running)
    model = model_of(1)
    await running.fault("update", "refuse")
    with share_model(scene.bus.name, model, version=1) as shared:
        async with scene.fleet(running) as fleet:
            with pytest.raises(EngineError, match=f"{running.url}.*nothing was changed"):
                await fleet.step(shared, lambda: model.value.fill_(2), 2)
            assert await running.paused() and named(scene.bus.name) == [running.url]
            assert shared.version == 1
            await fleet.step(shared, lambda: model.value.fill_(2), 2)  # by now it could be loaded
    assert await running.tokens(1) == [1.0] and named(scene.bus.name) == []


async def test_a_torn_model_that_cannot_pause_is_served_by_none(bus: Bus, servers: Any) -> None:
    running = [servers(1, SmallShared), servers(1, SmallShared)]
    model = model_of(1)
    async with sharing(bus.name, model, *running) as (shared, fleet):
        with pytest.raises(DamagedError, match="stay paused"):
            await fleet.step(shared, lambda: break_off(model), 2)
        await running[1].fault("pause", "500")
        with pytest.raises(EngineError, match="nothing was changed"):
            await fleet.step(shared, lambda: model.value.fill_(2), 2, heal=True)
        assert await running[0].paused() and await running[1].paused()
        assert named(bus.name) == [each.url for each in running]
        await fleet.step(shared, lambda: model.value.fill_(2), 2, heal=True)
        await assert_serving(2.0, *running)
    assert named(bus.name) == []


async def test_an_unreadable_note_locks_nobody(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(1)
    path = Path(note_path(bus.name))
    path.write_bytes(b"another version's")
    with pytest.raises(LayoutMismatchError, match="unknown format"):
        await update(bus.name, trainer, 1, running)
    path.write_bytes(b"")
    await update(bus.name, trainer, 1, running)
    assert not path.exists()
