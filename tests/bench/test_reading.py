"""Reports that are damaged, foreign or of another form are refused by name, and change nothing."""

from __future__ import annotations

import contextlib
import json
import math
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import command
from bench.report import blocks, fold, reading, report
from bench.report.__main__ import main
from bench.rows.targets import TARGETS

KEPT = Path(__file__).resolve().parents[2] / "bench" / "results" / "two-cores"
#: A day that no kept report is of.
LATER = "2031-01-01T00:00:00+00:00"


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """The kept report of another day, with a change."""
    found = json.loads((KEPT / reading.RESULTS).read_text())
    found["machine"]["date_utc"] = LATER
    change(found)
    return json.dumps(found)


def row(**what: Any) -> Callable[[dict[str, Any]], object]:
    """A change of the second row, the first that has a value."""
    return lambda found: found["rows"][1].update(what)


DAMAGED = {
    "nothing": ("", "cannot be read"),
    "cut short": (changed(lambda _: None)[:5000], "cannot be read"),
    "a list": ("[]", "JSON of something else"),
    "another program's": ('{"rows": []}', "JSON of something else"),
    "an older form": (changed(lambda found: found.update(format=2)), "got format 2"),
    "a newer form": (changed(lambda found: found.update(format=99)), "got format 99"),
    "no rows": (changed(lambda found: found.pop("rows")), "missing required field `rows`"),
    "half a row": (changed(lambda found: found["rows"][1].pop("title")), "`title`"),
    "no number": (changed(row(value=math.nan)), "expected a finite number as value, got nan"),
    "no end": (changed(row(value=math.inf)), "expected a finite number as value, got inf"),
    "a number as text": (changed(row(value="12")), "$.rows[1].value"),
    "no target": (changed(row(target="as fast as it goes")), "$.rows[1]"),
    "no day": (changed(lambda found: found["machine"].update(date_utc="noon")), "date_utc"),
    "no series": (changed(lambda found: found["contest"].pop("size")), "contest.size"),
}


@pytest.fixture
def folded(tmp_path: Path) -> Path:
    return Path(shutil.copy(KEPT / blocks.FOLDED, tmp_path))


@pytest.mark.parametrize("text, says", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_report_is_refused_with_its_place_and_nothing_is_written(
    text: str, says: str, folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / reading.RESULTS).write_text(text)
    before = folded.read_bytes()
    for arguments in (["fold", str(folded), str(tmp_path)], [str(tmp_path)]):
        with pytest.raises(SystemExit) as refused:
            main(arguments)
        said = capsys.readouterr().err
        assert refused.value.code == 1 and says in said, said
        assert str(tmp_path / reading.RESULTS) in said and "expected a report" in said
    assert folded.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [blocks.FOLDED, reading.RESULTS]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"reports": []}', '{"format": 7}'])
def test_a_damaged_file_of_folded_reports_is_refused_and_kept(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / blocks.FOLDED
    file.write_text(text)
    for arguments in (["fold", str(file)], ["fold", str(file), str(KEPT)]):
        with pytest.raises(SystemExit) as refused:
            main(arguments)
        assert refused.value.code == 1
        assert f"{file}: expected folded reports" in capsys.readouterr().err
    assert file.read_text() == text


def test_a_directory_without_a_report_is_said_with_what_writes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "shmbus bench --output" in capsys.readouterr().err


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes, as on a disk that is full; nor pytest's own output."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_folded_reports_as_they_were(
    folded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = folded.read_bytes()
    (tmp_path / reading.RESULTS).write_text(changed(lambda _: None))
    with full_disk(), pytest.raises(SystemExit) as refused:
        main(["fold", str(folded), str(tmp_path)])
    assert refused.value.code == 1 and "it is as it was" in capsys.readouterr().err
    assert folded.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [blocks.FOLDED, reading.RESULTS]


def test_a_row_with_a_target_stays_though_the_newest_report_is_without_it() -> None:
    kept = json.loads((KEPT / blocks.FOLDED).read_text())
    before = {one.name: one for one in fold.fold(kept)}
    name = next(name for name in before if name in TARGETS and before[name].values)
    del kept["reports"][-1]["rows"][name]
    *_, last = fold.fold(kept)
    assert last.name == name and last.measured == fold.GONE
    assert len(last.values) == len(before[name].values) - 1


def test_a_report_says_above_its_figures_what_makes_them_mean_nothing(tmp_path: Path) -> None:
    result = json.loads(changed(lambda _: None)) | {"notes": ["NOTE: its figures mean nothing.\n"]}
    report.write(result, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.index("NOTE: its figures mean nothing.") < text.index("| --- |")


def test_a_run_without_a_contest_makes_every_block_of_a_page(tmp_path: Path) -> None:
    result = json.loads(changed(lambda found: found.update(contest={})))
    page = tmp_path / "PAGE.md"
    page.write_text("".join(f"{blocks.BEGIN.format(n)}\nx\n{blocks.END}\n" for n in blocks.BLOCKS))
    blocks.replace_blocks(result, tmp_path, page)
    assert "Nothing was set beside other ways" in page.read_text()


def test_a_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "real"
    real.write_text("older")
    link.symlink_to(real)
    command.write(link, "newer")
    assert link.is_symlink() and real.read_text() == "newer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
