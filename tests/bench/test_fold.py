"""Many reports as one: made-up reports, where the median and the verdict are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import machine, suite
from bench.report import blocks, fold, reading
from bench.report.__main__ import main
from bench.rows.targets import Target

MACHINE = {"cpu": "A", "cores": 2, "machine": "x86_64", "commit": "c", "load_average": [0.1, 0, 0]}
NEAR = {"name": "memcpy", "share": 0.5, "median": 9.0, "unit": "GB/s", "share_interval": [0.4, 0.6]}


def report(
    when: str, value: float | None, *, not_quiet: str | None = None, **more: Any
) -> dict[str, Any]:
    row = {
        "name": "hop",
        "title": "put to views",
        "measured": f"{value} there",
        "value": value,
        "target": "at least 0.9 of memcpy",
        "spread": None,
        "met": None,
        "bound": NEAR,
        "not_quiet": not_quiet,
        "skipped": None if value else "no memory",
    }
    machine = MACHINE | {"date_utc": when}
    return {
        "format": reading.FORMAT,
        "level": "full",
        "machine": machine,
        "memcpy_bytes_per_s": 9e9,
        "rows": [row | more],
        "contest": {},
        "open_groups": [],
    }


def folded(*reports: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in reports:
        found = fold.add(found, one)
    return found


def five(*values: float | None, days: int = 2, **more: Any) -> fold.FoldedRow:
    kept = folded(
        *(report(f"2026-01-{n % days + 1:02}T{n:02}", v, **more) for n, v in enumerate(values))
    )
    (row,) = fold.fold(kept)
    return row


def test_a_verdict_is_that_of_the_median_of_five_reports_of_two_days() -> None:
    row = five(0.5, 1.0, 0.95, 0.8, 2.0)
    assert (row.median, min(row.values), max(row.values)) == (0.95, 0.5, 2.0)
    assert row.days == 2 and row.verdict == "met"
    assert five(0.5, 0.6, 0.7, 0.8, 2.0).verdict == "**not met**"
    assert row.bound == "0.5 of memcpy"


def test_fewer_reports_or_days_are_no_verdict_yet() -> None:
    assert five(1.0, 1.0, 1.0).verdict == "met so far, by 3 of 5 reports"
    assert five(1.0, 1.0, 1.0, 1.0, 0.1, days=1).verdict == "met so far, on 1 of 2 days"


def test_reports_are_judged_by_the_present_target_whatever_theirs_was() -> None:
    packed: dict[str, Any] = {"name": "packed", "target": "at least 0.9 of memcpy"}
    row = five(1.0, 1.0, 1.0, 1.0, 1.0, **packed)
    assert str(row.target) == "at least 1.1 of memcpy" and row.verdict == "**not met**"
    # One that had none then has values too; one in another unit is of something else.
    assert sorted(five(1.0, 1.2, 1.3, **packed | {"target": None}).values) == [1.0, 1.2, 1.3]
    assert five(1.0, **packed | {"target": "at least 0.9 of a futex"}).values == ()


def test_a_target_that_no_report_could_meet_is_told_beside_the_verdict() -> None:
    told = five(0.5, 0.6, 0.7, 0.6, 0.6, best=0.8).verdict
    assert told == "**not met**; out of reach here, where its bound alone comes to 0.8"
    assert five(0.5, 0.6, 0.7, 0.6, 0.6, best=0.95).verdict == "**not met**"
    assert five(1.0, 1.0, 1.0, 1.0, 1.0, best=0.8).verdict == "met"


def test_a_row_says_how_many_quiet_reports_it_rests_on_and_how_many_were_not() -> None:
    kept = folded(
        *(report(f"2026-01-0{n}", 1.0, not_quiet="others" if n > 3 else None) for n in range(1, 6))
    )
    (row,) = fold.fold(kept)
    assert row.reports == "3, of 3 days; 2 not quiet"


def test_a_restless_report_counts_for_nothing() -> None:
    kept = folded(
        *(report(f"2026-01-0{n}", 1.0) for n in (1, 2, 3, 4)),
        report("2026-01-05", 0.1, not_quiet="memcpy moved by 40% meanwhile"),
    )
    (row,) = fold.fold(kept)
    assert row.values == (1.0,) * 4 and row.restless == 1
    assert row.verdict == "met so far, by 4 of 5 reports"
    assert five(1.0, 1.0, not_quiet="others took 0.5").verdict == "machine never quiet"


def test_what_was_not_measured_has_no_median_and_no_verdict() -> None:
    row = five(None, None)
    assert row.median is None and row.verdict == "not measured"


def test_values_of_another_workload_or_unit_or_bound_are_left_out() -> None:
    last = report("2026-02-01", 1.0)
    for changed in (
        {"title": "put of something else"},
        {"target": "at least 0.9 of a futex"},
        {"bound": NEAR | {"name": "a futex"}},
    ):
        (row,) = fold.fold(folded(report("2026-01-01", 9.0, **changed), last))
        assert row.values == (1.0,), changed
    # The number of a target may move: the newest one judges.
    (row,) = fold.fold(folded(report("2026-01-01", 9.0, target="at least 2 of memcpy"), last))
    assert row.values == (9.0, 1.0)
    assert row.target == Target("at least", 0.9, "of memcpy")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"level": "quick"}, "expected a report of --full"),
        ({"partial": True}, "got a part of them"),
        ({"machine": MACHINE | {"cpu": "B", "date_utc": "2026-01-02"}}, "another machine"),
        ({}, "there already"),
    ],
)
def test_what_does_not_belong_to_the_others_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = report("2026-01-01", 1.0)
    file = tmp_path / "folded.json"
    for name, one in (("a", first), ("b", first | change)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(one))
    assert main(["fold", str(file), str(tmp_path / "a")]) == 0
    before = file.read_text()
    with pytest.raises(SystemExit):
        main(["fold", str(file), str(tmp_path / "b")])
    assert says in capsys.readouterr().err
    assert file.read_text() == before


def test_a_file_without_reports_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["fold", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit):
        main(["fold", str(tmp_path / "none.json"), str(tmp_path)])
    assert not (tmp_path / "none.json").exists()


def test_the_blocks_of_a_page_are_of_the_folded_reports(tmp_path: Path) -> None:
    kept = folded(report("2026-01-01", 0.5), report("2026-01-02", 0.7))
    (tmp_path / blocks.FOLDED).write_text(json.dumps(kept))
    text = blocks.block("rows", {}, tmp_path, "there")
    assert "of 2 runs of `shmbus bench --full` on 2 days, of 1 commit" in text
    assert "| put to views | 0.7 there | 0.6 (0.5 to 0.7) | 2, of 2 days | 0.5 of memcpy |" in text
    assert "**not met** so far, by 2 of 5 reports" in text


@pytest.mark.parametrize("text", ["at least 0.9 of memcpy", "at most 0 runs stopped or harmed"])
def test_a_target_is_read_from_its_text(text: str) -> None:
    assert str(Target.parse(text)) == text


@pytest.mark.parametrize(
    "level, cpu",
    [("--full", "B"), ("--quick", "A"), ("--tiny", "A"), ("--full --only idle", "A")],
)
def test_a_run_that_could_not_be_added_is_refused_before_it_is_measured(
    level: str, cpu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Its environment variable would outlive this test.
    monkeypatch.setattr(suite, "use_template", lambda *_: None)
    here = machine.describe() | {"date_utc": "2026-01-01"}
    kept = here if cpu == "A" else here | {"cpu": cpu}
    only = folded(report("2026-01-01", 1.0) | {"machine": kept})
    (tmp_path / "folded.json").write_text(json.dumps(only))
    (tmp_path / "results.json").write_text("the newest")
    with pytest.raises(SystemExit) as refused:
        suite.main([*level.split(), "--output", str(tmp_path)])
    said = capsys.readouterr()
    assert refused.value.code == 2 and said.out == ""
    assert "name another directory" in said.err
    wanted = "all rows" if "only" in level else "--full"
    assert ("expected a report of" if cpu == "B" else wanted) in said.err
    assert (tmp_path / "results.json").read_text() == "the newest"
