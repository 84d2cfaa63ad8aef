"""The draft head's loss falls, with the gradients of tensors that never left a process.

The example itself compares: it makes each step once more in the trainer's process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "draft_head.py"
DEADLINE_S = 120
LAST_LINE = (
    r"(\d+) steps, (\d+) skipped, every gradient as of tensors made here, "
    r"loss (\d\.\d+) -> (\d\.\d+)"
)


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
def test_the_loss_falls_with_the_gradients_of_tensors_that_never_left_the_process(
    bus_name: str,
) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--quick", "--name", bus_name],
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(LAST_LINE, done.stdout.splitlines()[-1])
    assert found, done.stdout
    steps, skipped, first, last = (float(each) for each in found.groups())
    assert steps + skipped == 80 and skipped > 0
    assert last < first / 3
