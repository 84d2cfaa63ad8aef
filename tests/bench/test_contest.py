"""The contest of the benchmark: real contenders, real processes, real kills; no time is asserted.

A contender that is not installed here is skipped by name. The two that start a cluster, and the
server of Atropos, run in environments of their own, which a test has not.
"""

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

from bench.contenders import MODULES, contenders, module
from bench.contest import moving, survival
from bench.contest import run as contest_run
from bench.levels import LEVELS
from bench.processes import MeasurementError
from bench.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
LIGHT = [name for name, contender in contenders().items() if not contender.environment]
QUEUE = "multiprocessing.Queue"
pytest_plugins = ["bench_fixtures"]
pytestmark = pytest.mark.usefixtures("forked")


def installed(name: str) -> ModuleType:
    found = module(name)
    try:
        contest_run.versions(found.CONTENDER)
    except MeasurementError as error:
        pytest.skip(f"{name}: {error}")
    return found


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes import the benchmark, from wherever the tests run."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.mark.parametrize("name", MODULES)
def test_every_contender_has_both_ends_and_says_what_it_was_given(name: str) -> None:
    found = importlib.import_module(f"bench.contenders.{name}")
    for part in ("link", "sender", "receiver"):
        assert callable(getattr(found, part))
    about = found.CONTENDER
    assert about.packages and about.favour and about.copied
    assert about.copies >= 1 and about.per_second > 0
    assert about.environment in ("", *contest_run.ENVIRONMENTS)


def test_each_environment_has_a_list_of_what_it_needs_and_every_pin_is_in_the_constraints() -> None:
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for name in contest_run.ENVIRONMENTS:
        text = (ROOT / "bench" / "contenders" / "environments" / f"{name}.txt").read_text()
        wanted = {line for line in text.splitlines() if line and not line.startswith("#")}
        assert wanted <= pinned
        packages = [c.packages for c in contenders().values() if c.environment == name]
        assert {package for some in packages for package in some} <= wanted


@pytest.mark.parametrize("name", LIGHT)
def test_what_is_sent_arrives_whole_and_once(name: str) -> None:
    # Beyond any reader's single take, however late its begin: one delivery has no rate.
    workload = Workload(trajectories=1024, tokens=2048, producers=2, capacity="4MiB")
    timed = moving.measure(installed(name).__name__, workload)
    assert 0 < timed.trajectories < 1024 and timed.seconds > 0


def test_a_run_that_is_one_delivery_has_no_rate() -> None:
    # Nothing goes before the reader's whole group: it takes complete groups only.
    with pytest.raises(MeasurementError, match="all 8 came at once"):
        moving.measure("bench.contenders.shmbus_embedded", Workload(trajectories=8, tokens=8))


def test_a_writer_killed_within_a_put_stops_nobody_and_harms_nothing() -> None:
    outcome = survival.measure("bench.contenders.shmbus_embedded", 3)
    assert outcome.stopped_after is None, outcome
    assert (outcome.kills, outcome.lost, outcome.torn, outcome.doubled) == (3, 0, 0, 0)


def test_the_rows_of_a_contender_are_measured_beside_those_of_shmbus() -> None:
    rows = {row.name: row for row in contest_run.contest([QUEUE], LEVELS["tiny"], print)}
    assert set(rows) == {
        "latency-shmbus", "survival-shmbus", f"against-{QUEUE}", f"latency-{QUEUE}",
        f"survival-{QUEUE}",
    }  # fmt: skip
    assert rows["survival-shmbus"].value == 0 and rows["survival-shmbus"].met
    assert rows[f"against-{QUEUE}"].ratio and rows[f"against-{QUEUE}"].figures["packages"]
    assert rows[f"latency-{QUEUE}"].beside == "shmbus, embedded"


def test_what_is_not_there_is_skipped_by_name_and_what_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = [{"what": what, "failed": "f"} for what in ("rate", "latency", "survival")]
    monkeypatch.setenv("SHMBUS_CONTENDERS", str(tmp_path))
    monkeypatch.setattr(contest_run, "ask", lambda *_: failed)
    rows = {row.name: row for row in contest_run.contest(["ray"], LEVELS["tiny"], print)}
    assert "make bench-contenders" in rows["against-ray"].skipped
    assert rows["latency-shmbus"].skipped == rows["survival-shmbus"].skipped == "f"


def test_a_request_that_fails_says_why_and_the_next_one_is_answered() -> None:
    good = {"what": "rate", "trajectories": 4096, "tokens": 2048}
    answers = contest_run.ask(contenders()[QUEUE], [{"what": "nonsense"}, good])
    assert "unknown request 'nonsense'" in answers[0]["failed"]
    assert answers[1]["rate"] > 0


def test_a_contender_that_comes_to_no_end_is_given_up() -> None:
    endless = {"what": "latency", "probes": 10_000_000}
    (answer,) = contest_run.ask(contenders()[QUEUE], [endless], 5.0)
    assert answer["failed"] == "not done within 5 s"
