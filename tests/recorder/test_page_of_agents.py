"""The page shows the sessions of agents: what runs, how long, how many turns, which engine."""

from __future__ import annotations

from typing import Any

import msgspec
from conftest import wait_until
from recorders import chat, user
from stub_engine import StubEngine

import shmbus
from shmbus.inspect.rates import Watcher
from shmbus.recorder.recorder import Recorder
from shmbus.web.picture import picture

pytest_plugins = ["recorder_fixtures"]


def agents(bus: str) -> Any:
    watcher = Watcher(bus)
    watcher.poll()
    shown = picture(watcher, 1000.0)
    msgspec.json.encode(shown)
    return shown.get("agents")


def test_sessions_and_engines_are_in_the_picture_of_a_bus(
    bus: shmbus.Bus, recorder: Recorder, engine: StubEngine, producer: shmbus.Producer,
    feeder: shmbus.Feeder,
) -> None:  # fmt: skip
    feeder.request("q\n", group_size=1)
    session = producer.session(producer.requests.next(30.0))
    chat(session, [user("hello")])
    wait_until(lambda: agents(bus.name)["rows"].get("q\\n[0]", {}).get("turns") == 1)
    shown = agents(bus.name)
    assert shown["engines"] == {engine.url: "up"}
    assert (shown["sessions"], shown["recorders"], shown["drift"]) == (1, 1, 0)
    (row,) = shown["rows"].values()
    assert row["engine"] == engine.url
    assert row["tokens"] == len(engine.record[0].prompt + engine.record[0].output)
    assert row["since"] <= 1000
    session.release()


def test_a_bus_without_a_recorder_has_no_agents(bus: shmbus.Bus) -> None:
    assert agents(bus.name) is None
