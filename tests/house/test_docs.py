"""Files, folders, modules and links of the documentation exist, and pages read in a column."""

import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
from test_layers import FLOOR_OF, room_of
from test_style import PACKAGES, ROOT, relative, report, tree

import shmbus
from trainer_adapter import OnlineDataHandler

PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
        ROOT / "bench" / "README.md",
        *(ROOT / "shmbus_ext").rglob("LAYOUT.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)

# Names that look like ours, and what they are.
NOT_OURS = {
    "Python.h": "CPython's header",
    "shmbus.commands": "a group of entry points",
    "shmbus.drops": "a logger",
    "shmbus.stall": "a logger",
}

FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|pyi|c|h|sh|md)|(?:[\w.-]+/)+[\w.-]+\.\w+")
FOLDER = re.compile(r"(?:[\w.-]+/)+")
MODULE = re.compile(r"(?:shmbus|shmbus_ext|trainer_adapter|bench)(?:\.\w+)+")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def words_in_code(page: Path) -> Iterator[tuple[int, str]]:
    for number, line in prose(page):
        for code in re.findall(r"`([^`]+)`", line):
            for word in code.split():
                yield number, word.strip("\"',;:()")


@cache
def endings() -> frozenset[str]:
    """Every path of the project from the root, and every end of one; folders end in a slash."""
    found = set()
    for path in tree():
        parts = path.relative_to(ROOT).parts
        for end in range(1, len(parts) + 1):
            name = "/".join(parts[:end]) + ("/" if end < len(parts) else "")
            found.update(name.split("/", cut)[-1] for cut in range(end))
    return frozenset(found)


@cache
def anchors(page: Path) -> frozenset[str]:
    found = set()
    for _, line in prose(page):
        if line.startswith("#"):
            found.add(re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-"))
    return frozenset(found)


def is_a_name_of(module: str) -> bool:
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                rest = parts[end : end + 1]
                return not rest or bool(re.search(rf"\b{rest[0]}\b", file.read_text()))
    return False


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_each_file_and_folder_that_a_page_names_is_there(page: Path) -> None:
    report(
        [
            f"{relative(page)}:{number}: {word} is not there"
            for number, word in words_in_code(page)
            if (FILE.fullmatch(word) or FOLDER.fullmatch(word))
            and word not in NOT_OURS
            and word not in endings()
            and not (page.parent / word).exists()
        ]
    )


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_each_module_that_a_page_names_is_there(page: Path) -> None:
    report(
        [
            f"{relative(page)}:{number}: {word} is no module, nor a name of one"
            for number, word in words_in_code(page)
            if MODULE.fullmatch(word)
            and not word.split(".")[1].isupper()
            and word not in NOT_OURS
            and word not in endings()
            and not is_a_name_of(word)
        ]
    )


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_each_link_of_a_page_leads_somewhere(page: Path) -> None:
    offences = []
    for target in LINK.findall("\n".join(line for _, line in prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            offences.append(f"{relative(page)}: {target}: there is no such file")
        elif anchor and anchor not in anchors(file):
            offences.append(f"{relative(page)}: {target}: there is no such heading")
    report(offences)


def test_every_room_is_on_the_map() -> None:
    page = ROOT / "docs" / "architecture.md"
    rooms = {
        f"{relative(path.parent)}/"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".c"} and path.parent != ROOT / package
    }
    named = {word for _, word in words_in_code(page)}
    report([f"{room} is not on the map" for room in sorted(rooms - named)])


def test_every_decision_is_a_page_of_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    pages = sorted(folder.glob("[a-z]*.md"))
    assert pages
    for page in pages:
        lines = page.read_text().splitlines()
        title = lines[0].removeprefix("# ")
        assert f"- [{title}]({page.name})" in index, page.name
        for heading in ("## Context", "## Decision", "## Rejected"):
            assert heading in lines, f"{page.name}: no {heading!r}"


def test_external_links_are_found_without_the_sentence_around_them() -> None:
    spec = importlib.util.spec_from_file_location("links", ROOT / "docs" / "links.py")
    assert spec is not None and spec.loader is not None
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    text = "See (https://a.example/b_c#d), `http://x.org.` and arXiv:2503.14476; {url} http://%s/"
    assert list(links.links_of(text)) == [
        "https://a.example/b_c#d", "http://x.org", "https://arxiv.org/abs/2503.14476"
    ]  # fmt: skip


def tours() -> dict[str, list[str]]:
    text = (ROOT / "docs/architecture.md").read_text().partition("## Guided tours")[2]
    found = re.findall(r"^\*\*(.+?)\.\*\* (.+?\.)(?= [A-Z]|\n\n)", text, re.M | re.S)
    return {name.lower(): re.findall(FILE, sentence) for name, sentence in found}


def test_a_tour_has_as_many_files_as_its_table_says() -> None:
    text = (ROOT / "docs/architecture.md").read_text().partition("## Guided tours")[2]
    said = {name.lower(): int(count) for name, count in re.findall(r"\| (.+) \| (\d+) \|", text)}
    assert said == {name: len(files) for name, files in tours().items()} != {}


def test_a_packed_batch_goes_down_through_14_files_and_climbs_once(bus_name: str) -> None:
    files = tours()["a packed batch"]
    floors = [
        FLOOR_OF[room_of(file.removesuffix(".py").replace("/", "."))] if file.endswith(".py") else 0
        for file in files
    ]
    climbs = sum(after > before for before, after in itertools.pairwise(floors))
    assert len(files) <= 14 and climbs <= 1
    with (
        shmbus.Bus.create(bus_name, "4MiB"),
        shmbus.Producer(bus_name) as producer,
        OnlineDataHandler(bus_name, groups_per_batch=1, max_wait=None) as handler,
    ):
        for step in range(2):
            producer.put(f"p{step}", group_size=1, index=0, score=1.0, tokens=[1, 2, 3])
            entered = files_entered(handler.next_batch)
    rooms = ("trainer_adapter/batches/", "trainer_adapter/advantages.py", "shmbus/batch/")
    assert {file for file in entered if file.startswith(rooms)} == {
        file for file in files if file.startswith(rooms)
    }


def files_entered(call: Callable[[], object]) -> set[str]:
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {relative(Path(file)) for file in entered if Path(file).is_relative_to(ROOT)}
