"""Programs for machines with many cores: what is said of made-up lines, and that real ones come."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import Spawner

from bench import ranks, threads

ROOT = Path(__file__).resolve().parents[2]


ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
}


def run(spawn: Spawner, program: str, *arguments: object) -> str:
    return spawn.module(program, *arguments, env=ENVIRONMENT).finish(110)


def line(count: int, rate: float, *, of_one: float, memcpy: float = 100.0) -> threads.Line:
    return threads.Line(
        threads=count, tokens=65_536, gb_per_s=rate, turns=(rate,), batch_us=1.0, of_one=of_one,
        memcpy_gb_per_s=memcpy,
    )  # fmt: skip


def test_targets_of_threads_are_judged_by_the_best_of_each() -> None:
    good = [
        line(1, 20.0, of_one=1.0, memcpy=30.0),
        line(4, 61.0, of_one=3.05),
        line(8, 75.0, of_one=3.7),
    ]
    said = threads.judged(good)
    assert "four threads 3.05 times one (met: 3)" in said
    assert "at its best, with 8, 75.0 GB/s, 0.75 of memcpy's best 100.0 (met: 0.7)" in said
    slow = threads.judged([line(1, 20.0, of_one=1.0), line(4, 50.0, of_one=2.5)])
    assert "2.50 times one (not met: 3)" in slow and "0.50 of memcpy's best" in slow
    assert "(not met: 0.7)" in slow
    # A machine of two cores has no four threads to speak of.
    assert "four" not in threads.judged([line(1, 20.0, of_one=1.0)])


def test_packing_is_measured_beside_memcpy(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "threads.json"
    arguments = ("--tiny", "--capacity", "64MiB", "--threads", 2, "--output", output)
    printed = run(spawn, "bench.threads", *arguments)
    lines = json.loads(output.read_text())["lines"]
    # One is always among them: the others are set beside it.
    assert [one["threads"] for one in lines] == [1, 2][: os.cpu_count()]
    # Whether a target is met is not said of figures that mean nothing.
    assert "NOTE: --tiny" in printed and "met" not in printed
    for one in lines:
        assert one["gb_per_s"] > 0 and one["memcpy_gb_per_s"] > 0 and one["batch_us"] > 0
    assert lines[0]["of_one"] == 1.0


def test_ranks_are_measured_beside_one(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "ranks.json"
    options = ("--ranks", "2", "--prefetch", "1", "--capacity", "64MiB")
    printed = run(spawn, "bench.ranks", "--tiny", *options, "--output", output)
    lines = json.loads(output.read_text())["lines"]
    assert [(one["ranks"], one["prefetch"]) for one in lines] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert lines[0]["of_one"] == 1.0
    for one in lines:
        assert one["rate"] > 0 and one["rank_busy"] > 0 and one["daemon_busy"] > 0
    if (os.cpu_count() or 1) < 5:
        assert "NOTE: 2 ranks, as many producers and a daemon share" in printed


def test_what_cannot_be_measured_is_refused_before_anything_runs(spawn: Spawner) -> None:
    for program in ("bench.threads", "bench.ranks"):
        child = spawn.module(program, "--tiny", "--capacity", "60TiB", env=ENVIRONMENT)
        assert child.wait() == 1
        assert "cannot be measured here" in child.output()
        assert "--capacity" in child.output()


def test_a_ring_that_holds_no_batch_is_refused(spawn: Spawner) -> None:
    child = spawn.module("bench.threads", "--tiny", "--capacity", "64KiB", env=ENVIRONMENT)
    assert child.wait() == 1
    assert "--capacity: expected one that holds a batch of 65,536 tokens" in child.output()


def test_the_table_of_ranks_has_a_line_each() -> None:
    lines = [
        ranks.Line(
            ranks=count, prefetch=0, rate=1e5 * count, rates=(1e5 * count,), of_one=float(count),
            rank_busy=0.9, daemon_busy=0.2, producer_busy=0.5,
        )
        for count in (1, 8)
    ]  # fmt: skip
    told = ranks.table(lines).splitlines()
    assert len(told) == 3 and "800,000" in told[2] and "8.00" in told[2]
