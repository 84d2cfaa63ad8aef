"""Large payloads beside iceoryx2: what is asked at each point, and that real runs come."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Spawner

from bench import large
from bench.workload import PAYLOADS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("point", large.points(list(PAYLOADS), large.GROUPS), ids=lambda p: p.name)
def test_a_run_has_whole_groups_behind_a_first_write_of_every_place(point: large.Point) -> None:
    workload = point.workload(1.0)
    assert workload.trajectories % point.group_size == 0
    assert workload.warm_up >= workload.room
    assert workload.trajectories - workload.warm_up >= workload.room + point.group_size
    # A record may take a quarter of a bus, and two groups fit.
    assert workload.room >= max(4, 2 * point.group_size)
    assert workload.keep and workload.group_size == point.group_size


def test_a_point_is_judged_by_whether_a_cache_holds_what_is_alive() -> None:
    point = large.Point("1 MiB", 8)
    assert str(point.target(9 << 20)) == "at least 1 of iceoryx2"
    assert str(point.target((9 << 20) - 1)) == "at least 0.91 of iceoryx2"


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    assert large.last_level_cache(tmp_path) == 0
    for index, size in enumerate(("48K", "2048K", "480M", "64K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert large.last_level_cache(tmp_path) == 480 << 20


def test_both_take_turns_beside_their_bound(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "large.json"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    arguments = ("--tiny", "--payload", "64 KiB", "--group", "8", "--output", output)
    printed = spawn.module("bench.large", *arguments, env={"PYTHONPATH": path}).finish(110)
    (row,) = json.loads(output.read_text())["rows"]
    assert row["name"] == "64 KiB, groups of 8" and row["title"] in printed
    assert row["bound"]["name"].startswith("copies of 64 KiB over 576 KiB")
    figures = row["figures"]
    assert len(figures["gb_per_s"]) == 1 and figures["gb_per_s"][0] > 0
    assert len(figures["iceoryx2_gb_per_s"]) == 1 or "no iceoryx2: " in row["measured"]
