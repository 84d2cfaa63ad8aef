"""Fleets and servers as they are used by hand: odd answers, odd arguments, any loop and thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from odd_server import OddServer
from trainers import TIMEOUT_S, Trainer

from shmbus import Bus, ShmbusError
from shmbus.engines import (
    EngineError,
    EngineFleet,
    LoraFleet,
    SglangServer,
    UpdateRolledBackError,
    VllmServer,
)
from shmbus.engines.pause_note import paused_by
from shmbus.engines.rows import row_name

pytest_plugins = ["engine_fixtures"]

DEEP = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
WAITED_S = 60.0


def fleet_of(bus: Bus, server: OddServer, **options: Any) -> EngineFleet:
    return EngineFleet([VllmServer(server.url)], bus=bus.name, timeout=TIMEOUT_S, **options)


async def test_an_answer_that_comes_in_pieces_is_read_whole(bus: Bus, trainer: Trainer) -> None:
    async with OddServer() as server:
        server.pieces = 4
        report = await fleet_of(bus, server).update(trainer, 3)
        assert report.servers[0].state == "serving" and report.servers[0].version == 3
        assert server.model.unique().tolist() == [3.0] and not server.paused


@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
async def test_an_address_where_nobody_listens_is_said_and_no_option_advised(
    kind: Any, bus: Bus, trainer: Trainer
) -> None:
    async with OddServer() as server:
        url = server.url
    fleet = EngineFleet([kind(url)], bus=bus.name, timeout=TIMEOUT_S)
    with pytest.raises(EngineError, match=r"nobody listens there.*address") as raised:
        await fleet.update(trainer, 1)
    assert raised.value.gone
    assert "start the server" not in str(raised.value) and "0.5.23" not in str(raised.value)


@pytest.mark.parametrize("path", ["/get_world_size", "/pause", "/update_weights", "/resume"])
async def test_json_of_any_depth_is_an_answer_like_any_other(
    path: str, bus: Bus, trainer: Trainer
) -> None:
    async with OddServer() as server:
        fleet = fleet_of(bus, server)
        await fleet.update(trainer, 1)
        deep = iter([[DEEP]])
        server.instead[path] = lambda: next(deep, None)
        if path == "/resume":  # it is asked again
            await fleet.update(trainer, 2)
        else:
            with pytest.raises(ShmbusError, match="expected a JSON object, got"):
                await fleet.update(trainer, 2)
        assert not server.paused and paused_by(bus.name) is None
        await fleet.update(trainer, 3)
        assert server.model.unique().tolist() == [3.0]


async def test_what_a_server_of_the_users_raises_leaves_nobody_paused(
    bus: Bus, trainer: Trainer
) -> None:
    class Broken(VllmServer):
        async def load(self, version: int, clear_cache: bool, timeout: float) -> None:
            if version == 2:
                raise KeyError("their own code")
            await super().load(version, clear_cache, timeout)

    async with OddServer() as server:
        fleet = EngineFleet([Broken(server.url)], bus=bus.name, timeout=TIMEOUT_S)
        await fleet.update(trainer, 1)
        with pytest.raises(UpdateRolledBackError, match="KeyError: 'their own code'") as caught:
            await fleet.update(trainer, 2)
        assert isinstance(caught.value.__cause__, EngineError)
        assert isinstance(caught.value.__cause__.__cause__, KeyError)
        assert not server.paused and paused_by(bus.name) is None


async def test_a_failed_call_keeps_its_step_status_and_advice(bus: Bus, trainer: Trainer) -> None:
    async with OddServer() as server:
        server.instead["/pause"] = lambda: [b'{"status": "no"}']
        with pytest.raises(EngineError, match="own log; the old weights are in force") as caught:
            await fleet_of(bus, server).update(trainer, 1)
        assert (caught.value.step, caught.value.status) == ("pause", 200)


@pytest.mark.parametrize("status", ["200 OK", "401 Unauthorized", "200 sk-0123456789\0"])
@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
async def test_a_server_that_says_what_it_was_sent_puts_no_key_into_an_error(
    kind: Any, status: str, bus: Bus, trainer: Trainer
) -> None:
    async with OddServer() as server:
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
    async with OddServer(prefix="/of-a-service-with-a-very-long-name" * 3) as server:
        report = await fleet_of(bus, server).update(trainer, 2)
        assert report.servers[0].version == 2


def test_names_of_rows_fit_and_differ() -> None:
    long = "http://inference-{}.production.svc.cluster.local:8000"
    names = {row_name(long.format(n)) for n in range(100)} | {
        row_name("http://é" + "é" * n) for n in range(50)
    }
    assert len(names) == 150 and all(len(name.encode()) <= 37 for name in names)
    assert row_name("http://127.0.0.1:8000") == "http://127.0.0.1:8000"


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_a_pause_of_the_operators_is_the_operators_to_end(
    mode: str, bus: Bus, trainer: Trainer
) -> None:
    async with OddServer() as server:
        bus.pause("the disk is full")
        await fleet_of(bus, server, mode=mode).update(trainer, 1)
        assert bus.paused == "the disk is full"
        bus.pause("weights of version 1 are being loaded")  # as a fleet that died says it
        await fleet_of(bus, server, mode=mode).update(trainer, 2)
        assert (bus.paused is None) == (mode != "keep")


async def test_a_fleet_serves_one_event_loop_after_another(bus: Bus, trainer: Trainer) -> None:
    async with OddServer() as server:
        fleet = fleet_of(bus, server)

        def one_loop_an_update() -> list[int | None]:
            reports = [asyncio.run(fleet.update(trainer, version)) for version in (1, 2)]
            reports.append(fleet.update_sync(trainer, 3))
            return [report.servers[0].version for report in reports]

        assert await asyncio.to_thread(one_loop_an_update) == [1, 2, 3]


async def test_threads_take_turns_at_one_fleet(bus: Bus, trainer: Trainer) -> None:
    async with OddServer() as server:
        fleet = fleet_of(bus, server)
        done: list[int] = []

        class InAnyOrder:
            """Their turns come in no order, so each begins a life."""

            def publish(self, version: int) -> None:
                trainer.publisher.new_life()
                trainer.publish(version)

        def update(version: int) -> None:
            done.append(fleet.update_sync(InAnyOrder(), version).version)

        threads = [threading.Thread(target=update, args=(n,), daemon=True) for n in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            await asyncio.to_thread(each.join, WAITED_S)
        assert sorted(done) == [0, 1, 2, 3]


async def test_a_sync_update_inside_a_loop_is_refused(bus: Bus, trainer: Trainer) -> None:
    async with OddServer() as server:
        with pytest.raises(RuntimeError, match=r"await update\(\) there"):
            fleet_of(bus, server).update_sync(trainer, 1)
        assert server.seen == []


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"servers": None}, TypeError, "expected a list of servers, got NoneType"),
        ({"servers": ["http://127.0.0.1:1"]}, TypeError, r"VllmServer\(url\), got str"),
        ({"bus": "a/b"}, ValueError, "bus name"),
        ({"clear_cache": "no"}, TypeError, "expected True or False, got str"),
        ({"timeout": 0}, ValueError, "more than 0"),
        ({"timeout": None}, TypeError, "expected seconds, got NoneType"),
        ({"timeout": float("nan")}, ValueError, "got nan"),
        ({"quorum": True}, TypeError, "expected an int, got bool"),
        ({"quorum": "1"}, TypeError, "expected an int, got str"),
    ],
)
def test_options_of_another_type_are_refused(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    given: dict[str, Any] = {"servers": [VllmServer("http://127.0.0.1:1")], "bus": "b", **options}
    with pytest.raises(error, match=match):
        EngineFleet(given.pop("servers"), **given)
    if "clear_cache" not in options:
        with pytest.raises(error, match=match):
            LoraFleet(options.get("servers", [VllmServer("http://127.0.0.1:1")]), **given)


@pytest.mark.parametrize(
    ("publisher", "version", "error", "match"),
    [
        (None, 1, TypeError, "expected a WeightPublisher, got NoneType"),
        ("trainer", "1", TypeError, "expected an int, got str"),
        ("trainer", True, TypeError, "expected an int, got bool"),
        ("trainer", -1, ValueError, "expected 0 to"),
        ("trainer", 1 << 63, ValueError, "expected 0 to 9223372036854775807"),
    ],
)
async def test_what_makes_no_update_is_refused_before_anybody_is_asked(
    publisher: Any, version: Any, error: type[Exception], match: str, bus: Bus, trainer: Trainer
) -> None:
    async with OddServer() as server:
        with pytest.raises(error, match=match):
            await fleet_of(bus, server).update(publisher and trainer, version)
        assert server.seen == []


@pytest.mark.parametrize("make", [VllmServer, SglangServer])
@pytest.mark.parametrize(
    ("url", "error", "match"),
    [
        (None, TypeError, "expected a str, got NoneType"),
        ("http://h:99999", ValueError, "http://host:port"),
        ("http://h:port", ValueError, "http://host:port"),
        (" http://h:1", ValueError, "http://host:port"),
        ("http://h:1/?a=b", ValueError, "http://host:port"),
        ("http://" + "h" * 64, ValueError, "http://host:port"),
        ("http://user:key@h:1", ValueError, "pass headers="),
        ("http://h:1?", ValueError, "http://host:port"),
        ("http://h:1#", ValueError, "http://host:port"),
        ("http://h:1/\x00", ValueError, "http://host:port"),
        ("http://h:1/\ud800", ValueError, "http://host:port"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused(
    make: Any, url: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match) as caught:
        make(url)
    assert "key" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ("Authorization", TypeError),
        ({"Authorization": 5}, TypeError),
        ({"Authorization": "secret\r\nX: y"}, ValueError),
        ({"a b": "secret"}, ValueError),
    ],
)
def test_headers_that_cannot_be_sent_are_refused_without_their_values(
    headers: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"^headers: expected") as caught:
        VllmServer("http://127.0.0.1:1", headers=headers)
    assert "secret" not in str(caught.value)
