"""TODO."""

from __future__ import annotations

from typing import Any

import pytest
from raw_server import RawServer
from test_client_updates import Client, bring, tokens
from trainers import TIMEOUT_S, Trainer, fleet_of

from shmbus import Bus
from shmbus.engines import (
    ClientUpdates,
    EngineFleet,
    LoraFleet,
    SglangServer,
    VllmServer,
)


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
    async with RawServer() as server:
        with pytest.raises(error, match=match):
            await fleet_of(bus.name, server).update(publisher and trainer, version)
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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"servers": []}, "one or more"),
        ({"mode": "retract"}, "expected 'keep', 'wait' or 'abort', got 'retract'"),
        ({"quorum": 3}, "1 to 1"),
    ],
)
def test_what_makes_no_fleet_is_refused(options: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"servers": [VllmServer("http://127.0.0.1:1")], "bus": "b", **options}
    with pytest.raises(ValueError, match=match):
        EngineFleet(given.pop("servers"), **given)


def test_an_address_without_http_is_refused() -> None:
    with pytest.raises(ValueError, match="http://host:port"):
        VllmServer("localhost:8000")


@pytest.mark.parametrize("version", ["3", True, 3.0, None, 1 << 63])
def test_a_version_that_is_none_is_refused_before_anything_is_touched(
    version: Any, bus: Bus, trainer: Trainer, servers: Any
) -> None:
    running = servers(2)
    trainer.publish(1)
    updates = ClientUpdates(bus.name, Client(running), timeout=TIMEOUT_S)
    bring(updates, trainer, 2)
    with pytest.raises((TypeError, ValueError), match=r"^version: expected an int"):
        updates.bring(version, 2)
    assert tokens(running) == [2.0] * 3
    with pytest.raises(TypeError, match=r"^timeout: expected seconds"):
        ClientUpdates(bus.name, Client(running), timeout="5")  # type: ignore[arg-type]


def test_a_mode_that_sglang_has_not_is_refused_by_the_servers_name() -> None:
    with pytest.raises(ValueError, match=r"SglangServer\) has no 'wait'; it has keep, abort"):
        EngineFleet([SglangServer("http://127.0.0.1:1")], bus="b", mode="wait")
