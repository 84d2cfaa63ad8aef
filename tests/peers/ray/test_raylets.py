"""Killed raylets lose and double nothing; SHMBUS_TEST_RAYLETS sets the number of kills."""

import os
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
sys.path.insert(0, str(Path(__file__).parent))

from raylet_storm import Plan, RayletStorm

KILLS = int(os.environ.get("SHMBUS_TEST_RAYLETS", "2"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * KILLS)
def test_killed_raylets_lose_double_and_tear_nothing() -> None:
    plan = Plan(KILLS, random.SystemRandom().randrange(1 << 32))
    print(plan)
    said = RayletStorm(plan).run()
    print(said)
    assert said["faults"] == [] and said["kills"] == KILLS
