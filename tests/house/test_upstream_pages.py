"""What lies ready for other projects says what was tested here: their blocks, versions, patches."""

import re
import subprocess
from pathlib import Path

import pytest
from doc_pages import PAGES, blocks, installs
from test_style import ROOT

UPSTREAM = PAGES / "upstream"
TESTED = {
    "trl/shmbus_integration.md": "trl.md",
    "verl-recipe/shmbus/README.md": "verl.md",
}
#: What only the other project's own tree can run; its configuration is run by tests/peers/verl.
THEIRS = "python -m verl.trainer.main_ppo"


def test_every_page_is_known() -> None:
    found = {str(path.relative_to(UPSTREAM)) for path in UPSTREAM.glob("*/**/*.md*")}
    assert found == TESTED.keys()


@pytest.mark.parametrize("page", TESTED)
def test_each_block_stands_on_a_page_whose_blocks_are_run(page: str) -> None:
    tested = [text for _, text in blocks(TESTED[page])]
    found = [text for _, text in blocks(f"upstream/{page}")]
    assert len(found) >= 3
    for text in found:
        assert text.startswith(THEIRS) or any(text in each for each in tested), text


@pytest.mark.parametrize("page", TESTED)
def test_the_versions_are_those_of_the_tests(page: str) -> None:
    stack = TESTED[page].removesuffix(".md")
    needed = (ROOT / "tests" / "peers" / stack / "requirements.txt").read_text().split()
    folder = (UPSTREAM / page).parent
    text = "".join(path.read_text() for path in folder.iterdir() if path.is_file())
    pinned = set(re.findall(r"[\w-]+(?:\[[\w-]+\])?==[\d.]*\d", text))
    assert pinned and pinned <= set(needed), pinned


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("trl.md", "pip install"),
        ("verl.md", "pip install"),
    ],
)
def test_a_page_installs_what_its_tests_ran_with(page: str, words: str) -> None:
    needed = (ROOT / "tests/peers" / page.removesuffix(".md") / "requirements.txt").read_text()
    assert installs(page, words) <= set(needed.splitlines())


@pytest.mark.parametrize("name", ["prime-rl", "slime"])
def test_a_patch_is_well_formed(name: str, tmp_path: Path) -> None:
    file = UPSTREAM / f"{name}.diff"
    command = ["git", "apply", "--numstat", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    added = sum(int(line.split()[0]) for line in done.stdout.splitlines())
    assert added == len(re.findall(r"^\+(?!\+\+ )", file.read_text(), re.M)) > 0
