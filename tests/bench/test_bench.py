"""The benchmark runs, measures every row, and judges by what it measured; no time is asserted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Spawner

from bench import machine, processes
from bench import run as bench_run
from bench.failures import MeasurementError
from bench.rows import curves, stash, throughput, wake
from bench.rows.row import Row, table
from bench.rows.targets import TARGETS, Target
from bench.sizes import TINY
from bench.workload import GROUP_SIZE, Timed, Workload
from bench.yardsticks import BOTH_CORES, COLUMNS, MEMCPY, Yardstick

ROOT = Path(__file__).resolve().parents[2]
# Longer than a loaded machine needs to start two dozen interpreters, some of which import torch.
DEADLINE_S = 200.0
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)

ROWS = [
    "memcpy",
    "hop-2048",
    "hop-2048-cold",
    "hop-16384",
    "hop-16384-cold",
    "hop-256",
    "packed",
    "packed-of-bound",
    "packed-of-one-core",
    "packed-cold",
    "four-producers",
    "wake-p50",
    "wake-p99",
    "wake-added-p99",
    "wake-loaded-p99",
    "polled-p50",
    "polled-published-p50",
    "polled-awake-p50",
    "lists-sample",
    "lists-ids",
    "lists-schema",
    "requests",
    "stash-by-age",
    "stash-scrambled",
    "stash-memory",
    "idle",
    "daemon-packed",
    "daemon-cpu",
    "daemon-payload",
    "daemon-wake",
    "daemon-polled",
    "daemon-leases",
    "daemon-idle",
]


def program_of_a_role(start: Callable[[], None]) -> str | None:
    start()
    return sys.modules["__main__"].__dict__.get("__file__")


def run(spawn: Spawner, *args: object) -> str:
    """Run the benchmark as a user does, from any directory; return what it printed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return spawn.module("bench.run", *args, env={"PYTHONPATH": path}).finish(DEADLINE_S)


