"""A week of a run in little: it ends at its last step, and trains every prompt once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("week.py")
#: Weeks of each system, and steps of each: `make week` has 20 of 120.
WEEKS = int(os.environ.get("SHMBUS_TEST_WEEKS", "1"))
STEPS = 30 if WEEKS == 1 else 120


@pytest.mark.slow
@pytest.mark.timeout(300 * WEEKS)
@pytest.mark.parametrize("system", ["alone", "ranks and a daemon"])
def test_a_run_under_all_that_goes_wrong_in_a_week_trains_every_prompt_once(
    bus_name: str, system: str, seed: int
) -> None:
    for week in range(seed, seed + WEEKS):
        arguments = [bus_name, str(STEPS), str(week), *(["alone"] if system == "alone" else [])]
        found = subprocess.run(
            [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False
        )
        if found.returncode:
            pytest.fail(
                f"week {week}: {found.stdout[-2000:]}\n{found.stderr[-6000:]}", pytrace=False
            )
        report = json.loads(found.stdout.splitlines()[-1])
        print(report)
        assert report["step"] == STEPS and report["faults"], report
        assert not (report["twice"] or report["skipped"] or report["torn"]), report
