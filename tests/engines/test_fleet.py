"""Updates of a fleet of real servers, with faults at each step: no half a model, no hang."""

import asyncio
import contextlib
from typing import Any

import pytest
from trainers import SHORT_S, TIMEOUT_S, Scene, Trainer, assert_serving, fleet_of, update

from shmbus import Bus
from shmbus.engines import EngineError, EngineFleet, UpdateRolledBackError, VllmServer
from shmbus.engines.pause_note import paused_by

pytestmark = pytest.mark.slow

pytest_plugins = ["engine_fixtures"]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_servers_run_the_new_version_without_a_mix(mode: str, scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(2)]
    await scene.update(0, *running, mode=mode)
    requests = [asyncio.ensure_future(each.complete(200)) for each in running for _ in range(4)]
    await asyncio.sleep(0.05)
    report = await scene.update(1, *running, mode=mode)
    assert [each.version for each in report.servers] == [1, 1]
    assert [each.ranks for each in report.servers] == [1, 2]
    assert report.torn == [] and report.previous == 0
    assert scene.bus.policy_version == 1 and scene.bus.paused is None
    for request in requests:
        answer = await request
        assert "torn" not in answer["tokens"]
        assert answer["tokens"] == sorted(answer["tokens"]), (
            "a token of an older version came later"
        )
        assert answer["finish_reason"] == ("abort" if mode == "abort" else "length")
        if mode == "keep":
            assert set(answer["tokens"]) <= {0.0, 1.0} and len(answer["tokens"]) == 200
    assert await running[0].tokens(3) == [1.0, 1.0, 1.0]
    assert paused_by(scene.bus.name) is None


@pytest.mark.parametrize(
    ("server", "step", "kind"),
    [
        ("vllm", "start", "500"),
        ("vllm", "start", "close"),
        ("vllm", "update", "500"),
        ("vllm", "update", "lie"),
        ("vllm", "update", "refuse"),
        ("vllm", "update", "close"),
        ("sglang", "update", "500"),
        ("sglang", "update", "503"),
        ("sglang", "update", "lie"),
        ("sglang", "update", "break"),
    ],
)
async def test_a_late_failure_brings_every_server_back(
    server: str, step: str, kind: str, scene: Scene
) -> None:
    running = [scene.servers(2, server), scene.servers(1, server)]
    await scene.update(7, *running)
    await running[0].fault(step, kind)
    timeout = SHORT_S if kind == "lie" else TIMEOUT_S
    with pytest.raises(UpdateRolledBackError, match="every server runs version 7 again") as caught:
        await scene.update(8, *running, timeout=timeout)
    assert caught.value.in_force == 7
    await assert_serving(7.0, *running)
    assert scene.bus.policy_version == 7
    assert paused_by(scene.bus.name) is None
    report = await scene.update(9, *running)
    assert [each.version for each in report.servers] == [9, 9]
    assert await running[0].tokens(1) == [9.0]


