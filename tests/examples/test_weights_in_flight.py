"""The example of weights in flight mixes nothing; SHMBUS_TEST_LONG=1 runs each of its ways."""

import os
from pathlib import Path

import pytest
from conftest import Spawner

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "weights_in_flight.py"
DEADLINE_S = 200
MODES = ["one-copy", "versions", "checkpoint"]


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
@pytest.mark.parametrize("mode", MODES if "SHMBUS_TEST_LONG" in os.environ else MODES[:1])
def test_requests_in_flight_meet_no_mix(mode: str, bus_name: str, spawn: Spawner) -> None:
    said = spawn.file(EXAMPLE, mode, bus_name).finish(DEADLINE_S)
    assert said.startswith(f"{mode}: ") and "none a mix of two" in said
