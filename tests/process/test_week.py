"""A week of a run in little: it ends at its last step, and trains every prompt once."""

import json
import os
from pathlib import Path

import pytest
from conftest import Spawner

PROGRAM = Path(__file__).with_name("week.py")
PATH = {"PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")])}
#: Weeks of each system, and steps of each: `make week` has 20 of 120.
WEEKS = int(os.environ.get("SHMBUS_TEST_WEEKS", "1"))
STEPS = 30 if WEEKS == 1 else 120


@pytest.mark.slow
@pytest.mark.timeout(300 * WEEKS)
@pytest.mark.parametrize("system", ["alone", "ranks and a daemon"])
def test_a_run_under_all_that_goes_wrong_in_a_week_trains_every_prompt_once(
    bus_name: str, system: str, seed: int, spawn: Spawner
) -> None:
    for week in range(seed, seed + WEEKS):
        alone = ["alone"] if system == "alone" else []
        said = spawn.file(PROGRAM, bus_name, STEPS, week, *alone, env=PATH).finish(300 * WEEKS - 10)
        (line,) = (line for line in said.splitlines() if line.startswith('{"'))
        report = json.loads(line)
        print(report)
        assert report["step"] == STEPS and report["faults"], report
        assert not (report["twice"] or report["skipped"] or report["torn"]), report
