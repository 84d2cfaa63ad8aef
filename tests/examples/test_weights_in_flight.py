"""The example of weights in flight runs, and says that nothing was mixed.

``SHMBUS_TEST_LONG=1`` runs it in each of its ways.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "weights_in_flight.py"
DEADLINE_S = 120
MODES = ["one-copy", "versions", "checkpoint"]


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
@pytest.mark.parametrize("mode", MODES if "SHMBUS_TEST_LONG" in os.environ else MODES[:1])
def test_requests_in_flight_meet_new_versions_and_no_mix(mode: str, bus_name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), mode, bus_name],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{mode}: ") and "none a mix of two" in done.stdout
