"""The quick form of `bench.draft`: every arm trains on the same steps, whatever carries them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Spawner

from bench.row import Row

ROOT = Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
DEADLINE_S = 150.0


def test_every_arm_has_the_same_losses(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    arms = "alternating,channel,files,nccl"
    child = spawn.module("bench.draft", "--tiny", "--arms", arms, "--output", output, env=PATH)
    child.finish(DEADLINE_S)
    rows = [Row.from_json(row) for row in json.loads(output.read_text())["rows"]]
    assert len(rows) == 4
    assert not any(row.skipped for row in rows), rows
    for row in rows:
        assert row.figures["losses"] == pytest.approx(rows[0].figures["losses"], rel=1e-3)
    assert not [path for path in Path("/dev/shm").iterdir() if f"-{child.pid}-" in path.name]
