"""The matrix of versions: how its rows are judged, and that docs/compat.md has them."""

import os
import sys
from pathlib import Path

import pytest
from conftest import wait_until
from versions import KINDS, ROOT, RowError, chosen, run, run_tests

GOOD = "def test_good():\n    pass\n"
SKIPPED = "import pytest\n\n@pytest.mark.skip\ndef test_skipped():\n    pass\n"
BAD = "def test_bad():\n    raise AssertionError\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (GOOD + SKIPPED, "1 passed, 1 skipped"),
        (GOOD + BAD, "1 failed, 1 passed; pytest ended with 1"),
        (SKIPPED, "1 skipped; pytest ended with 0"),
        ("", "no test ran; pytest ended with 5"),
    ],
)
def test_a_row_says_what_tests_did_and_fails_unless_all_that_ran_passed(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-c {os.devnull}")
    sample = tmp_path / "test_sample.py"
    sample.write_text(text)
    try:
        assert run_tests(Path(sys.executable).parent, [sample], tmp_path / "log") == told
    except RowError as error:
        assert str(error) == told and "ended with" in told


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
        head = lines.index(f"| {package} | {kind.beside} | tests |")
        table = lines[head + 2 : lines.index("", head)]
        versions = [text.split("|")[1].strip().partition("+")[0] for text in table]
        assert versions == list(kind.versions)


def test_rows_are_chosen_by_package_or_version_and_a_new_version_may_be_asked_for() -> None:
    assert len(chosen([])) == sum(len(kind.versions) for kind in KINDS.values())
    assert chosen(["transformers", "torch==9.9"]) == [
        ("torch", "9.9"),
        *(("transformers", version) for version in KINDS["transformers"].versions),
    ]
