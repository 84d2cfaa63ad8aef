"""One reader beside many producers: what is said of made-up lines, and that real ones come."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import Spawner

from bench import cores

ROOT = Path(__file__).resolve().parents[2]


def line(producers: int, rate: float, *, busy: float = 0.5, views: bool = False) -> cores.Line:
    return cores.Line(
        producers=producers, batch=1, views=views, rate=rate, rates=(rate,), reader_busy=busy,
        reader_us=0.3, producers_us=0.8, kernel_us=0.0, switches=0.0, a_take=64.0,
    )  # fmt: skip


def test_the_rate_bends_where_twice_the_producers_bring_little_more() -> None:
    grows = [line(1, 1e6), line(2, 1.9e6), line(4, 3e6, busy=0.99), line(8, 3.1e6, busy=1.0)]
    assert "bends at 4 producers (3.00 M/s, its reader has no time left)" in cores.bend(grows)
    assert "best 3.10 M/s with 8" in cores.bend(grows)
    waits = [line(1, 1e6, busy=0.3), line(2, 1.1e6, busy=0.3)]
    assert "bends at 1 producers (1.00 M/s, its reader waits)" in cores.bend(waits)


def test_a_bus_that_was_filled_before_is_no_point_of_the_curve() -> None:
    assert cores.bend([line(0, 9e6)]) == ""
    assert "best 1.90 M/s with 2" in cores.bend([line(0, 9e6), line(1, 1e6), line(2, 1.9e6)])


def test_a_reader_is_measured_alone_and_beside_producers(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "cores.json"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    arguments = ("--tiny", "--runs", "1", "--producers", "2", "--output", output)
    printed = spawn.module("bench.cores", *arguments, env={"PYTHONPATH": path}).finish(110)
    lines = json.loads(output.read_text())["lines"]
    points = [(one["producers"], one["batch"], one["views"]) for one in lines]
    beside = [(2, batch, views) for batch in (1, 64) for views in (False, True)]
    assert points == [(0, 64, False), (0, 64, True), *beside]
    assert "(filled)" in printed
    for one in lines:
        assert one["rate"] > 0 and one["reader_us"] > 0 and one["producers_us"] > 0
