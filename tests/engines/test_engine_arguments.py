"""Wrong arguments of fleets and servers: refused by name before anybody is asked."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from raw_server import RawServer
from refusals import refused
from trainers import Trainer, fleet_of

from shmbus import Bus
from shmbus.engines import EngineFleet, LoraFleet, SglangServer, VllmServer

pytest_plugins = ["engine_fixtures"]
Call = Callable[[], object]
SERVER = VllmServer("http://127.0.0.1:1")


def fleet(kind: Any = EngineFleet, **options: Any) -> Call:
    given = {"servers": [SERVER], "bus": "b", **options}
    return lambda: kind(given.pop("servers"), **given)


def server(url: Any, kind: Any = VllmServer, **options: Any) -> Call:
    return lambda: kind(url, **options)


NOWHERE = "ValueError: http://host:port"
REFUSED: list[tuple[Call, str]] = [
    *(
        (fleet(kind, **options), said)
        for kind in (EngineFleet, LoraFleet)
        for options, said in (
            ({"servers": None}, "TypeError: expected a list of servers, got NoneType"),
            ({"servers": ["http://127.0.0.1:1"]}, r"TypeError: VllmServer\(url\), got str"),
            ({"bus": "a/b"}, "ValueError: bus name"),
        )
    ),
    (fleet(servers=[]), "ValueError: one or more"),
    (lambda: asyncio.run(fleet()().reload(None)), "TypeError: directory: expected a path"),  # type: ignore[attr-defined]
    (
        fleet(servers=[SglangServer("http://127.0.0.1:1")], mode="wait"),
        r"ValueError: SglangServer\) has no 'wait'; it has keep, abort",
    ),
    *(
        (server(url, kind), said)
        for kind in (VllmServer, SglangServer)
        for url, said in (
            (None, "TypeError: expected a str, got NoneType"),
            ("localhost:8000", NOWHERE),
            ("http://h:99999", NOWHERE),
            ("http://h:port", NOWHERE),
            (" http://h:1", NOWHERE),
            ("http://h:1/?a=b", NOWHERE),
            ("http://" + "h" * 64, NOWHERE),
            ("http://user:key@h:1", "ValueError: pass headers="),
            ("http://h:1?", NOWHERE),
            ("http://h:1#", NOWHERE),
            ("http://h:1/\x00", NOWHERE),
            ("http://h:1/\ud800", NOWHERE),
        )
    ),
    *(
        (server("http://127.0.0.1:1", headers=headers), f"{kind}: ^headers: expected")
        for headers, kind in (
            ("Authorization", "TypeError"),
            ({"Authorization": 5}, "TypeError"),
            ({"Authorization": "secret\r\nX: y"}, "ValueError"),
            ({"a b": "secret"}, "ValueError"),
        )
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_what_makes_no_fleet_is_refused_without_keys(call: Call, said: str) -> None:
    told = str(refused(said, call))
    assert "secret" not in told and "key@" not in told


@pytest.mark.parametrize(
    ("publisher", "version", "said"),
    [
        (None, 1, "TypeError: expected a WeightPublisher, got NoneType"),
        ("trainer", "1", "TypeError: expected an int, got str"),
        ("trainer", True, "TypeError: expected an int, got bool"),
        ("trainer", -1, "ValueError: expected 0 to"),
        ("trainer", 1 << 63, "ValueError: expected 0 to 9223372036854775807"),
    ],
)
async def test_what_makes_no_update_is_refused_before_anybody_is_asked(
    publisher: Any, version: Any, said: str, bus: Bus, trainer: Trainer
) -> None:
    async with RawServer() as server:
        fleet = fleet_of(bus.name, server)

        def update() -> None:
            asyncio.run(fleet.update(publisher and trainer, version))

        await asyncio.to_thread(refused, said, update)
        assert server.seen == []
