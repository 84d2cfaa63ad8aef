"""A death and a stop at every named point of the core, the daemon, its ranks and a snapshot."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import IS_WORKER, Spawner

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
#: "all" also tests later passes of the daemon's points: after wraps, in the middle of a step.
PASSES = os.environ.get("SHMBUS_TEST_POINTS", "first")


@pytest.fixture(scope="session")
def failpoint_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a tree whose extension has the points compiled in, once for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    tree = (base.parent if IS_WORKER else base) / "failpoints"
    with tree.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            half_done = tree.with_suffix(".new")
            _build(half_done)
            half_done.rename(tree)
    return tree


def _build(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT / "shmbus", tree / "shmbus")
    (tree / "shmbus_ext").mkdir()
    for path in (ROOT / "shmbus_ext").glob("*.py*"):
        shutil.copy(path, tree / "shmbus_ext")
    argv = [sys.executable, "setup.py", "--quiet", "build_ext"]
    argv += ["--build-lib", str(tree), "--build-temp", str(tree / "objects")]
    env = {**os.environ, "SHMBUS_FAILPOINTS": "1", "SHMBUS_SANITIZE": ""}
    subprocess.run(argv, cwd=ROOT, env=env, check=True, capture_output=True, timeout=110)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("failpoints", "producer"),
        ("failpoints", "collector"),
        ("failpoints", "mover"),
        ("failpoints", "partial"),
        ("retry_points", "collector"),
        ("retry_points", "producer"),
        ("group_points", "whole"),
        ("relay_points", "whole"),
    ],
)
def test_a_death_or_a_stop_at_any_point_loses_doubles_and_tears_nothing(
    module: str, kind: str, bus_name: str, spawn: Spawner, failpoint_build: Path
) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(failpoint_build), str(HERE), str(HERE.parent)])}
    child = spawn.module(module, bus_name, f"{kind}:", env=env)
    reports = [json.loads(line) for line in child.finish(timeout=200).splitlines()]
    assert len(reports) >= 14
    assert [r for r in reports if r["faults"] or not r["signalled"]] == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "kind", ["daemon", "successor", "late_rank", "broken_rank", "rank", "snapshot"]
)
def test_a_death_or_a_stop_in_the_daemon_or_a_rank_loses_and_doubles_no_group(
    kind: str, bus_name: str, spawn: Spawner, failpoint_build: Path
) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(failpoint_build), str(HERE), str(HERE.parent)])}
    child = spawn.module("daemon_points", bus_name, f"{kind}:", PASSES, env=env)
    reports = [json.loads(line) for line in child.finish(timeout=200).splitlines()]
    assert len(reports) >= 4
    assert [r for r in reports if r["faults"] or not r["signalled"]] == []


def test_the_shipping_build_has_no_failpoints() -> None:
    from shmbus_ext import _core

    assert b"SHMBUS_FAILPOINT" not in Path(_core.__file__).read_bytes()