@pytest.mark.slow
def test_one_run_measures_every_row_and_writes_all_of_them(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    printed = run(spawn, "--tiny", "--output", output)
    result = json.loads(output.read_text())
    assert [row["name"] for row in result["rows"]] == ROWS
    for row in result["rows"]:
        assert row["title"] in printed
        assert row["skipped"] or row["figures"]
        judged = row["target"] and row["value"] is not None and not row["not_quiet"]
        assert (row["met"] is None) == (not judged)
        # Bytes of memory are counted, not timed; a daemon may have slept through.
        bounded = row["name"] not in ("memcpy", "stash-memory", "daemon-idle", "idle")
        assert row["bound"] or not bounded or row["skipped"]
    wanted = {"python", "numpy", "torch", "shmbus", "kernel", "cpu", "date_utc", "commit"}
    assert wanted | {"load_average", "cores"} <= set(result["machine"])
    assert result["settings"]["capacity"] == "64MiB"


def test_only_one_row_brings_what_it_is_compared_with(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    run(spawn, "--tiny", "--only", "four-producers", "--capacity", "8MiB", "--output", output)
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    assert [row["name"] for row in rows] == ["four-producers"]
    assert rows[0]["figures"]["capacity"] == "8MiB"
    bound = rows[0]["bound"]
    assert bound["name"] == "one producer" and len(bound["bounds"][0]) == 2
    four = rows[0]["figures"]["trajectories_per_s"]
    assert rows[0]["value"] == pytest.approx(four / statistics.mean(bound["bounds"][0]))


def test_a_row_at_memory_says_its_bound_from_what_two_cores_move() -> None:
    (case,) = [one for one in throughput.cases(TINY, "8MiB") if one.name == "packed"]
    timed = Timed(trajectories=1000, seconds=0.01, consumer_cpu_s=0.0, producer_cpu_s=0.0)
    moved_gb_per_s = 2048 * (9 + 9 + 9 + 25) * 200_000 / 1e9
    packing_gb_per_s = 2048 * (9 + 25) * 125_000 / 1e9
    around = {
        MEMCPY: (10.0, 10.0),
        BOTH_CORES: (moved_gb_per_s, moved_gb_per_s),
        COLUMNS: (packing_gb_per_s, packing_gb_per_s),
    }
    runs = throughput.Runs(timed=[timed] * 3, around=[around] * 3, others=[0.0] * 3)
    row, of_bound, of_one_core = throughput.rows([case], {"packed": runs})
    assert row.bound and row.bound.shares == pytest.approx([0.5] * 3)
    assert row.value == pytest.approx(100_000 * 2048 * 25 / 10e9)
    assert row.met is False
    # Where two cores move no more than that, packing comes to 1.02 of memcpy at most.
    assert row.best == pytest.approx(200_000 * 2048 * 25 / 10e9) and "1.02" in row.out_of_reach
    assert of_bound.name == "packed-of-bound" and of_bound.value == pytest.approx(0.5)
    assert of_bound.met is False and of_bound.best == pytest.approx(1.0)
    # What one core does without a bus judges nothing: a second core may pack too.
    assert of_one_core.name == "packed-of-one-core" and of_one_core.target is None
    assert of_one_core.value == pytest.approx(0.8) and of_one_core.bound
    assert of_one_core.bound.bound == COLUMNS


def test_the_p99_of_wake_ups_is_that_of_blocks_so_that_a_stall_spoils_one_of_them() -> None:
    turn = np.full(4 * wake.BLOCK, 20_000, np.int64)
    turn[10 : 10 + wake.BLOCK // 4] = 90_000_000
    assert wake.blocks(turn) == [90_000.0, 20.0, 20.0, 20.0]
    # A turn that is shorter than a block is one.
    assert wake.blocks(turn[-7:]) == [20.0]


def test_a_row_takes_its_target_from_the_one_list_of_them() -> None:
    for directory in ("rows", "report"):
        for path in sorted((ROOT / "bench" / directory).glob("*.py")):
            if path.name != "targets.py":
                assert "Target(" not in path.read_text(), path
    without = {"memcpy", "stash-memory", "packed-of-one-core", "packed-cold"}
    assert set(ROWS) - without <= set(TARGETS)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("hop-2048-cold", "at least 0.85 of memcpy"),
        ("hop-16384-cold", "at least 0.85 of memcpy"),
        ("packed", "at least 1.1 of memcpy"),
        ("packed-of-bound", "at least 0.85 of its bound"),
        ("four-producers", "at least 0.9 of one producer"),
        ("wake-p99", "at most 10 us more"),
        ("wake-loaded-p99", "at most 10 us more"),
        ("polled-awake-p50", "at most 2 us"),
        ("daemon-packed", "at least 0.9 of embedded"),
        ("daemon-wake", "at most 25 us"),
        ("daemon-polled", "at most 8 us"),
        ("daemon-leases", "at least 100000 groups/s"),
        ("large-image-1", "at least 1 of iceoryx2"),
        ("large-image-8", "at least 0.91 of iceoryx2"),
    ],
)
def test_a_target_is_what_was_decided_and_not_what_was_measured(name: str, target: str) -> None:
    assert str(TARGETS[name]) == target


def test_a_case_has_further_runs_until_it_is_narrow_or_time_is_over() -> None:
    sizes = dataclasses.replace(TINY, repetitions=2, most_repetitions=6, rows_s=10.0)

    def rounds(rates: list[float], clock: Callable[[], float]) -> int:
        left = iter(rates)

        def measure(_: Workload) -> Timed:
            seconds = 1000 / next(left)
            return Timed(trajectories=1000, seconds=seconds, consumer_cpu_s=0, producer_cpu_s=0)

        case = throughput.Case(
            name="made-up",
            title="made up",
            measure=measure,
            workload=Workload(trajectories=8, tokens=1),
            reference=throughput.Against(Yardstick(MEMCPY, lambda: 10.0), 1.0),
        )
        return len(throughput.repeat([case], sizes, lambda _: None, clock)["made-up"].timed)

    still = itertools.repeat(0.0).__next__
    assert rounds([5.0, 5.1], still) == 2
    assert rounds([5.0, 6.0, 4.0, 7.0, 5.0, 5.5], still) == 6
    assert rounds([5.0, 6.0, 4.0], itertools.count(0.0, 5.0).__next__) == 3


def test_a_yardstick_behind_one_run_stands_before_the_next_and_no_run_between_is_shared() -> None:
    asked: list[str] = []

    def measure(what: str) -> Callable[..., Any]:
        def run(*_: object) -> Any:
            asked.append(what)
            timed = Timed(trajectories=8, seconds=1.0, consumer_cpu_s=0, producer_cpu_s=0)
            return 10.0 if what == "memcpy" else timed

        return run

    cases = [
        throughput.Case(
            name=name,
            title=name,
            measure=measure(name),
            workload=Workload(trajectories=8, tokens=1),
            reference=throughput.Against(Yardstick(MEMCPY, measure("memcpy")), 1.0),
        )
        for name in ("a", "b")
    ]
    throughput.repeat(cases, TINY, lambda _: None)
    assert asked == ["memcpy", "a", "memcpy", "b", "memcpy"]


def end_by(start: Callable[[], None], number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "number, says",
    [(signal.SIGBUS, "of SIGBUS, as where /dev/shm has no"), (signal.SIGKILL, "of SIGKILL")],
)
def test_a_process_that_dies_is_told_with_its_signal(number: int, says: str) -> None:
    with pytest.raises(MeasurementError, match=f"end_by failed: it died without a word, {says}"):
        processes.run_alone(end_by, number)


def test_a_process_imports_what_its_role_needs_and_not_the_program_that_began_it() -> None:
    main = sys.modules["__main__"]
    before = main.__spec__, main.__dict__.get("__file__")
    assert processes.run_together([processes.Role(program_of_a_role)]) == [None]
    assert (main.__spec__, main.__dict__.get("__file__")) == before
    theirs = type("Theirs", (), {"__module__": "__main__"})()
    nested = processes.Role(print, (processes.Role(print, (theirs,)),))
    assert processes._of_program(nested)
    assert not processes._of_program(processes.Role(print, (1, "a", Workload)))


def test_the_curve_of_open_groups_does_not_measure_again_what_a_row_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    def measure(groups: tuple[int, int], adds: int) -> list[Row]:
        asked.append(groups)
        return made(groups)

    def made(groups: tuple[int, int]) -> list[Row]:
        figures = {"groups": groups, "few": {"ns": 100.0}, "many": {"ns": float(groups[1])}}
        names = ("stash-by-age", "stash-scrambled")
        return [Row(name=name, title="t", measured="m", figures=figures) for name in names]

    monkeypatch.setattr(stash, "measure", measure)
    found = curves.open_groups((10, 100, 1000), 1, lambda _: None, made((10, 1000)))
    assert asked == [(10, 100)]
    assert [one["ns"] for one in found if one["order"] == "by-age"] == [100.0, 100.0, 1000.0]


def test_a_bad_command_line_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    for args in (["--only", "nothing"], ["--output", "no/such/place.json"], ["--capacity", "x"]):
        with pytest.raises(SystemExit) as refused:
            bench_run.main(args)
        said = capsys.readouterr()
        assert refused.value.code == 2
        assert args[0] in said.err and "measuring" not in said.err
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("sense", "value", "met"),
    [
        ("at least", 0.9, True),
        ("at least", 0.89, False),
        ("at most", 0.9, True),
        ("at most", 0.91, False),
        ("at least", None, None),
    ],
)
def test_a_verdict_follows_from_the_measured_value(
    sense: Any, value: float | None, met: bool | None
) -> None:
    row = Row(name="n", title="t", measured="m", value=value, target=Target(sense, 0.9, "of it"))
    assert row.met is met
    assert row.verdict == {True: "met", False: "NOT met", None: ""}[met]
    assert row.as_json()["met"] is met
    assert f"{sense} 0.9 of it" in table([row])


