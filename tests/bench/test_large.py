"""Large payloads beside iceoryx2: what is asked at each point, and that real runs come."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner

from bench import large
from bench.report import blocks, verdicts
from bench.rows.row import Row
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


def measured(point: large.Point, ratio: float) -> Row:
    target = point.target(1 << 30)
    return Row(name=point.name, title=point.name, measured="some", value=ratio, target=target)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace what takes time: each point has a ratio of its own, on this machine."""
    ratios = {point.name: 1.0 + i for i, point in enumerate(large.points(list(PAYLOADS), (1, 8)))}
    monkeypatch.setattr(large, "_measure", lambda point, *_: measured(point, ratios[point.name]))
    monkeypatch.setattr(large.fitness, "why_not", lambda *_: "")
    return ratios


def test_points_are_added_to_the_file_of_a_machine(here: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "large.json"
    for arguments in (("4 MiB", "8"), ("64 KiB", "8"), ("64 KiB", "1"), ("4 MiB", "8")):
        asked = ["--payload", arguments[0], "--group", arguments[1]]
        assert large.main([*asked, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    names = ["64 KiB, groups of 1", "64 KiB, groups of 8", "4 MiB, groups of 8"]
    assert [row["name"] for row in rows] == names
    assert [row["value"] for row in rows] == [here[name] for name in names]
    assert all(row["date_utc"] for row in rows)


def test_points_of_two_machines_or_of_tiny_are_not_mixed(
    here: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "large.json"
    asked = ["--payload", "64 KiB", "--group", "8", "--output", str(output)]
    assert large.main(asked) == 0
    found = json.loads(output.read_text())
    found["machine"]["cpu"] = "another"
    output.write_text(json.dumps(found))
    for more, said in (([], "'another'"), (["--tiny"], "--tiny")):
        with pytest.raises(SystemExit) as refused:
            large.main([*asked, *more])
        assert refused.value.code == 2 and said in capsys.readouterr().err
    assert json.loads(output.read_text()) == found


def test_a_page_shows_the_points_of_every_machine(here: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{blocks.BEGIN.format('large')}\nobsolete\n{blocks.END}\n")
    result: dict[str, Any] = {}
    (tmp_path / "results" / "one").mkdir(parents=True)
    blocks.replace_blocks(result, tmp_path / "results" / "one", page)
    assert "Not measured yet" in page.read_text() and "obsolete" not in page.read_text()
    for machine in ("one", "two"):
        (tmp_path / "results" / machine).mkdir(exist_ok=True)
        output = tmp_path / "results" / machine / blocks.LARGE_FILE
        assert large.main(["--payload", "64 KiB", "--group", "8", "--output", str(output)]) == 0
    blocks.replace_blocks(result, tmp_path / "results" / "one", page)
    text = page.read_text()
    assert all(f"(results/{machine}/large.json)" in text for machine in ("one", "two"))
    assert text.count("| 64 KiB, groups of 8 | some |") == 2 and "Not measured" not in text


def test_a_row_beside_iceoryx2_says_what_either_reader_spent() -> None:
    def point(contender: str, rate: float, consumer_cpu_s: float) -> dict[str, Any]:
        one = {"contender": contender, "point": "an image, groups of 1", "trajectories": 1000}
        return one | {"rate": rate, "consumer_cpu_s": consumer_cpu_s}

    series: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("size", "latency", "producers", "capacity", "survival")
    }
    series["kind"] = [point("shmbus", 4000.0, 0.017), point("iceoryx2", 5000.0, 0.24)]
    titles = {"shmbus": {"title": "ours"}, "iceoryx2": {"title": "theirs", "skipped": ""}}
    (row,) = verdicts.rows({**series, "contenders": titles}, (12.0, 12.0))
    assert row.name == "large-image-1" and row.value == 0.8
    assert row.measured.endswith("the reader's processor time 17 us, there 240 us")
