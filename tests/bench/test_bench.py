"""The benchmark runs, measures every row, and judges by what it measured; no time is asserted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner

from bench import machine
from bench.rows import throughput
from bench.rows.row import Row, Target, table
from bench.sizes import TINY
from bench.workload import GROUP_SIZE, Timed, Workload

ROOT = Path(__file__).resolve().parents[2]
# Longer than a loaded machine needs to start two dozen interpreters, some of which import torch.
DEADLINE_S = 110.0

ROWS = [
    "memcpy",
    "hop-2048",
    "hop-2048-cold",
    "hop-16384",
    "hop-16384-cold",
    "hop-256",
    "packed",
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
    "daemon-leases",
    "daemon-idle",
]


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
        assert (row["met"] is None) == (row["target"] is None or row["value"] is None)
    wanted = {"python", "numpy", "torch", "shmbus", "kernel", "cpu", "date_utc", "commit"}
    assert wanted | {"load_average", "cores"} <= set(result["machine"])
    assert result["settings"]["capacity"] == "64MiB"


def test_only_one_row_brings_what_it_is_compared_with(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    run(spawn, "--tiny", "--only", "four-producers", "--capacity", "8MiB", "--output", output)
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    assert [row["name"] for row in rows] == ["memcpy", "hop-2048", "four-producers"]
    assert {row["figures"].get("capacity", "8MiB") for row in rows} == {"8MiB"}
    one, four = (row["figures"]["trajectories_per_s"] for row in rows[1:])
    assert rows[2]["value"] == pytest.approx(four / one)


def test_a_row_at_memory_says_its_bound_from_what_two_cores_move() -> None:
    (case,) = [one for one in throughput.cases(TINY, "8MiB") if one.name == "packed"]
    timed = Timed(trajectories=1000, seconds=0.01, consumer_cpu_s=0.0, producer_cpu_s=0.0)
    runs = {"packed": [timed]}
    (row,) = throughput.rows([case], runs, 10e9, 2048 * 52 * 200_000.0)
    assert row.figures["moved_bytes_per_trajectory"] == 2048 * (9 + 9 + 9 + 25)
    assert row.figures["bound_trajectories_per_s"] == pytest.approx(200_000)
    assert row.figures["of_bound"] == pytest.approx(0.5)
    assert "0.50 of its bound, 200,000" in row.measured
    (row,) = throughput.rows([case], runs, 10e9, None)
    assert "bound" not in row.measured and "of_bound" not in row.figures


def test_a_bad_command_line_is_refused_before_anything_is_measured(spawn: Spawner) -> None:
    env = {"PYTHONPATH": str(ROOT)}
    for args in (["--only", "nothing"], ["--output", "no/such/place.json"], ["--capacity", "x"]):
        child = spawn.module("bench.run", *args, env=env)
        assert child.wait() == 2
        assert args[0] in child.output()
        assert "measuring" not in child.output()


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
