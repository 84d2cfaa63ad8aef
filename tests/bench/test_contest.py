"""The contest of the benchmark: real contenders, real processes, real kills; no time is asserted.

A contender that is not installed here is skipped by name. The two that start a cluster, and the
server of Atropos, run in environments of their own, which a test has not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import Spawner

from bench import instructions, native, processes, suite
from bench.contenders import MODULES, contenders, module
from bench.contest import child, environments, latency, moving, plan, survival
from bench.contest.run import run
from bench.failures import MeasurementError
from bench.report import blocks, report, verdicts
from bench.report.__main__ import main as report_main
from bench.workload import OPEN_GROUPS, Workload

ROOT = Path(__file__).resolve().parents[2]
LIGHT = [name for name, contender in contenders().items() if not contender.environment]


def installed(name: str) -> ModuleType:
    """The module of a contender, if it can run here."""
    found = module(name)
    try:
        environments.versions(found.CONTENDER)
    except MeasurementError as error:
        pytest.skip(f"{name}: {error}")
    return found


@pytest.fixture(autouse=True, scope="module")
def forked() -> Iterator[None]:
    """Fork the processes of measurements: no figure counts here, and imports take the longest."""
    before = os.environ.get(processes.TEMPLATE)
    processes.use_template("torch", "trainer_adapter", "bench.contest.child")
    processes._context.cache_clear()
    yield
    os.environ.pop(processes.TEMPLATE)
    if before is not None:
        os.environ[processes.TEMPLATE] = before
    processes._context.cache_clear()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes import the benchmark, from wherever the tests run."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


# --- the contenders


@pytest.mark.parametrize("name", MODULES)
def test_every_contender_has_both_ends_and_says_what_it_was_given(name: str) -> None:
    found = importlib.import_module(f"bench.contenders.{name}")
    for part in ("link", "sender", "receiver"):
        assert callable(getattr(found, part))
    about = found.CONTENDER
    assert about.packages and about.favour and about.copied
    assert about.copies >= 1 and about.per_second > 0
    assert about.environment in ("", *environments.ENVIRONMENTS)


def test_each_environment_has_a_list_of_what_it_needs_and_every_pin_is_in_the_constraints() -> None:
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for name in environments.ENVIRONMENTS:
        text = (ROOT / "bench" / "contenders" / "environments" / f"{name}.txt").read_text()
        wanted = {line for line in text.splitlines() if line and not line.startswith("#")}
        assert wanted <= pinned
        packages = [c.packages for c in contenders().values() if c.environment == name]
        assert {package for some in packages for package in some} <= wanted


@pytest.mark.parametrize("name", LIGHT)
def test_what_is_sent_arrives_whole_and_once(name: str) -> None:
    found = installed(name)
    workload = Workload(
        trajectories=64,
        tokens=100,
        producers=2,
        lengths="log-normal",
        arrival="scrambled",
        turns=2,
        side="top-k-logits",
        read=True,
        # So that a reader which begins late does not find all of them: one delivery has no rate.
        pause_s=0.01,
    )
    timed = moving.measure(found.__name__, workload)
    assert timed.trajectories == 64
    assert timed.seconds > 0


@pytest.mark.parametrize("name", LIGHT)
def test_a_batch_is_packed_of_whole_groups(name: str) -> None:
    found = installed(name)
    # More than any reader takes at once, however late it begins: one delivery has no rate.
    workload = Workload(trajectories=2048, tokens=2048, arrival="interleaved")
    assert moving.measure(found.__name__, workload, pack=True).trajectories == 2048


def test_packing_sorts_scrambled_samples_and_lays_them_out_one_behind_the_other() -> None:
    workload = Workload(trajectories=8, tokens=3, group_size=2)
    packing = moving.Packing(workload, lasting=False)
    made = {
        (key, i): (np.full(3, 10 * i + n), np.ones(3, np.uint8), np.full(3, -1.0, np.float32))
        for n, key in enumerate("ab")
        for i in range(2)
    }
    for key, index in (("a", 1), ("b", 0), ("a", 0), ("b", 1)):
        packing([(key, index, made[key, index])])
    assert packing.tokens.tolist() == [0] * 3 + [10] * 3 + [1] * 3 + [11] * 3
    assert packing.advantages[:3].tolist() == pytest.approx([-1.0] * 3, abs=1e-3)


def test_a_run_that_is_one_delivery_has_no_rate() -> None:
    # Nothing goes before the reader has the whole group, since it takes complete ones only.
    with pytest.raises(MeasurementError, match="all 8 came at once"):
        moving.measure("bench.contenders.shmbus_embedded", Workload(trajectories=8, tokens=8))


def test_latency_counts_every_probe_but_those_that_warm_up() -> None:
    measured = latency.measure("bench.contenders.mp_queue", 20, "sleeping", 200.0, "8MiB")
    assert measured.probes == 20
    assert list(measured.us) == sorted(measured.us)
    assert measured.percentile(50) > 0


def test_a_writer_killed_within_a_put_stops_nobody_and_harms_nothing() -> None:
    outcome = survival.measure("bench.contenders.shmbus_embedded", 3)
    assert outcome.goes_on, outcome
    assert (outcome.kills, outcome.lost, outcome.torn, outcome.doubled) == (3, 0, 0, 0)


# --- running them


def test_what_is_not_there_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHMBUS_CONTENDERS", str(tmp_path))
    found = run(["ray", "atropos"], plan.TINY, ["survival"], lambda _: None, 60.0)
    for name in ("ray", "atropos"):
        assert "make bench-contenders" in found["contenders"][name]["skipped"]
    result = {"contest": found, "rows": [], "memcpy_bytes_per_s": 1e10}
    assert "Ray, put and get: skipped" in report.contest_text(result)


def test_a_request_that_fails_says_why_and_the_next_one_is_answered() -> None:
    contender = contenders()["multiprocessing.Queue"]
    good = {"what": "throughput", "workload": {"trajectories": 16, "tokens": 8}}
    answers = environments.ask(contender, [{"what": "nonsense"}, good], 60.0, 0.0)
    assert "unknown request 'nonsense'" in answers[0]["failed"]
    assert answers[1]["trajectories"] == 16


def test_a_request_that_comes_to_no_end_is_given_up() -> None:
    contender = contenders()["multiprocessing.Queue"]
    endless = {"trajectories": 8, "tokens": 8, "pause_s": 3600.0}
    requests = [{"what": "throughput", "workload": endless}]
    (answer,) = environments.ask(contender, requests, 2.0, 1.0)
    assert answer == {"failed": "not done within 3 s"}


def test_a_request_that_has_stopped_is_given_up_and_the_next_one_is_answered() -> None:
    contender = contenders()["multiprocessing.Queue"]
    stopped = {"trajectories": 8, "tokens": 8, "pause_s": 3600.0}
    good = {"what": "throughput", "workload": {"trajectories": 16, "tokens": 8}}
    requests = [{"what": "throughput", "workload": stopped, "limit_s": 1.0}, good]
    answers = environments.ask(contender, requests, 60.0, 60.0)
    assert "not done within 1 s" in answers[0]["failed"]
    assert answers[1]["trajectories"] == 16


def test_every_request_has_a_limit_well_beyond_what_is_expected_of_it() -> None:
    for number, contender in enumerate(contenders().values()):
        for planned in plan.plan(contender, plan.FULL, number == 0):
            assert planned.limited["limit_s"] >= max(30.0, 6 * planned.expected_s)


def test_a_kind_is_asked_only_of_those_to_whom_it_is_another_workload() -> None:
    asked = {
        name: {one.point for one in plan.plan(about, plan.FULL, False) if one.series == "kind"}
        for name, about in contenders().items()
    }
    assert asked["shmbus"] == set(plan.KINDS)
    assert asked["iceoryx2"] >= plan.OF_LENDERS
    assert asked["pyzmq"] == set(plan.KINDS) - plan.OF_GROUPS - plan.OF_LENDERS
    # What is judged of large payloads is asked of both.
    assert set(verdicts.LARGE.values()) <= asked["shmbus"] & asked["iceoryx2"]


def test_only_what_no_target_is_about_has_shorter_runs() -> None:
    zmq = contenders()["pyzmq"]

    def trajectories(series: str, point: Any) -> int:
        (one,) = [
            one
            for one in [*plan.sizes(zmq, plan.FULL), *plan.plan(zmq, plan.FULL, False)]
            if (one.series, one.point) == (series, point)
        ]
        return int(one.request["workload"]["trajectories"])

    usual = trajectories("size", plan.USUAL)
    assert trajectories("watched", "") == pytest.approx(usual * 2 / 3, rel=0.01)


def test_the_last_round_of_sizes_leaves_out_what_agreed_before_but_for_what_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def ask(_: Any, requests: list[Any], *__: object) -> list[dict[str, Any]]:
        tokens = [one["workload"]["tokens"] for one in requests]
        asked.extend(tokens)
        # Those of 8,192 differ from round to round, the others by a hundredth.
        return [
            {"rate": 100.0 + asked.count(n) * (50 if n == 8192 else 1), "bytes_each": 1}
            for n in tokens
        ]

    monkeypatch.setattr(environments, "ask", ask)
    run(["pyzmq"], plan.FULL, ["size"], lambda _: None, 100.0)
    assert {n: asked.count(n) for n in plan.SIZES} == {256: 2, 2048: 3, 8192: 3, 32_768: 2}


def test_a_report_says_where_its_time_went_the_longest_first() -> None:
    rows = [{"title": "a", "took_s": 3.0}, {"title": "b", "took_s": 9.0}, {"title": "c"}]
    found = {"contenders": {"ray": {"title": "Ray"}}, "took_s": {"ray": 20.0}}
    text = report._took({"rows": rows, "contest": found, "took_s": 33.0})
    assert "33 seconds" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[2:] == ["| Ray, in the contest | 20 |", "| b | 9 |", "| a | 3 |"]
    assert report._took({"rows": rows, "contest": {}}) == ""


def test_a_share_that_is_over_is_said_and_nothing_is_begun_any_more() -> None:
    said: list[str] = []
    series = ["size", "latency"]
    found = run(["shmbus", "multiprocessing.Queue"], plan.TINY, series, said.append, 0.0)
    points = found["size"] + found["latency"]
    assert {one["contender"] for one in points} == {"shmbus", "multiprocessing.Queue"}
    assert all(child.NO_TURN in one["failed"] for one in points)
    assert "0 s at most" in said[0]
    result = {"contest": found, "rows": [], "memcpy_bytes_per_s": 1e10}
    assert child.NO_TURN in report.contest_text(result)


def test_a_turn_leaves_to_others_what_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def ask(_: Any, requests: list[Any], share_s: float, __: float) -> list[dict[str, Any]]:
        shares.append(share_s)
        return [{"failed": "at once"}] * len(requests)

    monkeypatch.setattr(environments, "ask", ask)
    names = ["shmbus", "multiprocessing.Queue"]
    run(names, plan.FULL, ["latency"], lambda _: None, 100.0)
    assert 0 < shares[0] < 60 < shares[1] <= 100


@pytest.mark.slow
def test_one_command_measures_and_writes_report_and_plots(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "report"
    arguments = ["--tiny", "--contender", "multiprocessing.Queue", "--output", output]
    for series in ("size", "producers", "capacity", "latency", "survival"):
        arguments += ["--series", series]
    printed = spawn.module("shmbus.cli", "bench", *arguments).finish(110.0)
    result = json.loads((output / "results.json").read_text())
    assert set(result["contest"]["contenders"]) == {"shmbus", "multiprocessing.Queue"}
    assert not [one for one in result["contest"]["size"] if "failed" in one]
    for name in ("report.md", "throughput.svg", "latency.svg", "scaling.svg"):
        assert (output / name).stat().st_size > 0
    assert "multiprocessing.Queue" in printed
    page = tmp_path / "README.md"
    page.write_text(
        "\n".join(f"{blocks.BEGIN.format(n)}\nobsolete\n{blocks.END}" for n in blocks.BLOCKS)
    )
    blocks.replace_blocks(result, output, page)
    assert "report/throughput.svg" in page.read_text() and "obsolete" not in page.read_text()


def test_a_report_replaces_the_blocks_that_a_page_has_marks_for(tmp_path: Path) -> None:
    directory = tmp_path / "report"
    directory.mkdir()
    shutil.copy(ROOT / "bench" / "results" / "two-cores" / "results.json", directory)
    marked = {
        name: f"{blocks.BEGIN.format(name)}\nobsolete\n{blocks.END}\n" for name in blocks.BLOCKS
    }
    pages = [tmp_path / "README.md", tmp_path / "TABLES.md"]
    pages[0].write_text(f"before\n{marked['short']}after\n")
    pages[1].write_text(f"before\n{marked['rows']}between\n{marked['contest']}after\n")
    assert report_main([str(directory), "--readme", *map(str, pages)]) == 0
    short, long = (page.read_text() for page in pages)
    for text in (short, long):
        assert text.startswith("before\n") and text.endswith("after\n") and "obsolete" not in text
        assert "report/throughput.svg" in text and "report/report.md" in text
    assert f"{blocks.END}\nbetween\n" in long
    assert "put to views, 2,048 tokens" in short and "put to views, 16,384 tokens" in long
    assert "Redis streams" in long and "Redis streams" not in short
    measured = [line for line in short.splitlines() if line.startswith("| ")][2:]
    assert len(measured) == len(blocks.SHORT_ROWS) <= 8


def test_a_page_without_marks_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    results = ROOT / "bench" / "results" / "two-cores" / "results.json"
    page = tmp_path / "README.md"
    for text in ("no mark\n", f"{blocks.BEGIN.format('short')}\nobsolete\n"):
        page.write_text(text)
        with pytest.raises(SystemExit, match="expected the line"):
            blocks.replace_blocks(json.loads(results.read_text()), tmp_path, page)
        assert page.read_text() == text


@pytest.mark.parametrize("page", ["README.md", "bench/README.md"])
def test_the_figures_of_a_page_are_those_of_the_run_that_is_kept(page: str, tmp_path: Path) -> None:
    directory = ROOT / "bench" / "results" / "two-cores"
    copy = ROOT / page
    found = re.findall(
        r"<!-- bench (\w+): .*?-->\n(.*?)<!-- bench: end -->", copy.read_text(), re.S
    )
    assert found
    result = json.loads((directory / "results.json").read_text())
    where = os.path.relpath(directory, copy.parent)
    for name, text in found:
        assert text == f"{blocks.block(name, result, directory, where)}\n"


def test_a_bad_command_line_is_refused_before_anything_is_measured(
    spawn: Spawner, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--series", "nothing"], ["--contender", "x"], ["--quick", "--full"]):
        with pytest.raises(SystemExit) as refused:
            suite.main(arguments)
        said = capsys.readouterr()
        assert refused.value.code == 2 and said.out == ""
        assert arguments[-1].strip("-") in said.err
    assert "example" in spawn.module("shmbus.cli", "bench", "--help").finish()


def test_without_a_checkout_the_command_says_what_to_do(spawn: Spawner, tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("shmbus", "shmbus_ext"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    env = {"PYTHONPATH": str(tmp_path)}
    child = spawn.module("shmbus.cli", "bench", "--quick", env=env)
    assert child.wait() == 1
    assert "make bench" in child.output()
    assert "make bench" in spawn.module("shmbus.cli", "bench", "--help", env=env).finish()


# --- workloads, verdicts, instructions


@pytest.mark.parametrize("arrival", ["in order", "interleaved", "scrambled"])
def test_every_order_of_arrival_completes_every_group(arrival: Any) -> None:
    groups = 2 * OPEN_GROUPS + 5
    workload = Workload(trajectories=groups * 8, tokens=4, arrival=arrival)
    identities = [identity for identity, _ in workload.items(0)]
    assert len(set(identities)) == len(identities) == groups * 8
    last = {instance_id: place for place, (instance_id, _) in enumerate(identities)}
    in_order = sorted(last.values()) == list(range(7, groups * 8, 8))
    assert in_order == (arrival == "in order")


def test_a_mix_of_lengths_is_the_same_each_time_and_counted_as_it_is_sent() -> None:
    workload = Workload(trajectories=1024, tokens=512, producers=2, lengths="log-normal")
    sent = [source[0].size for number in range(2) for _, source in workload.items(number)]
    assert sum(sent) == workload.total_tokens
    assert len(set(sent)) > 100
    assert max(sent) == workload.longest


def test_room_is_what_the_capacity_holds() -> None:
    assert Workload(trajectories=8, tokens=1 << 20, capacity="1GiB").room == (1 << 30) // (9 << 20)
    assert Workload(trajectories=8, tokens=1 << 20, capacity="1MiB").room == 2


def test_a_verdict_compares_what_one_run_measured() -> None:
    titles = {"shmbus": "shmbus", "pyzmq": "zmq", "ray": "ray"}
    contest: dict[str, Any] = {
        series: [] for series in ("kind", "latency", "producers", "capacity")
    }
    contest |= {"survival": [], "contenders": {n: {"title": t} for n, t in titles.items()}}
    contest["size"] = [
        {
            "contender": "shmbus",
            "point": 2048,
            "rate": 160.0,
            "lowest": 150.0,
            "highest": 170.0,
            "bytes_each": 2048 * 9,
        },
        {
            "contender": "pyzmq",
            "point": 2048,
            "rate": 10.0,
            "lowest": 10.0,
            "highest": 10.0,
            "bytes_each": 2048 * 9,
        },
    ]
    (row,) = verdicts.rows(contest, (10.0, 10.5))
    # shmbus would be faster than memcpy from its cache.
    assert row.best is None
    assert (row.name, row.value, row.spread, row.met) == ("against-pyzmq", 16.0, (15.0, 17.0), True)


def test_only_more_than_three_percent_is_a_regression() -> None:
    lines, regressions = instructions.compare(
        {"op_put": 1000.0, "op_read": 1000.0, "op_gather": 1000.0},
        {"op_put": 1031.0, "op_read": 1029.0, "op_gather": 500.0, "op_new": 1.0},
    )
    assert [name.split(":")[0] for name in regressions] == ["op_put"]
    assert len(lines) == 4 and "new" in lines[3]


def test_a_program_that_is_measured_has_nothing_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/a/sanitizer.so")
    monkeypatch.setenv("CC", "clang")
    said, complained = native.run(["env"])
    assert "LD_PRELOAD" not in said and "CC=clang" in said and complained == ""


def test_every_operation_that_is_counted_is_one_of_the_program() -> None:
    functions = set(re.findall(r"\b(op_\w+)\(", instructions.SOURCE.read_text()))
    assert functions == instructions.OPERATIONS.keys()
    baselines = json.loads(instructions.BASELINES.read_text())
    assert baselines and all(one.keys() == functions for one in baselines.values())


@pytest.mark.slow
def test_instructions_are_counted_and_the_same_twice() -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    with instructions.built() as program:
        counts = [
            instructions.count_one(program, name, instructions.OPERATIONS[name], 20)
            for name in ("op_put", "op_stash", "op_put")
        ]
    assert min(counts) > 0
    assert counts[0] == counts[2] != counts[1]
