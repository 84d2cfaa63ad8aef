"""Killed parties and workers lose no request, and have none made twice."""

from __future__ import annotations

import os
import tempfile

import pytest
from relay.prompt_storm import PromptStorm
from relay.relay_storm import Plan

#: In all; the program prompt_storm.py takes thousands.
KILLS = int(os.environ.get("SHMBUS_TEST_KILLS", "20"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("release", ["acknowledged", "put"])
def test_kills_lose_and_double_no_request(release: str, bus_name: str, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="shmbus-") as directory:
        plan = Plan(bus_name, directory, 1, KILLS // 2, 10 * KILLS, release, seed, pause_s=0.1)
        said = PromptStorm(plan).run()
    print(said)
    assert said["faults"] == []
    assert sum(said["killed"].values()) == KILLS // 2
