"""Pairs of faults over a whole system lose nothing, double nothing and change no score."""

import json
import os
from pathlib import Path

import pytest
from conftest import Spawner

TESTS = Path(__file__).parents[1]
#: Pairs and seconds; `make storm` has the long form.
PAIRS = int(os.environ.get("SHMBUS_TEST_PAIRS", "16"))
SECONDS = float(os.environ.get("SHMBUS_TEST_STORM", "20"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("delay", ["", "any:13:delay"])
def test_a_second_fault_while_the_first_is_handled_loses_doubles_and_changes_nothing(
    bus_name: str, seed: int, spawn: Spawner, failpoint_build: Path, delay: str
) -> None:
    path = [str(failpoint_build)] * bool(delay)
    path += [*map(str, (TESTS, TESTS / "process", TESTS / "recorder"))]
    program = spawn.module(
        "second_fault", bus_name, PAIRS, SECONDS, seed, fresh=True,
        env={"PYTHONPATH": os.pathsep.join(path), "SHMBUS_FAILPOINT": delay},
    )  # fmt: skip
    said = program.finish(SECONDS + 280)
    (line,) = (line for line in said.splitlines() if line.startswith('{"'))
    report = json.loads(line)
    print(report)
    assert report["trained"] == report["offered"] > 0, report
    assert [report[name] for name in ("lost", "twice", "foreign", "scores")] == [[], 0, 0, 0]
    assert report["late"] == [], report
    assert report["faults"]["pairs"] > 2, report
