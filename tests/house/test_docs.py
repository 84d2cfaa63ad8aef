"""Files, folders, modules and links of the documentation exist, and pages read in a column."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_style import PACKAGES, ROOT, relative, report, tree

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
    """The anchors of a page's headings, as code hosts make them."""
    found = set()
    for _, line in prose(page):
        if line.startswith("#"):
            plain = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            found.add(plain.replace(" ", "-"))
    return frozenset(found)


def is_a_name_of(module: str) -> bool:
    """Whether a dotted name is a module, or a name that stands in one."""
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
    text = "\n".join(line for _, line in prose(page))
    for target in LINK.findall(text):
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


def test_a_tour_has_as_many_files_as_its_table_says() -> None:
    text = (ROOT / "docs/architecture.md").read_text().partition("## Guided tours")[2]
    said = {name.lower(): int(count) for name, count in re.findall(r"\| (.+) \| (\d+) \|", text)}
    tours = re.findall(r"^\*\*(.+?)\.\*\* (.+?\.)(?= [A-Z]|\n\n)", text, re.M | re.S)
    assert said == {name.lower(): len(FILE.findall(sentence)) for name, sentence in tours} != {}
