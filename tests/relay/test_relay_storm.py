"""Relays that are killed lose, double and tear nothing, and all ledgers balance at the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from relay.relay_storm import Plan, Storm

#: In all; the program relay_storm.py takes thousands.
KILLS = int(os.environ.get("SHMBUS_TEST_KILLS", "20"))


@pytest.fixture
def private() -> Iterator[str]:
    """A directory for one user, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="shmbus-") as directory:
        yield directory


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("release", "sinks"), [("acknowledged", 2), ("put", 1)])
def test_kills_are_safe(release: str, sinks: int, bus_name: str, private: str, seed: int) -> None:
    plan = Plan(bus_name, private, sinks, KILLS // 2, 25 * KILLS, release, seed, pause_s=0.05)
    said = Storm(plan).run()
    print(said)
    assert said["faults"] == []
    assert sum(said["killed"].values()) == KILLS // 2
