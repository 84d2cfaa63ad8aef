"""The table of bounds on how far workers are ahead: its smallest form trains, counts and writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Spawner

from bench.lead import BOUNDS, GROUP_SIZE, GROUPS_PER_BATCH

ROOT = Path(__file__).resolve().parents[2]
# Two interpreters that import torch, on a loaded machine.
DEADLINE_S = 200.0
STEPS = 2


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 20)
def test_it_trains_under_a_bound_and_counts_what_the_bound_did(
    spawn: Spawner, tmp_path: Path
) -> None:
    bound, output = "max_lead_versions=0", tmp_path / "lead.json"
    assert bound in BOUNDS
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    printed = spawn.module(
        "bench.lead", "--steps", STEPS, "--step-s", 0, "--only", bound, "--output", output,
        env={"PYTHONPATH": path},
    ).finish(DEADLINE_S)  # fmt: skip
    result = json.loads(output.read_text())
    assert result["steps"] == STEPS and [run["bound"] for run in result["runs"]] == [bound]
    [run] = result["runs"]
    assert run["committed"] >= STEPS * GROUPS_PER_BATCH * GROUP_SIZE
    assert run["stale_share"] == run["stale"] / run["committed"]
    # A group may begin under the version before; it is never two behind.
    assert run["stale"] == 0 and 0 <= run["mean_lag"] <= 1
    assert f"| `{bound}` | 0% |" in printed
