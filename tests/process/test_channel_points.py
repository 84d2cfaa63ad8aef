"""Deaths and stops at each failpoint of a channel's sender and receiver."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import channel_points
import pytest
from conftest import Spawner
from test_failpoints import HERE, ROOT
from test_failpoints import failpoint_build as failpoint_build


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", sorted(channel_points.POINTS))
def test_a_death_or_a_stop_at_any_point_loses_and_repeats_no_step(
    kind: str, bus_name: str, spawn: Spawner, failpoint_build: Path
) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(failpoint_build), str(HERE)])}
    child = spawn.module("channel_points", bus_name, f"{kind}:", env=env)
    reports = [json.loads(line) for line in child.finish(timeout=280).splitlines()]
    assert len(reports) >= 2 * len(channel_points.POINTS[kind])
    assert [r for r in reports if r["faults"] or not r["signalled"]] == []


def test_every_point_of_the_channel_is_passed_by_some_child() -> None:
    sources = (ROOT / "shmbus_ext" / "channel").glob("*.c")
    points = {
        name for path in sources for name in re.findall(r'FAILPOINT\("(.*?)"\)', path.read_text())
    }
    assert points == {point for points in channel_points.POINTS.values() for point in points}
