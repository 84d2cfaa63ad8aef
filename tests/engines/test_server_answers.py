"""Fleets and servers in manual use: odd answers, odd arguments, any loop and thread."""

import asyncio
import contextlib
import socket
import struct
from typing import Any

import aiohttp
import pytest
from conftest import together
from raw_server import RawServer
from small_vllm import SLOW_S
from trainers import TIMEOUT_S, Scene, Trainer, fleet_of

from shmbus import Bus, ShmbusError
from shmbus.engines import (
    EngineError,
    EngineFleet,
    SglangServer,
    UpdateRolledBackError,
    VllmServer,
)
from shmbus.engines.pause_note import PauseNote, PauseNotice, paused_by
from shmbus.pool.server_rows import row_name

pytest_plugins = ["engine_fixtures"]

DEEP = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
WAITED_S = 60.0


async def test_an_answer_that_comes_in_pieces_is_read_whole(bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        server.pieces = 4
        report = await fleet_of(bus.name, server).update(trainer, 3)
        assert report.servers[0].state == "serving" and report.servers[0].version == 3
        assert server.model.unique().tolist() == [3.0] and not server.paused


async def test_the_end_of_a_call_is_named_where_asyncio_has_a_timeout_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(Exception):
        """As in Python 3.10: no subclass of the built-in TimeoutError."""

    def late(*_: object, **__: object) -> None:
        raise Late

    monkeypatch.setattr(asyncio, "TimeoutError", Late)
    monkeypatch.setattr(aiohttp.ClientSession, "request", late)
    with pytest.raises(EngineError, match=r"within 7 s") as raised:
        await VllmServer("http://127.0.0.1:9").post("pause", "/pause", 7.0)
    assert isinstance(raised.value.__cause__, Late)


@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
async def test_a_closed_port_is_told_without_advice(kind: Any, bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        url = server.url
    fleet = EngineFleet([kind(url)], bus=bus.name, timeout=TIMEOUT_S)
    with pytest.raises(EngineError, match=r"nobody listens there.*address") as raised:
        await fleet.update(trainer, 1)
    assert raised.value.gone
    assert "start the server" not in str(raised.value) and "0.5.23" not in str(raised.value)


@pytest.mark.parametrize("dies", [True, False])
async def test_a_server_that_resets_connections_while_dying_is_gone(dies: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)

        def reset_three() -> None:
            for _ in range(3 if dies else 1):
                taken, _ = listener.accept()
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                taken.close()
            if dies:
                listener.close()

        server = VllmServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        resets = asyncio.create_task(asyncio.to_thread(reset_three))
        with pytest.raises(EngineError) as raised:
            await server.paused(WAITED_S if dies else 2.0)
        assert raised.value.gone is dies
        assert "start the server" not in raised.value.advice
        await resets


@pytest.mark.parametrize("path", ["/get_world_size", "/pause", "/update_weights", "/resume"])
async def test_deeply_nested_json_is_an_answer(path: str, bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        fleet = fleet_of(bus.name, server)
        await fleet.update(trainer, 1)
        deep = iter([[DEEP]])
        server.instead[path] = lambda: next(deep, None)
        if path == "/resume":  # asked again
            await fleet.update(trainer, 2)
        else:
            with pytest.raises(ShmbusError, match="expected a JSON object, got"):
                await fleet.update(trainer, 2)
        assert not server.paused and paused_by(bus.name) is None
        await fleet.update(trainer, 3)
        assert server.model.unique().tolist() == [3.0]


async def test_a_raising_user_server_stays_unpaused(bus: Bus, trainer: Trainer) -> None:
    class Broken(VllmServer):
        async def load(self, version: int, clear_cache: bool, timeout: float) -> None:
            if version == 2:
                raise KeyError("their own code")
            await super().load(version, clear_cache, timeout)

    async with RawServer() as server:
        fleet = EngineFleet([Broken(server.url)], bus=bus.name, timeout=TIMEOUT_S)
        await fleet.update(trainer, 1)
        with pytest.raises(UpdateRolledBackError, match="KeyError: 'their own code'") as caught:
            await fleet.update(trainer, 2)
        assert isinstance(caught.value.__cause__, EngineError)
        assert isinstance(caught.value.__cause__.__cause__, KeyError)
        assert not server.paused and paused_by(bus.name) is None


async def test_a_failed_call_keeps_its_step_status_and_advice(bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        server.instead["/pause"] = lambda: [b'{"status": "no"}']
        with pytest.raises(EngineError, match="own log; the old weights are in force") as caught:
            await fleet_of(bus.name, server).update(trainer, 1)
        assert (caught.value.step, caught.value.status) == ("pause", 200)


@pytest.mark.parametrize("status", ["200 OK", "401 Unauthorized", "200 sk-0123456789\0"])
@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
async def test_an_echo_shows_no_key(kind: Any, status: str, bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        server.status = status
        for path in ("/get_world_size", "/server_info"):
            server.instead[path] = lambda: [server.head.encode()]
        keyed = kind(server.url, headers={"Authorization": "Bearer sk-0123456789"})
        with pytest.raises(EngineError) as caught:
            await EngineFleet([keyed], bus=bus.name, timeout=TIMEOUT_S).update(trainer, 1)
        assert "sk-0123456789" in server.head
        shown = [caught.value, caught.value.__cause__]
        assert not any("0123456789" in f"{each} {getattr(each, 'body', '')}" for each in shown)


async def test_an_address_of_any_length_finds_its_rows(bus: Bus, trainer: Trainer) -> None:
    async with RawServer(prefix="/of-a-service-with-a-very-long-name" * 3) as server:
        assert (await fleet_of(bus.name, server).update(trainer, 2)).servers[0].version == 2


def test_names_of_rows_fit_and_differ() -> None:
    long = "http://inference-{}.production.svc.cluster.local:8000"
    names = {row_name(long.format(n)) for n in range(100)} | {
        row_name("http://é" + "é" * n) for n in range(50)
    }
    assert len(names) == 150 and all(len(name.encode()) <= 37 for name in names)
    assert row_name("http://127.0.0.1:8000") == "http://127.0.0.1:8000"


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_only_the_operator_ends_their_pause(mode: str, bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        bus.pause("the disk is full")
        await fleet_of(bus.name, server, mode=mode).update(trainer, 1)
        assert bus.paused == "the disk is full"
        bus.pause("weights of version 1 are being loaded")  # in a dead fleet's words
        await fleet_of(bus.name, server, mode=mode).update(trainer, 2)
        assert (bus.paused is None) == (mode != "keep")


async def test_a_fleet_serves_one_event_loop_after_another(bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        fleet = fleet_of(bus.name, server)

        def one_loop_an_update() -> list[int | None]:
            reports = [asyncio.run(fleet.update(trainer, version)) for version in (1, 2)]
            reports.append(fleet.update_sync(trainer, 3))
            return [report.servers[0].version for report in reports]

        assert await asyncio.to_thread(one_loop_an_update) == [1, 2, 3]


async def test_threads_take_turns_at_one_fleet(bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        fleet = fleet_of(bus.name, server)
        done: list[int] = []

        class InAnyOrder:
            """Their turns come in no order: each begins a life."""

            def publish(self, version: int) -> None:
                trainer.publisher.new_life()
                trainer.publish(version)

        def update(version: int) -> None:
            done.append(fleet.update_sync(InAnyOrder(), version).version)

        await asyncio.to_thread(together, update, range(4))
        assert sorted(done) == [0, 1, 2, 3]


@pytest.mark.parametrize("verb", ["update", "sleep", "wake"])
async def test_a_sync_call_inside_a_loop_is_refused(verb: str, bus: Bus, trainer: Trainer) -> None:
    async with RawServer() as server:
        call = getattr(fleet_of(bus.name, server), f"{verb}_sync")
        with pytest.raises(RuntimeError, match=rf"{verb}_sync: .* await {verb}\(\) there"):
            call(2) if verb == "sleep" else call(trainer, 1)
        assert server.seen == []


#: Shorter than the step's delay, and long enough for the rest.
PATIENCE_S = SLOW_S * 2 / 3
LATE_STEPS = ("start", "update", "finish")


@pytest.mark.parametrize("step", LATE_STEPS)
async def test_an_abandoned_step_ends_before_the_way_back(step: str, scene: Scene) -> None:
    running = scene.servers(2)
    async with scene.fleet_at_1(running, timeout=PATIENCE_S) as fleet:
        await running.fault(step, "slow")
        with pytest.raises(UpdateRolledBackError, match="runs version 1 again"):
            await fleet.update(scene.trainer, 2)
        assert await running.tokens(2) == [1.0, 1.0]
        assert paused_by(scene.bus.name) is None
        await fleet.update(scene.trainer, 3)
    assert await running.tokens(2) == [3.0, 3.0]


@pytest.mark.parametrize("step", LATE_STEPS)
async def test_a_dead_trainers_step_ends_before_its_rows_count(step: str, scene: Scene) -> None:
    running = scene.servers(2)
    server = VllmServer(running.url)
    async with EngineFleet([server], bus=scene.bus.name, timeout=TIMEOUT_S) as fleet:
        await fleet.update(scene.trainer, 1)
        scene.trainer.publish(2)
        with PauseNote(scene.bus.name) as note:
            note.write(PauseNotice(1, [("vllm", running.url)], 2, 1))
        await server.pause("keep", False, TIMEOUT_S)
        await running.fault(step, "slow")
        with contextlib.suppress(EngineError):
            await server.load(2, False, SLOW_S / 5)
        report = await fleet.recover()
    assert report is not None and report.torn == []
    assert await running.tokens(2) == [2.0, 2.0]
    assert paused_by(scene.bus.name) is None
