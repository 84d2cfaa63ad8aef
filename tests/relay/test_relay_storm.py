"""Killed relays, mirrors, parties and workers lose, double and tear nothing (SHMBUS_TEST_KILLS)."""

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from relay import mirror_storm, relay_storm
from relay.prompt_storm import PromptStorm
from relay.relay_storm import Plan

KILLS = int(os.environ.get("SHMBUS_TEST_KILLS", "20"))
pytestmark = pytest.mark.timeout(280 + KILLS)


@pytest.fixture
def private() -> Iterator[str]:
    """A directory for one user, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="shmbus-") as directory:
        yield directory


def check(said: dict[str, Any], harm: str = "killed") -> None:
    print(said)
    assert said["faults"] == []
    assert sum(said[harm].values()) == KILLS // 2


@pytest.mark.parametrize(("release", "sinks"), [("acknowledged", 2), ("put", 1)])
def test_kills_are_safe(release: str, sinks: int, bus_name: str, private: str, seed: int) -> None:
    plan = Plan(bus_name, private, sinks, KILLS // 2, 25 * KILLS, release, seed, pause_s=0.05)
    check(relay_storm.Storm(plan).run())


@pytest.mark.parametrize("release", ["acknowledged", "put"])
def test_kills_lose_and_double_no_request(
    release: str, bus_name: str, private: str, seed: int
) -> None:
    plan = Plan(bus_name, private, 1, KILLS // 2, 10 * KILLS, release, seed, pause_s=0.1)
    check(PromptStorm(plan).run())


def test_kills_and_stops_show_nothing_wrong(bus_name: str, private: str, seed: int) -> None:
    plan = mirror_storm.Plan(bus_name, private, 3, 3 * KILLS // 2, KILLS // 2, seed=seed)
    check(mirror_storm.Storm(plan).run(), "done")
