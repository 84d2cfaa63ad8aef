"""The quick form of `bench.megabytes`: real processes, and no figure is asserted to be good."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import Spawner

from bench.row import Row

ROOT = Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
DEADLINE_S = 150.0


def test_samples_come_to_a_packed_batch_by_each_way(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    arms = ["files", "zmq", "mmap", "transfer-queue", "shmbus"]
    child = spawn.module(
        "bench.megabytes", "--quick", "--arms", *arms, "--output", output, env=PATH
    )
    child.finish(DEADLINE_S)
    rows = {row["name"]: Row.from_json(row) for row in json.loads(output.read_text())["rows"]}
    assert sorted(rows) == sorted(f"megabytes-{arm}" for arm in arms)
    for name, row in rows.items():
        if row.skipped:
            assert (
                name in ("megabytes-zmq", "megabytes-transfer-queue")
                and "there is no" in row.skipped
            )
        else:
            assert row.value and row.beside and "event loops" in row.note, row
    assert not [path for path in Path("/dev/shm").iterdir() if f"-{child.pid}-" in path.name]


WITH_A_FAILURE = """
import sys
from bench import megabytes

def full(setup):
    raise OSError("no room")

if __name__ == "__main__":
    megabytes.ARMS["files"].made = full
    arguments = ["--quick", "--arms", "files", "shmbus", "--output", sys.argv[1]]
    sys.exit(megabytes.main(arguments))
"""


def test_a_way_that_fails_is_said_and_the_others_go_on(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    child = spawn.script(WITH_A_FAILURE, output, env=PATH)
    child.finish(DEADLINE_S)
    rows = [Row.from_json(row) for row in json.loads(output.read_text())["rows"]]
    said = {row.name: row.skipped for row in rows}
    assert said == {"megabytes-files": "it failed: no room", "megabytes-shmbus": ""}
