"""A death and a stop at every named point: core, daemon, ranks, snapshot, pool and channel."""

import json
import os
import re
from pathlib import Path
from types import ModuleType

import channel_points
import pool_points
import pytest
from conftest import Spawner

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
#: "all" also tests later passes of the daemon's points: after wraps, in the middle of a step.
PASSES = os.environ.get("SHMBUS_TEST_POINTS", "first")


#: The program, what it is asked for, and how many cases it has at the least.
RUNS: dict[str, list[tuple[tuple[str, ...], int]]] = {
    "failpoints": [((f"{kind}:",), 14) for kind in ("producer", "collector", "mover", "partial")],
    "retry_points": [(("collector:",), 14), (("producer:",), 14)],
    "group_points": [((), 14)],
    "relay_points": [((), 14)],
    "answer_points": [(("here:",), 14), (("relayed:",), 14)],
    "daemon_points": [
        ((f"{kind}:", PASSES), 4)
        for kind in ("daemon", "successor", "late_rank", "broken_rank", "rank", "snapshot")
    ],
    "pool_points": [((f"{kind}:",), 2 * len(of)) for kind, of in pool_points.POINTS.items()],
    "channel_points": [((f"{kind}:",), 2 * len(of)) for kind, of in channel_points.POINTS.items()],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "arguments", "cases"),
    [
        pytest.param(program, *run, id=" ".join([program, *run[0][:1]]))
        for program, runs in RUNS.items()
        for run in runs
    ],
)
def test_a_death_or_a_stop_at_any_point_loses_doubles_and_tears_nothing(
    program: str,
    arguments: tuple[str, ...],
    cases: int,
    bus_name: str,
    spawn: Spawner,
    failpoint_build: Path,
) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(failpoint_build), str(HERE), str(HERE.parent)])}
    child = spawn.module(program, bus_name, *arguments, env=env, fresh=True)
    reports = [json.loads(line) for line in child.finish(timeout=280).splitlines()]
    assert len(reports) >= cases
    assert [r for r in reports if r["faults"] or not r["signalled"]] == []


@pytest.mark.parametrize("program", [pool_points, channel_points])
def test_every_point_of_pool_and_channel_is_passed_by_some_child(program: ModuleType) -> None:
    room = program.__name__.removesuffix("_points")
    sources = (ROOT / "shmbus_ext" / room).glob("*.c")
    points = {
        name for path in sources for name in re.findall(r'FAILPOINT\("(.*?)"\)', path.read_text())
    }
    assert points == {point for points in program.POINTS.values() for point in points}


def test_the_shipping_build_has_no_failpoints() -> None:
    from shmbus_ext import _core

    assert b"SHMBUS_FAILPOINT" not in Path(_core.__file__).read_bytes()
