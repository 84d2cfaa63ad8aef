"""The page shows the sessions of agents: what runs, how long, how many turns, which engine."""

from typing import Any

import msgspec
from conftest import wait_until
from recorders import Scene, chat, user

import shmbus
from shmbus.inspect.rates import Watcher
from shmbus.web.picture import picture

pytest_plugins = ["recorder_fixtures"]


def agents(bus: str) -> Any:
    watcher = Watcher(bus)
    watcher.poll()
    shown = picture(watcher, 1000.0)
    msgspec.json.encode(shown)
    return shown.get("agents")


def test_sessions_and_engines_are_in_the_picture_of_a_bus(scene: Scene) -> None:
    session = scene.open("q\n")
    chat(session, [user("hello")])
    wait_until(lambda: agents(scene.bus.name)["rows"].get("q\\n[0]", {}).get("turns") == 1)
    shown = agents(scene.bus.name)
    assert shown["engines"] == {scene.engine.url: "up"}
    assert (shown["sessions"], shown["recorders"], shown["drift"]) == (1, 1, 0)
    (row,) = shown["rows"].values()
    assert row["engine"] == scene.engine.url
    assert row["tokens"] == len(scene.engine.record[0].prompt + scene.engine.record[0].output)
    assert row["since"] <= 1000
    session.release()


def test_sessions_of_one_sample_in_two_rounds_have_a_row_each(scene: Scene) -> None:
    sessions = [scene.open("q", round=round_) for round_ in (1, 2)]
    wait_until(lambda: list(agents(scene.bus.name)["rows"]) == ["q[0]", "q[0] (2)"])
    for session in sessions:
        session.release()


def test_a_bus_without_a_recorder_has_no_agents(bus: shmbus.Bus) -> None:
    assert agents(bus.name) is None
