"""An exception at any step of the handler loses no group, and the same call can be made again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(script: str, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


#: What each test runs; `make interrupts` has all of it, and more often.
OPERATIONS = {
    "alone": "next next-stale next-twice ack give-back state load attach close",
    "with prefetch": "next-prefetch next-twice-prefetch ack-prefetch close-prefetch",
    "of a daemon": "served-ack served-give-back served-close",
    "of one of two ranks": "rank-ack rank-next-twice-prefetch rank-close",
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("where", OPERATIONS)
def test_an_exception_at_any_step_of_the_handler_loses_nothing(bus_name: str, where: str) -> None:
    operations = OPERATIONS[where].split()
    report = run("handler.py", bus_name, *operations)
    assert report["faults"] == []
    assert min(report[operation] for operation in operations) > 20


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_signal_at_any_instant_loses_no_group_and_trains_none_twice(
    bus_name: str, seed: int, prefetch: int
) -> None:
    report = run("handler_signals.py", bus_name, prefetch, seed, 100)
    assert report["wrong"] == []
    assert report["interrupts"] >= 100