async def test_a_quorum_names_the_server_behind(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = [servers(1), servers(1)]
    await update(bus.name, trainer, 1, *running)
    await running[1].fault("update", "refuse")
    report = await update(bus.name, trainer, 2, *running, quorum=1)
    assert [each.version for each in report.servers] == [2, 1]
    assert "injected: half of it was loaded" in report.servers[1].error
    assert await running[0].tokens(1) == [2.0]
    assert await running[1].tokens(1) == [1.0]


@pytest.mark.parametrize(("step", "kind"), [("init", "500"), ("pause", "500"), ("pause", "close")])
async def test_an_early_failure_changes_nothing(step: str, kind: str, scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(1)]
    await scene.update(1, *running)
    await running[1].fault(step, kind)
    with pytest.raises(EngineError, match="old weights"):
        await scene.update(2, *running, mode="wait")
    await assert_serving(1.0, *running)
    assert scene.bus.policy_version == 1 and scene.bus.paused is None


async def test_a_server_without_an_earlier_version_stays_paused_and_named(scene: Scene) -> None:
    running = [scene.servers(2), scene.servers(1)]
    await running[0].fault("update", "refuse")
    with pytest.raises(EngineError, match="stays paused") as caught:
        await scene.update(1, *running)
    assert running[0].url in caught.value.server
    assert await running[0].paused()
    left = paused_by(scene.bus.name)
    assert left is not None and not left[1]
    report = await scene.update(2, *running)
    assert [each.version for each in report.servers] == [2, 2]
    assert not await running[0].paused()
    assert paused_by(scene.bus.name) is None


async def test_a_hang_costs_its_deadline(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = [servers(1)]
    await update(bus.name, trainer, 1, *running)
    await running[0].fault("update", "hang")
    with pytest.raises(UpdateRolledBackError):
        await update(bus.name, trainer, 2, *running, timeout=SHORT_S)
    assert await running[0].tokens(1) == [1.0]


@pytest.mark.parametrize("step", ["start", "update", "finish"])
async def test_an_open_update_is_ended_before_the_next(step: str, scene: Scene) -> None:
    running = [scene.servers(2)]
    await running[0].fault(step, "close")  # done, without an answer
    with contextlib.suppress(EngineError):
        await scene.update(1, *running)
    assert (await scene.update(2, *running)).servers[0].version == 2
    assert await running[0].tokens(1) == [2.0]


async def test_a_pause_waits_for_rank_lookups(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = [servers(2), servers(2)]
    await running[0].fault("init", "aside")
    report = await update(bus.name, trainer, 1, *running)
    assert [each.version for each in report.servers] == [1, 1]
    for each in running:
        assert await each.calls() == [["paused while it looks up", False]]


async def test_an_idle_resume_is_repeated(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = [servers(1)]
    await running[0].fault("resume", "lie")
    await update(bus.name, trainer, 1, *running)
    assert not await running[0].paused()


async def test_a_cancelled_update_is_ended_first(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = [servers(1), servers(2)]
    await update(bus.name, trainer, 0, *running)
    cancelled = 0
    for version in range(1, 9):
        task = asyncio.ensure_future(update(bus.name, trainer, version, *running))
        await asyncio.sleep(0.002 * (version - 1))
        if task.cancel():
            cancelled += 1
            with pytest.raises(asyncio.CancelledError):
                await task
        for each in running:
            assert not await each.paused()
            assert "torn" not in (await each.tokens(2))
        assert paused_by(bus.name) is None
    assert cancelled


async def test_a_fleet_that_is_cancelled_while_it_closes_closes_every_server(bus: Bus) -> None:
    closed = []

    class Closing(VllmServer):
        async def close(self) -> None:
            await asyncio.sleep(0.05)
            closed.append(self.address)

    addresses = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    fleet = EngineFleet([Closing(each) for each in addresses], bus=bus.name, timeout=TIMEOUT_S)
    closing = asyncio.ensure_future(fleet.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert sorted(closed) == addresses


async def test_two_trainers_do_not_update_at_once(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = [servers(1)]
    await update(bus.name, trainer, 0, *running)
    await running[0].fault("start", "hang")
    first = asyncio.ensure_future(update(bus.name, trainer, 1, *running))
    while paused_by(bus.name) is None:
        await asyncio.sleep(0.005)
    with pytest.raises(BlockingIOError, match="is updating its inference servers"):
        await update(bus.name, trainer, 1, *running)
    with pytest.raises(UpdateRolledBackError):
        await first


def test_an_update_needs_no_event_loop(bus: Bus, trainer: Trainer, servers: Any) -> None:
    report = fleet_of(bus.name, servers(1)).update_sync(trainer, 3)
    assert report.servers[0].version == 3


async def test_labels_stay_true_after_two_failed_updates(scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(1)]
    async with scene.fleet(*running) as fleet:
        await fleet.update(scene.trainer, 7)
        for version in (8, 9):
            await running[0].fault("update", "refuse")
            with pytest.raises(UpdateRolledBackError) as caught:
                await fleet.update(scene.trainer, version)
            assert await fleet.catch_up() is None, "every server runs the version of the bus"
            for each in running:
                assert await each.tokens(2) == [scene.bus.policy_version] * 2
            assert caught.value.in_force == scene.bus.policy_version == version - 1
