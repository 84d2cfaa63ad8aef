"""Each example runs as its own file says, and does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Two processes that share the machine with whatever else runs there.
DEADLINE_S = 300


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
def test_a_stock_model_learns_over_the_bus() -> None:
    pytest.importorskip("transformers", minversion="4.53")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "examples/grpo_transformers.py", "--steps", "50", "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "balanced: True" in lines[-2]
    first, last = (float(word) for word in lines[-1].split()[1:4:2])
    assert first < 0.3
    assert last > 0.5
