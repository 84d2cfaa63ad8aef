"""Memory orderings have two ends: each carries the same tag, and LAYOUT.md says what it orders."""

import re
from collections import Counter
from pathlib import Path

EXTENSION = Path(__file__).resolve().parents[2] / "shmbus_ext"
TAG = re.compile(r"SYNC: ([a-z]+(?:-[a-z]+)*)")


def tags_of_the_code() -> Counter[str]:
    sources = sorted(EXTENSION.rglob("*.[ch]"))
    return Counter(tag for path in sources for tag in TAG.findall(path.read_text()))


def tags_of_the_layout() -> list[str]:
    """The first column of the table of orderings, a row of which may have several."""
    rows = []
    for page in sorted(EXTENSION.rglob("LAYOUT.md")):
        section = page.read_text().split("## Orderings\n")[1].split("\n## ")[0]
        rows += re.findall(r"^\| ([a-z, -]+) \|", section, re.M)
    return [tag for row in rows if row != "tag" for tag in row.split(", ")]


def test_both_ends_of_each_memory_ordering_carry_its_tag() -> None:
    assert {tag: count for tag, count in tags_of_the_code().items() if count < 2} == {}


def test_the_layout_says_what_each_tag_orders_and_names_no_other() -> None:
    tags = tags_of_the_layout()
    assert sorted(tags) == sorted(tags_of_the_code())
    assert len(tags) > 15
