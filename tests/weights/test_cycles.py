"""Weights that come and go leave nothing behind; SHMBUS_TEST_CYCLES=10000 is the long form."""

import os
import sys
from pathlib import Path

from conftest import Spawner

CYCLES = os.environ.get("SHMBUS_TEST_CYCLES", "30")
HERE = Path(__file__).parent


def test_cycles_of_weights_leave_nothing_behind(bus_name: str, spawn: Spawner) -> None:
    path = os.pathsep.join([str(HERE), *sys.path])
    child = spawn.module("cycles", f"cycles-{bus_name}", CYCLES, env={"PYTHONPATH": path})
    assert "grown {}" in child.finish(timeout=60 + int(CYCLES))
