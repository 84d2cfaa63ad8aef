"""Mirrors that are killed and stopped show their readers no wrong byte, and none is left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from relay.mirror_storm import Plan, Storm

#: In all; the program mirror_storm.py takes hundreds.
KILLS = int(os.environ.get("SHMBUS_TEST_KILLS", "20"))


@pytest.fixture
def private() -> Iterator[str]:
    """A directory for one user, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="shmbus-") as directory:
        yield directory


@pytest.mark.timeout(300)
def test_kills_and_stops_show_nothing_wrong(bus_name: str, private: str, seed: int) -> None:
    said = Storm(Plan(bus_name, private, 3, 3 * KILLS // 2, KILLS // 2, seed=seed)).run()
    print(said)
    assert said["faults"] == []
    assert sum(said["done"].values()) == KILLS // 2
