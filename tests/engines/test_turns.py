"""Engine and trainer take turns on a device: servers sleep, wake with new weights, and are whole.

The small servers follow vLLM 0.32 (vllm/entrypoints/serve/dev/sleep/api_router.py,
vllm/v1/engine/core.py) and SGLang 0.5.23
(sglang/srt/managers/scheduler_components/weight_updater.py). A wake of awake memory resumes vLLM
with any weights, and ends SGLang.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import doc_pages
import pytest
from small_engine import Running, SmallEngine
from small_sglang import SmallSglang, sglang
from small_vllm import SmallVllm, vllm
from test_trainer_deaths import kill_trainer
from trainers import SHORT_S, Scene, Trainer, assert_serving, fleet_of

import shmbus
from shmbus import Bus, VersionUnknownError
from shmbus.engines import (
    EngineError,
    EngineFleet,
    LoraFleet,
    ManagedServer,
    UpdateRolledBackError,
    VllmServer,
)
from shmbus.engines.pause_note import paused_by
from shmbus.engines.resume import resume
from shmbus.inspect.processes import servers_left
from shmbus.inspect.status import read_status
from shmbus.segment.fleet_note import ASLEEP_REASON
from shmbus.weights import VersionOrderError
from shmbus.weights.adapters import LoraVersion

pytest_plugins = ["engine_fixtures"]

ENGINES: dict[str, Callable[[int], SmallEngine]] = {
    "vllm": SmallVllm, "sglang": sglang(enable_weights_cpu_backup=True),
}  # fmt: skip
LEVELS = [(kind, level) for kind in ENGINES for level in (1, 2)]
MOVES = ("sleep", "wake", "/release_memory_occupation", "/resume_memory_occupation")
#: Requests of a turn, in order.
STEPS = {
    "vllm": [
        "pause", "sleep", "prepare", "wake weights", "start", "update", "encoder",
        "finish", "wake kv_cache",  # resumes
    ],
    "sglang": [
        "pause", "sleep", "wake weights", "begin", "update", "end", "wake kv_cache", "resume",
    ],
}  # fmt: skip
MOVED = ("sleep", "wake weights", "wake kv_cache")
#: Kind, level, step, and death before or after the answer; every combination in the long form.
POINTS = [
    (kind, level, step, after)
    for kind in STEPS
    for level in (1, 2)
    for step in STEPS[kind]
    for after in (False, True)
    if "SHMBUS_TEST_LONG" in os.environ or (level == 2 and (not after or step in MOVED))
]


async def moves(running: Running) -> list[Any]:
    """Return the moves of memory that a server was asked for."""
    return [
        what.get("tags") if isinstance(what, dict) else what
        for name, what in await running.calls()
        if name in MOVES
    ]


async def in_flight(running: Running, length: int) -> asyncio.Task[Any]:
    task = asyncio.create_task(running.complete(length))
    await asyncio.sleep(0.05)
    return task


@pytest.mark.parametrize(("kind", "level"), LEVELS)
@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_weights_wake_before_the_cache(
    kind: str, level: int, mode: Any, scene: Scene
) -> None:
    running = [scene.servers(1, ENGINES[kind]), scene.servers(2, ENGINES[kind])]
    async with scene.fleet_at_1(*running, mode=mode) as fleet:
        kept = await in_flight(running[0], 200)
        report = await fleet.sleep(level)
        assert [(each.state, each.paused_s) for each in report.servers] == [("asleep", 0.0)] * 2
        assert scene.bus.paused == (None if mode == "keep" else ASLEEP_REASON)
        report = await fleet.wake(scene.trainer, 2)
        assert [(each.state, each.version) for each in report.servers] == [("serving", 2)] * 2
        assert all(0 < each.paused_s < report.total_s for each in report.servers)
    tokens = (await kept)["tokens"]
    assert "torn" not in tokens and tokens[-1] == (2.0 if mode == "keep" else 1.0)
    for each in running:
        assert await each.tokens(2) == [2.0, 2.0]
        assert (await moves(each))[1:] == (
            [["weights"], ["kv_cache"]]
            if kind == "vllm"
            else [["weights"], ["kv_cache", "cuda_graph"]]
        )
    assert paused_by(scene.bus.name) is None and scene.bus.paused is None
    assert scene.bus.policy_version == 2


@pytest.mark.parametrize(("kind", "level", "step", "after"), POINTS)
async def test_a_wake_after_the_trainers_death_leaves_whole_engines(
    kind: str, level: int, step: str, after: bool, bus: Bus, servers: Any
) -> None:
    running = [servers(1, ENGINES[kind]), servers(2, ENGINES[kind])]
    await kill_trainer(bus.name, kind, running, step, after, level)
    trainer = Trainer(bus.name)
    async with fleet_of(bus.name, *running) as fleet:
        try:
            report = await fleet.wake(trainer, 3)
        except EngineError as error:
            # A second move of the same memory ends SGLang, whose answers name no sleeping memory.
            assert kind == "sglang" and step in MOVED, error
            for each in running:
                await asyncio.to_thread(each.process.join, 0.5)
                if not each.process.is_alive():
                    each.start_anew()
            report = await fleet.wake(trainer, 3)
    assert {each.state for each in report.servers} == {"serving"}
    await assert_serving(3.0, *running)
    assert paused_by(bus.name) is None
    trainer.publisher.close()


@pytest.mark.parametrize(("kind", "step"), [(kind, step) for kind in STEPS for step in STEPS[kind]])
async def test_a_killed_server_wakes_whole_after_its_restart(
    kind: str, step: str, scene: Scene
) -> None:
    step = {"prepare": "init"}.get(step, step)
    running = [scene.servers(1, ENGINES[kind]), scene.servers(1, ENGINES[kind])]
    async with scene.fleet_at_1(*running, timeout=SHORT_S) as fleet:
        await running[1].fault(step, "die")
        deaths = 0
        for call in (lambda: fleet.sleep(2), lambda: fleet.wake(scene.trainer, 2)):
            try:
                await call()
            except (EngineError, UpdateRolledBackError):
                deaths += 1
                running[1].start_anew()
        assert deaths == 1
        await fleet.wake(scene.trainer, 2)
    await assert_serving(2.0, *running)
    assert paused_by(scene.bus.name) is None


@pytest.mark.parametrize("kind", ENGINES)
async def test_a_server_started_anew_while_asleep_is_awake(kind: str, scene: Scene) -> None:
    running = [scene.servers(1, ENGINES[kind]), scene.servers(1, ENGINES[kind])]
    async with scene.fleet_at_1(*running) as fleet:
        await fleet.sleep()
        running[0].start_anew()
        await fleet.sleep()
        running[0].start_anew()
        await fleet.wake(scene.trainer, 2)
    assert [await each.tokens(1) for each in running] == [[2.0], [2.0]]


@pytest.mark.parametrize(("kind", "level"), LEVELS)
async def test_the_same_version_loads_only_where_weights_were_discarded(
    kind: str, level: int, scene: Scene
) -> None:
    running = scene.servers(2, ENGINES[kind] if level == 1 else kind)
    async with scene.fleet_at_1(running) as fleet:
        await fleet.sleep(level)
        await running.fault("update", "500")
        if level == 2:  # rows name version 1 still, without weights
            with pytest.raises(UpdateRolledBackError):  # loaded at the second try
                await fleet.wake(scene.trainer, 1)
        await fleet.wake(scene.trainer, 1)
        assert await running.tokens(2) == [1.0, 1.0]
        before = await moves(running)
        report = await fleet.wake(scene.trainer, 1)
        assert report.servers[0].state == "serving" and await moves(running) == before


@pytest.mark.parametrize("kind", ENGINES)
async def test_sleeping_twice_is_once(kind: str, scene: Scene) -> None:
    running = scene.servers(1, ENGINES[kind])
    async with scene.fleet_at_1(running) as fleet:
        await fleet.sleep(1)
        before = await moves(running)
        assert (await fleet.sleep(1)).servers[0].state == "asleep"
        assert await moves(running) == before
        with pytest.raises(EngineError) as caught:
            await fleet.sleep(2)
        assert caught.value.step == "sleep"
        await fleet.wake(scene.trainer, 1)
    assert await running.tokens(1) == [1.0]


SLEEP_OFF = vllm(model_config={"enable_sleep_mode": False})


@pytest.mark.parametrize(("make", "level"), [
    (SLEEP_OFF, 1), (SLEEP_OFF, 2), (vllm(lora_config={"max_loras": 2}), 2),
    (vllm(speculative_config={"method": "eagle"}), 2), (sglang(enable_memory_saver=False), 2),
    (SmallSglang, 1),
])  # fmt: skip
async def test_a_server_that_would_lose_state_is_refused(
    make: Callable[[int], SmallEngine], level: int, scene: Scene
) -> None:
    good, running = scene.servers(1), scene.servers(1, make)
    async with scene.fleet_at_1(good, running) as fleet:
        with pytest.raises(EngineError) as caught:
            await fleet.sleep(level)
        assert caught.value.server == running.url and "nothing was touched" in caught.value.advice
        for each in (good, running):
            assert await each.tokens(1) == [1.0] and await moves(each) == []
    assert paused_by(scene.bus.name) is None


async def test_a_torn_server_sleeps_and_never_serves_before_whole_weights(scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(1)]
    async with scene.fleet(*running, quorum=1) as fleet:
        await running[0].fault("update", "refuse")
        assert (await fleet.update(scene.trainer, 1)).torn == [running[0].url]
        await running[0].fault("update", "refuse")  # of the recovery
        await running[1].fault("pause", "500")
        with pytest.raises(EngineError):
            await fleet.sleep()
        assert await running[0].paused() and not await running[1].paused()
        assert ["resumed torn", None] not in await running[0].calls()
        await running[0].fault("update", "refuse")
        await fleet.sleep()
        await fleet.wake(scene.trainer, 2)
    assert [await each.tokens(1) for each in running] == [[2.0], [2.0]]
    assert paused_by(scene.bus.name) is None


async def test_a_refused_sleep_leaves_the_awake_servers_usable(scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(1)]
    async with scene.fleet_at_1(*running, mode="wait") as fleet:
        await running[1].fault("sleep", "500")
        with pytest.raises(EngineError) as caught:
            await fleet.sleep()
        assert caught.value.server == running[1].url
        assert await running[1].tokens(2) == [1.0, 1.0]
        await fleet.sleep()
        await fleet.wake(scene.trainer, 2)
    await assert_serving(2.0, *running)
    assert scene.bus.paused is None


@pytest.mark.parametrize(("kind", "step"), [
    ("vllm", "wake weights"), ("vllm", "wake kv_cache"), ("vllm", "init"),
])  # fmt: skip
async def test_memory_that_the_trainer_holds_is_named(kind: str, step: str, scene: Scene) -> None:
    running = [scene.servers(1, kind), scene.servers(1, kind)]
    async with scene.fleet_at_1(*running) as fleet:
        await fleet.sleep()
        await running[1].fault(step, "500")
        with pytest.raises(EngineError) as caught:
            await fleet.wake(scene.trainer, 2)
        assert caught.value.server == running[1].url and caught.value.status == 500
        assert await running[1].paused() and "old weights" not in caught.value.advice
        await fleet.wake(scene.trainer, 2)
    await assert_serving(2.0, *running)


async def test_requests_that_outlast_the_deadline_keep_all_servers_awake(scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(1)]
    async with scene.fleet_at_1(*running, mode="wait", timeout=SHORT_S / 2) as fleet:
        long = await in_flight(running[1], 1000)
        with pytest.raises(EngineError) as caught:
            await fleet.sleep()
        assert (caught.value.server, caught.value.step) == (running[1].url, "pause")
        assert await moves(running[0]) == await moves(running[1]) == []
        assert await running[0].tokens(1) == [1.0] and scene.bus.paused is None
        assert (await long)["tokens"][-1] == 1.0


async def test_bad_arguments_leave_servers_asleep(scene: Scene, tmp_path: Any) -> None:
    running = scene.servers(1)
    async with scene.fleet(running) as fleet:
        for level, kind in ((0, ValueError), (3, ValueError), (True, TypeError), ("2", TypeError)):
            with pytest.raises(kind, match="level"):
                await fleet.sleep(level)  # type: ignore[arg-type]
        await fleet.update(scene.trainer, 5)
        await fleet.sleep()
        for publisher, version, kind in (
            (None, 6, TypeError), (scene.trainer, None, TypeError), (scene.trainer, -1, ValueError),
            (scene.trainer, 4, VersionOrderError),
        ):  # fmt: skip
            with pytest.raises(kind):
                await fleet.wake(publisher, version)
        for call in (
            lambda: fleet.update(scene.trainer, 6),
            lambda: fleet.reload(tmp_path),
            lambda: fleet.add(scene.servers(1).server()),
            fleet.catch_up,
        ):
            with pytest.raises(EngineError) as caught:
                await call()
            assert caught.value.server == running.url and caught.value.body == "asleep"
        assert await running.paused()
        with pytest.raises(RuntimeError):
            fleet.wake_sync(scene.trainer, 6)
        await fleet.wake(scene.trainer, 6)
    assert await running.tokens(1) == [6.0]
    managed = ManagedServer(["x", "{checkpoint}"], url=running.url, checkpoint=tmp_path)
    with pytest.raises(EngineError):
        await EngineFleet([managed], bus=scene.bus.name, mode="abort").sleep()


def test_turns_without_an_event_loop(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(1)
    fleet = fleet_of(bus.name, running)
    fleet.update_sync(trainer, 1)
    assert fleet.sleep_sync().servers[0].state == "asleep"
    assert fleet.wake_sync(trainer, 2).servers[0].version == 2
    assert asyncio.run(running.tokens(1)) == [2.0]
    trainer.model.value.data.fill_(9.0)
    doc_pages.run(
        "docs/weights.md", "await fleet.sleep(", bus.name, fleet=fleet, publisher=trainer.publisher
    )
    assert asyncio.run(running.tokens(1)) == [9.0]


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeper_is_seen_by_labels_and_status(level: int, scene: Scene) -> None:
    running = scene.servers(1)
    async with scene.fleet_at_1(running) as fleet:
        with shmbus.Producer(scene.bus.name) as producer, shmbus.Consumer(scene.bus.name):
            assert producer.version_of(running.url) == 1
            await fleet.sleep(level)
            await asyncio.sleep(0.06)  # rows count as fresh for a moment
            if level == 2:
                with pytest.raises(VersionUnknownError) as caught:
                    producer.version_of(running.url)
                assert caught.value.servers == [running.url]
                with pytest.raises(VersionUnknownError):
                    producer.policy_version  # noqa: B018
            else:
                assert producer.version_of(running.url) == producer.policy_version == 1
            status = read_status(scene.bus.name)
            assert [(each.state, each.version) for each in status.engines] == [
                ("asleep", None if level == 2 else 1)
            ]
            assert status.verdict is not None and status.verdict.level == "note"
            assert status.verdict.findings[0].kind == "engines_asleep"
            assert status.verdict.findings[0].who == [running.url]
            await fleet.wake(scene.trainer, 2)
            assert producer.version_of(running.url) == producer.policy_version == 2
    assert [each.state for each in read_status(scene.bus.name).engines] == ["serving"]


async def test_sleepers_of_a_dead_trainer_wait_for_a_wake_or_the_command(
    bus: Bus, servers: Any
) -> None:
    running = [servers(1), servers(1)]
    await kill_trainer(bus.name, "vllm", running, "prepare", True, 2)
    assert not servers_left(bus.name)  # a daemon wakes nobody: the device may be in use
    report = await resume(bus.name, timeout=SHORT_S)
    assert report is not None and [each.version for each in report.servers] == [2, 2]
    assert [await each.tokens(1) for each in running] == [[2.0], [2.0]]
    assert paused_by(bus.name) is None


async def test_a_sleeper_leaves_the_fleet_only_after_its_end(scene: Scene) -> None:
    running = [scene.servers(1), scene.servers(1)]
    async with scene.fleet(*running) as fleet:
        await fleet.sleep()  # before any publication
        with shmbus.Producer(scene.bus.name) as producer, pytest.raises(VersionUnknownError):
            producer.version_of(running[0].url)
        with pytest.raises(EngineError) as caught:
            await fleet.remove(running[1].url)
        assert caught.value.server == running[1].url and caught.value.step == "remove"
        running[1].kill()
        await fleet.remove(running[1].url)
        await fleet.wake(scene.trainer, 1)
    assert await running[0].tokens(1) == [1.0] and paused_by(scene.bus.name) is None


async def test_a_sleeper_takes_no_adapter(bus: Bus, servers: Any, tmp_path: Any) -> None:
    running = servers(1)
    async with fleet_of(bus.name, running) as fleet:
        await fleet.sleep(1)
        adapter = LoraVersion(name="a-1", version=1, path=str(tmp_path), size=1)
        with pytest.raises(EngineError) as caught:
            await LoraFleet([VllmServer(running.url)], bus=bus.name).update(adapter)
        assert (caught.value.server, caught.value.step) == (running.url, "load adapter")