def test_a_skipped_row_says_why() -> None:
    row = Row(name="n", title="t", measured="", skipped="no compiler")
    assert table([row]).endswith("skipped: no compiler")


def test_a_workload_sends_whole_groups_of_ids_that_are_its_producers_own() -> None:
    workload = Workload(trajectories=64, tokens=4, producers=2)
    sent = [[identity for identity, _ in workload.items(number)] for number in range(2)]
    assert [len(one) for one in sent] == [32, 32]
    assert not {i for i, _ in sent[0]} & {i for i, _ in sent[1]}
    assert [index for _, index in sent[0]] == list(range(GROUP_SIZE)) * 4
    assert len({identity for identity, _ in sent[0]}) == 4


def test_only_the_last_trajectory_of_a_producer_differs() -> None:
    for cold in (False, True):
        workload = Workload(trajectories=16, tokens=1 << 16, cold=cold)
        tokens = [int(source[0][0]) for _, source in workload.items(0)]
        assert tokens == [0] * 15 + [1]


def test_a_workload_that_leaves_a_group_incomplete_is_refused() -> None:
    with pytest.raises(AssertionError, match="no multiple"):
        Workload(trajectories=12, tokens=4)


def test_a_rate_counts_all_trajectories_of_the_span() -> None:
    timed = Timed(trajectories=100, seconds=4.0, consumer_cpu_s=1.0, producer_cpu_s=1.0)
    assert timed.rate == 25.0


def test_the_summary_says_when_the_machine_is_not_its_own() -> None:
    facts = machine.describe()
    assert "other work" not in machine.summary({**facts, "load_average": (0.1, 0.1, 0.1)})
    assert "other work" in machine.summary({**facts, "load_average": (2.0, 1.0, 0.5)})
    assert facts["python"] in machine.summary(facts)
