"""The matrix of versions: what its tables are made of, and that docs/compat.md has its rows."""

import os
import sys
from pathlib import Path

import pytest
from conftest import wait_until
from versions import KINDS, ROOT, GroupEntry, RowError, chosen, outcomes, run

TESTS = """
import pytest

def test_good(record_property):
    record_property("native", "recognised")

def test_bad():
    raise AssertionError

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass
"""


def test_a_cell_says_what_tests_did(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    options = ["-c", os.devnull, "-o", "junit_family=xunit1", f"--junit-xml={report}"]
    status = run(
        [sys.executable, "-m", "pytest", *options, tmp_path / "test_sample.py"],
        60,
        tmp_path / "log",
    )
    assert status == pytest.ExitCode.TESTS_FAILED, (tmp_path / "log").read_text()
    row = GroupEntry("torch", "2.6.0", outcomes=outcomes(report))
    assert row.counts == "1 passed, 1 failed, 1 skipped"
    assert row.failed
    assert row.verdict("test_sample::test_good") == "yes"
    assert row.verdict("test_sample::test_(good|bad)") == "**no**: 1 of 2 failed"
    assert row.verdict("test_skipped") == row.verdict("no such test") == "not run"
    assert [(o.facts, o.why) for o in row.outcomes] == [
        ({"native": "recognised"}, ""), ({}, ""), ({}, "not here"),
    ]  # fmt: skip


def test_a_row_without_a_test_that_passed_has_failed() -> None:
    assert GroupEntry("torch", "2.6.0").failed
    assert GroupEntry("torch", "2.6.0", problem="not installed").failed


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    with pytest.raises(RowError, match="not done within 3 s"):
        run([sys.executable, "-c", code], 3, log)
    pid = int(log.read_text())

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(gone)


def test_the_document_has_the_rows_of_the_matrix() -> None:
    lines = (ROOT / "docs" / "compat.md").read_text().splitlines()
    for package, kind in KINDS.items():
        (head,) = (number for number, text in enumerate(lines) if text.startswith(f"| {package} |"))
        assert lines[head].split(" | ")[2:-1] == list(kind.columns)
        table = lines[head + 2 : lines.index("", head)]
        versions = [text.split("|")[1].strip().partition("+")[0] for text in table]
        assert versions == list(kind.versions)


def test_rows_are_chosen_by_package_or_version_and_a_new_version_may_be_asked_for() -> None:
    assert len(chosen([])) == sum(len(kind.versions) for kind in KINDS.values())
    asked = chosen(["transformers", "torch==9.9"])
    assert [(row.package, row.version) for row in asked] == [
        ("torch", "9.9"),
        *(("transformers", version) for version in KINDS["transformers"].versions),
    ]
