"""Rows of the benchmark: their one form, their targets, real small runs; no time is asserted."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner, wait_until

from bench import machine, processes, ranks, report, suite, weights
from bench.levels import LEVELS
from bench.native import run as run_program
from bench.processes import MeasurementError, Role, run_alone, run_together
from bench.row import HEADS, Row, cells, table
from bench.sending import bus_bytes
from bench.targets import TARGETS
from bench.workload import GROUP_SIZE, Workload
from shmbus import Bus, LayoutMismatchError
from shmbus.pool import read_pool

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
# Longer than a loaded machine needs to start two dozen interpreters, some of which import torch.
DEADLINE_S = 200.0
pytest_plugins = ["bench_fixtures"]
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)


# --- the form of a result


def test_the_value_of_a_row_is_the_median_and_its_ratio_that_of_the_repetitions() -> None:
    row = Row(
        name="hop-2048", title="t", unit="a second", values=(2.0, 9.0, 4.0), beside="memcpy",
        beside_values=(1.0, 3.0, 4.0),
    )  # fmt: skip
    assert row.value == 4.0 and row.ratio == 2.0 and row.met is True
    said = dict(zip(HEADS, cells(row), strict=True))
    assert said["measured"] == "4 a second" and said["lowest-highest (of)"] == "2-9 (3)"
    assert said["beside"] == "memcpy 3" and said["times that"] == "2"


@pytest.mark.parametrize(
    ("name", "value", "met"),
    [
        ("daemon-leases", 100_000.0, True),
        ("daemon-leases", 99_999.0, False),
        ("daemon-wake", 200.0, True),
        ("daemon-wake", 201.0, False),
        ("without-a-target", 1.0, None),
    ],
)
def test_a_missed_target_is_said_in_its_cell(name: str, value: float, met: bool | None) -> None:
    row = Row(name=name, title="t", unit="u", values=(value,))
    assert row.met is met
    assert ("missed" in table([row])) is (met is False)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("hop-2048", "at least 0.9x"),
        ("packed", "at least 1.1x"),
        ("daemon-packed", "at least 0.9x"),
        ("daemon-leases", "at least 100,000"),
        ("daemon-wake", "at most 200"),
        ("gateway-post", "at most 0.6x"),
        ("against-multiprocessing.Queue", "at least 25x"),
        ("survival-shmbus", "at most 0"),
    ],
)
def test_a_target_is_what_was_decided_and_not_what_was_measured(name: str, target: str) -> None:
    assert str(TARGETS[name]) == target


# --- kept results and pages


@pytest.mark.parametrize("page", ["README.md", "bench/README.md"])
def test_the_tables_of_a_page_are_those_of_the_results_that_are_kept(page: str) -> None:
    text = (ROOT / page).read_text()
    assert report.BLOCK.search(text)
    assert report.filled(text, ROOT / page, draw=False) == text


@pytest.mark.parametrize(("result", "gone"), [("prefix-h200", True), ("two-cores", False)])
def test_a_table_names_the_commit_of_a_program_that_is_gone(result: str, gone: bool) -> None:
    commit = json.loads((RESULTS / f"{result}.json").read_text())["machine"]["commit"][:8]
    text = report.block(result, ["none"], ROOT / "README.md", draw=False)
    assert (f"commit {commit}" in text) is gone


def test_the_first_page_has_at_most_four_measured_rows() -> None:
    (block,) = report.BLOCK.finditer((ROOT / "README.md").read_text())
    assert 1 <= len([line for line in block[0].splitlines() if line.startswith("|")]) - 2 <= 4


def test_every_kept_result_is_shown_on_a_page() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "bench" / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    assert [path.name for path in RESULTS.iterdir() if path.name not in text] == []


# --- programs


def test_one_run_measures_what_was_asked_for_and_writes_it(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    names = ["hop-2048-cold", "packed", "daemon-packed", "daemon-leases", "wake", "stash"]
    arguments = ["bench", "--tiny", "--capacity", "8MiB", "--output", output]
    for name in names:
        arguments += ["--only", name]
    printed = spawn.module("shmbus.cli", *arguments, env=PATH).finish(DEADLINE_S)
    result = json.loads(output.read_text())
    assert [row["name"] for row in result["rows"]] == names
    for row in result["rows"]:
        assert row["title"] in printed and row["value"] and not row["skipped"], row
        assert row["beside_values"] or row["name"] == "daemon-leases"
    wanted = {"python", "numpy", "torch", "shmbus", "kernel", "cpu", "date_utc", "commit"}
    assert wanted | {"load_average", "cores"} <= set(result["machine"])
    assert "its figures mean nothing" in printed


@pytest.mark.slow
def test_each_further_row_can_be_measured(spawn: Spawner) -> None:
    arguments = ["--tiny"]
    for name in ("memcpy", "hop-256", "packed-cold", "requests", "*idle", "daemon-wake"):
        arguments += ["--only", name]
    assert "skipped" not in spawn.module("bench", *arguments, env=PATH).finish(DEADLINE_S)


def test_a_pattern_of_rows_and_a_program_share_a_table_and_a_file(
    spawn: Spawner, tmp_path: Path
) -> None:
    output = tmp_path / "figures.json"
    names = ["--only", "*mem*", "--only", "weights"]
    spawn.module("bench", "--tiny", *names, "--output", output, env=PATH).finish(DEADLINE_S)
    rows = [Row.from_json(each) for each in json.loads(output.read_text())["rows"]]
    found = {row.name.partition("-")[0]: row.skipped for row in rows}
    assert found == {"memcpy": "", "weights": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["ranks", "--ranks", "2", "--capacity", "64MiB"],
        ["recorder"],
        ["gateway", "--clients", "4"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_each_program_measures_and_writes_rows(
    arguments: list[str], spawn: Spawner, tmp_path: Path
) -> None:
    output = tmp_path / "figures.json"
    name, *more = arguments
    spawn.module(f"bench.{name}", "--tiny", *more, "--output", output, env=PATH).finish(DEADLINE_S)
    rows = [Row.from_json(each) for each in json.loads(output.read_text())["rows"]]
    assert rows and all(row.value is not None for row in rows)


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (suite.main, ["--only", "nothing"], "--only"),
        (suite.main, ["--only", "hop-*x"], "expected one of memcpy, "),
        (suite.main, ["--capacity", "1"], "--capacity: expected 4096 bytes to"),
        (suite.main, ["--output", "no/such/place.json"], "directory that can be written"),
        (suite.main, ["--output", "."], "directory that can be written"),
        (suite.main, ["--repetitions", "two"], "expected a whole number, 1 or more, got 'two'"),
        (weights.main, ["--size", "0.001"], "expected 0.0037 or more, got '0.001'"),
        (weights.main, ["--size", "nan"], "expected 0.0037 or more, got 'nan'"),
        (weights.main, ["--repetitions", "0"], "got '0'"),
        (ranks.main, ["--ranks", "0"], "got '0'"),
        (ranks.main, ["--capacity", "-1"], "--capacity: expected a number with KiB"),
        (ranks.main, ["--output", "/proc/none/figures.json"], "--output"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(
    main: Callable[[list[str]], int],
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    said = capsys.readouterr()
    assert refused.value.code == 2 and said.out == "" and says in said.err


def test_where_nothing_can_be_measured_the_exit_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(suite, "use_template", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert suite.main(["--tiny", "--only", "hop-2048"]) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr()
    assert "skipped: needs 2 cores, this process may run on 1" in said.out
    assert "nothing could be measured" in said.err


def test_a_small_shm_and_a_missing_module_are_said() -> None:
    said = machine.lacks(shm_bytes=1 << 40)
    assert re.search(r"needs 1048576 MiB in /dev/shm, \d+ are free", said)
    assert "there is no nowhere here" in machine.lacks(modules=["nowhere"])
    assert machine.lacks() == ""


@pytest.mark.parametrize("capacity", ["64KiB", "64MiB"])
def test_what_a_bus_takes_is_no_more_than_what_is_asked_for(bus_name: str, capacity: str) -> None:
    with Bus.create(bus_name, capacity):
        taken = os.stat(f"/dev/shm/shmbus.{bus_name}").st_blocks * 512
    assert taken <= bus_bytes(capacity) <= 2 * taken + (1 << 20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_program_that_leaves_nothing_behind(
    number: signal.Signals, spawn: Spawner
) -> None:
    child = spawn.module("bench.weights", "--size", 0.01, "--repetitions", 1_000_000, env=PATH)
    mine = f"shmbus-weights.bench-weights-{child.popen.pid}-"

    def there() -> list[str]:
        return [name for name in os.listdir("/dev/shm") if name.startswith(mine)]

    def published() -> bool:
        for name in there():
            with contextlib.suppress(LayoutMismatchError):  # it is being made
                found = read_pool(name.removeprefix("shmbus-weights."), "weights")
                return any(slot.newest for slot in found.slots)
        return False

    wait_until(lambda: published() or not child.running, what="weights that are published")
    assert child.running, child.output()
    child.popen.send_signal(number)
    wait_until(lambda: not child.running, what="the program to end")
    assert child.popen.returncode == 128 + number, child.output()
    assert there() == [] and "Traceback" not in child.output()


# --- processes


def end_by(start: Callable[[], None], number: int) -> None:
    os.kill(os.getpid(), number)


def divide(start: Callable[[], None]) -> float:
    return 1 / 0


def fill_memory(start: Callable[[], None]) -> None:
    raise MemoryError("16 GiB")


def wait_for_ever(start: Callable[[], None], path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    signal.pause()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("role", "says"),
    [
        (Role(end_by, (signal.SIGKILL,)), "end_by failed: it died without a word, of SIGKILL"),
        (Role(divide), r"divide failed: Traceback[^$]*ZeroDivisionError"),
        (Role(fill_memory), r"^fill_memory failed: 16 GiB$"),
    ],
    ids=["killed", "mistake", "limit"],
)
def test_a_process_that_fails_says_which_and_why(role: Role, says: str) -> None:
    with pytest.raises(MeasurementError, match=says):
        run_alone(role.function, *role.arguments)


@pytest.mark.usefixtures("forked")
def test_what_comes_to_no_end_is_given_up_and_ended(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with pytest.raises(MeasurementError, match="not done in 5 s: wait_for_ever"):
        run_together([Role(wait_for_ever, (str(path),))], deadline_s=5.0)
    if path.exists():
        assert int(path.read_text()) not in processes.descendants(os.getpid())


# --- workloads and C programs


def test_a_workload_sends_whole_groups_of_ids_that_are_its_producers_own() -> None:
    workload = Workload(trajectories=64, tokens=4, producers=2)
    sent = [[identity for identity, _ in workload.items(number)] for number in range(2)]
    assert [len(one) for one in sent] == [32, 32]
    assert not {i for i, _ in sent[0]} & {i for i, _ in sent[1]}
    assert [index for _, index in sent[0]] == list(range(GROUP_SIZE)) * 4
    assert len({identity for identity, _ in sent[0]}) == 4


@pytest.mark.parametrize("level", LEVELS)
def test_the_runs_of_each_level_have_whole_groups_batches_and_calls(level: str) -> None:
    sizes: Any = LEVELS[level]
    assert sizes.hop_256 % 64 == 0 and sizes.packed * 2048 % 65_536 == 0
    assert sizes.hop_2048 % GROUP_SIZE == sizes.hop_16384 % GROUP_SIZE == 0


def test_a_program_that_is_measured_has_nothing_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/a/sanitizer.so")
    monkeypatch.setenv("CC", "clang")
    said, complained = run_program(["env"])
    assert "LD_PRELOAD" not in said and "CC=clang" in said and complained == ""
